"""harts inspect."""

from __future__ import annotations

import typer

app = typer.Typer(help="Look into trees, plans, schedules.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass
