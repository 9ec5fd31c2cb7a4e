"""harts export-weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export_weights(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of a run, in either format.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for config.json and weights.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the weights of a run's checkpoint as a Hugging Face folder.

    One process does, with one tensor in memory at a time, whatever number of processes wrote the checkpoint.
    """
    from dataclasses import asdict

    from harts_cli.output import print_json, print_line, progress_bar
    from harts_core.exec.export_weights import export_weights as export

    with progress_bar() as progress:
        report = export(checkpoint, output, progress)
    if as_json:
        print_json(asdict(report))
    else:
        size = f"{report.tensors:,} tensors, {report.bytes:,} bytes"
        print_line(f"{report.output}: weights of step {report.step}, {report.dtype}, {size}")
