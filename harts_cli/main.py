"""The ``harts`` program: registers the commands, and turns what stops one into a message and an exit code.

0: done. 1: a limit was missed or plans differ. 2 to 5: a HartsError (``harts_core.errors`` draws the tree); 3
also where the operating system refuses to read or write. 130: Ctrl-C. 141: the reader of stdout went away.
Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from harts_cli.commands import (
    calibrate,
    compare,
    export,
    export_weights,
    ingest,
    inspect,
    logprob,
    plan,
    synth,
    train,
)
from harts_core import __version__
from harts_core.errors import DataError, HartsError

INTERRUPTED = 130
PIPE_CLOSED = 141
"""128 + SIGPIPE: what a shell reports of any program whose reader went away."""


@contextmanager
def _boundary() -> Iterator[None]:
    """Turn what stops a command into its message on stderr and its exit code."""
    try:
        yield
    except HartsError as error:
        _stop(error)
    except BrokenPipeError:
        _discard_stdout()
        sys.exit(PIPE_CLOSED)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich, which prints help and tables, exits with 1
            sys.exit(PIPE_CLOSED)
        raise
    except OSError as error:
        _discard_stdout()  # it may be what failed; the interpreter would flush it once more
        reason = error.strerror or str(error)
        _stop(DataError(f"reading or writing failed ({reason})", where=error.filename or "standard output"))
    except KeyboardInterrupt as error:
        sys.stderr.write(f"interrupted; {str(error) or 'nothing was written'}\n")
        sys.exit(INTERRUPTED)


def _stop(error: HartsError) -> None:
    if os.environ.get("HARTS_DEBUG") == "1":
        raise error
    sys.stderr.write(f"error: {error.what}\n")
    if error.where:
        sys.stderr.write(f"  where: {error.where}\n")
    if error.hint:
        sys.stderr.write(f"  hint:  {error.hint}\n")
    sys.exit(error.exit_code)


def _discard_stdout() -> None:
    """Point stdout at nothing, so that what is still buffered cannot fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


class _Program(TyperGroup):
    """The command group. Typer itself would end silently on Ctrl-C, and with 1 when a pipe is closed."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line (``--help`` and ``--version`` print here) within the boundary."""
        with _boundary():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command within the boundary."""
        with _boundary():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Program,
    name="harts",
    help="Train on rollout trees: compute each shared prefix once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("synth")(synth.synth)
app.command("ingest")(ingest.ingest)
app.command("plan")(plan.plan)
app.command("compare")(compare.compare)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(inspect.app, name="inspect")
app.command("train")(train.train)
app.command("logprob")(logprob.logprob)
app.command("export")(export.export)
app.command("export-weights")(export_weights.export_weights)


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"harts {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program; the process ends with the exit code of this module's docstring."""
    with _boundary():
        try:
            app()
        finally:
            sys.stdout.flush()


if __name__ == "__main__":
    main()
