"""The ``harts`` program: registers the commands and turns HartsErrors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from harts_cli.commands import calibrate, compare, export, ingest, inspect, logprob, plan, synth, train
from harts_core import __version__
from harts_core.errors import HartsError

app = typer.Typer(
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
    """Run the program; the process's exit code is 0, or the failing error's (2–5), or 130 on Ctrl-C."""
    try:
        app()
    except HartsError as error:
        if os.environ.get("HARTS_DEBUG") == "1":
            raise
        sys.stderr.write(f"error: {error.what}\n")
        if error.where:
            sys.stderr.write(f"  where: {error.where}\n")
        if error.hint:
            sys.stderr.write(f"  hint:  {error.hint}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
