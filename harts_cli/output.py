"""The one sink of the command line: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harts_core.progress import Progress, no_progress

if TYPE_CHECKING:
    from rich.console import Console

    from harts_core.compiling import CompileClock


COMPILING = "compiling kernels (first use; kept for later runs)\n"


def stdout(min_width: int = 0) -> Console:
    """A console for reports (stdout is data).

    Args:
        min_width: characters that a line may have even where the terminal is narrower.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.width = max(console.width, min_width)
    return console


def stderr() -> Console:
    """A console for warnings, progress and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, keys in the given order; NaN and infinity are refused."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_text(text: str) -> None:
    """Print one line of plain text on stdout; brackets in file names are not markup."""
    sys.stdout.write(text + "\n")


def fail(message: str) -> None:
    """Print why the exit code will not be 0 (a limit that was missed, plans that differ) on stderr."""
    sys.stderr.write(f"fail: {message}\n")


def print_line(text: str) -> None:
    """Print one line of data on stdout; on a terminal it appears above the progress bars."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def warn(message: str) -> None:
    """Print one warning on stderr."""
    sys.stderr.write(f"warning: {message}\n")


@contextmanager
def compiling_shown(progress: Progress = no_progress, *, announce: bool = True) -> Iterator[CompileClock]:
    """Say once, in the progress or as a line on stderr, that kernels are being compiled; yield the clock.

    Args:
        progress: of ``progress_bar``.
        announce: False: say nothing (all but the first of a job's processes).
    """
    from harts_core.compiling import compile_clock

    def show() -> None:
        if not announce:
            return
        if progress is no_progress:
            sys.stderr.write(COMPILING)
        else:
            progress("compiling kernels (first use)", 0, None)

    with compile_clock(show) as clock:
        yield clock


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a progress callback that draws bars on stderr, one per phase; silent off a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr(),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # otherwise data for a pipe would go to stderr's terminal
    ) as bars:
        tasks: dict[str, Any] = {}

        def report(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield report
