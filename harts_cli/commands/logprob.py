"""harts logprob."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Column(StrEnum):
    """Which column to fill."""

    old = "old"
    ref = "ref"


def logprob(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan bundle of the tree.")],
    tree: Annotated[Path, typer.Option("--tree", help="Rollout-tree file.")],
    config: Annotated[Path, typer.Option("--config", help="train.toml, see docs/configuration.md.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Rollout-tree file to write.")],
    column: Annotated[Column, typer.Option("--as", help="Fill old_logprobs or ref_logprobs.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Weights: a Hugging Face folder or a checkpoint of a run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Fill in old or reference log-probabilities with a forward-only pass that shares as the plan does.

    The new file has another content hash: plan it again before training on it.
    """
    from dataclasses import asdict

    from harts_cli.output import compiling_shown, print_json, print_line, progress_bar, warn
    from harts_core.exec.logprob import LogprobOptions, logprob_run
    from harts_core.exec.parallel.launch import read_launch

    options = LogprobOptions(
        plan=plan,
        tree=tree,
        config=config,
        out=output,
        column="old" if column is Column.old else "ref",
        checkpoint=checkpoint,
    )
    with progress_bar() as progress, compiling_shown(progress, announce=read_launch().is_main):
        report = logprob_run(options, progress)
    if report is None:  # another process of the job writes and reports
        return
    if report.rows_not_in_plan:
        warn(f"{report.rows_not_in_plan} rows are not in the plan; their {report.column} are null")
    if as_json:
        print_json(asdict(report))
        return
    print_line(
        f"{report.output}: {report.column} of {report.positions:,} positions in {report.rows:,} rows, "
        f"mean {report.mean_logprob:.6g}; {report.original_tokens:,} tokens from {report.computed_tokens:,} "
        f"computed, {report.tokens_per_s:,.0f} tokens/s"
    )
