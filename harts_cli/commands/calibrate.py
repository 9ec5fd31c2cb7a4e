"""harts calibrate: fit a cost model to timed units of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harts_core.exec.calibrate import Calibration


def calibrate(
    config: Annotated[
        Path, typer.Option("--config", help="train.toml: its [model], [runtime] and [parallel].")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The cost-model file, for --cost-model.")],
    capacity: Annotated[int, typer.Option(help="Tokens of the largest unit that is timed.")] = 2048,
    repeats: Annotated[int, typer.Option(help="Timed runs of every unit; the fastest counts.")] = 3,
    chunk: Annotated[int, typer.Option(help="Chunk length of the linear-attention kernel.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print times and fits as JSON.")] = False,
) -> None:
    """Time units of the configured model on its device and fit the planner's cost model to them."""
    from dataclasses import asdict

    from harts_cli.output import compiling_shown, print_json, progress_bar
    from harts_core.exec.calibrate import CalibrateOptions, calibrate_run
    from harts_core.exec.parallel.launch import read_launch

    options = CalibrateOptions(config=config, out=output, capacity=capacity, repeats=repeats, chunk=chunk)
    with progress_bar() as progress, compiling_shown(progress, announce=read_launch().is_main):
        calibration = calibrate_run(options, progress)
    if calibration is None:  # another process of the job writes and reports
        return
    if as_json:
        print_json(asdict(calibration))
    else:
        _print_summary(calibration)


def _print_summary(c: Calibration) -> None:
    from harts_cli.output import stdout
    from harts_cli.report.sections import Facts, Report, Table
    from harts_cli.report.terminal import print_report

    columns = ("unit", "tokens", "pairs", "forward ms", "off fit", "backward ms", "off fit")
    rows = tuple(
        (
            t.shape,
            f"{t.tokens:,}",
            f"{t.pairs:,}",
            f"{1e3 * t.forward_s:.3f}",
            f"{100 * forward:+.1f} %",
            f"{1e3 * t.backward_s:.3f}",
            f"{100 * backward:+.1f} %",
        )
        for t, forward, backward in zip(c.timings, c.forward.residuals, c.backward.residuals, strict=True)
    )
    fits = tuple(
        (
            name,
            f"{fit.alpha:.4g} s a token, {fit.beta:.4g} s a pair, {fit.overhead:.4g} s a unit, "
            f"R² {fit.r_squared:.4f}",
        )
        for name, fit in (("forward", c.forward), ("backward", c.backward))
    )
    degrees = f"dp {c.dp} · tp {c.tp} · pp {c.pp} · ep {c.ep}"
    settings = (("device", c.device), ("parallel", degrees), ("dtype", c.dtype), ("recompute", c.recompute))
    report = Report(
        title=f"Cost model {c.output}",
        sections=(
            Facts(title="Fit", items=(*settings, *fits)),
            Table(title="Units", columns=columns, rows=rows),
        ),
    )
    print_report(stdout(), report)
