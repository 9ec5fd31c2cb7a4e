"""harts synth: make a seeded synthetic rollout workload."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Kind(StrEnum):
    """How rollouts become rows."""

    TRAJECTORY = "trajectory"
    TREE = "tree"
    STEP = "step"
    STEP_NO_THINK = "step-no-think"
    STEP_SUMMARY = "step-summary"
    TREE_STEP = "tree-step"


class Preset(StrEnum):
    """Sizes of prompts, turns and groups."""

    TINY = "tiny"
    PAPER = "paper"


def synth(
    output: Annotated[Path, typer.Option("-o", "--output", help="Parquet file of HARTS rows to write.")],
    kind: Annotated[Kind, typer.Option(help="How rollouts become rows.")] = Kind.TREE_STEP,
    preset: Annotated[
        Preset, typer.Option(help="tiny: toy rows of a few hundred tokens; paper: 43.5M tokens (tree-step).")
    ] = Preset.TINY,
    rows: Annotated[
        int | None, typer.Option(help="Rows to make, by adding tasks. Default: the preset's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    step: Annotated[int, typer.Option(help="Training step: other tasks, the same system prompt.")] = 0,
    vocab_size: Annotated[
        int | None, typer.Option(help="Token ids are below it. Default: the preset's.")
    ] = None,
    length_scale: Annotated[
        int, typer.Option(help="n: put n − 1 dummy tokens after every token; lengths grow n-fold.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make a seeded synthetic rollout workload.

    The same options always give the same rows: tasks that share a system prompt, multi-turn rollouts, forks
    inside turns, exact duplicates, prefix rows, rewards, group-relative advantages and old log-probs.
    """
    from dataclasses import asdict

    from harts_cli.output import print_json, print_text, progress_bar
    from harts_core.trees.synth import workload_spec, write_rows

    spec = workload_spec(
        kind=kind.value,
        preset=preset.value,
        rows=rows,
        seed=seed,
        step=step,
        vocab_size=vocab_size,
        length_scale=length_scale,
    )
    with progress_bar() as progress:
        summary = write_rows(output, spec, progress)
    if json:
        print_json(asdict(summary))
        return
    print_text(
        f"{output}: {summary.rows:,} rows of {summary.tasks} tasks, {summary.tokens:,} tokens "
        f"(mean {summary.mean_length:,.0f}, longest {summary.max_length:,}), "
        f"{summary.trained_positions:,} trained positions"
    )
