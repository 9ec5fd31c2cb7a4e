"""harts train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harts_core.exec.metrics import StepMetrics


def train(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plan bundles, in order.")],
    tree: Annotated[
        list[Path],
        typer.Option("--tree", help="Rollout-tree file; repeat it where the plans belong to several."),
    ],
    config: Annotated[Path, typer.Option("--config", help="train.toml, see docs/configuration.md.")],
    out: Annotated[Path, typer.Option("--out", help="Run folder: metrics, checkpoints, resolved config.")],
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Start from these weights (Hugging Face folder).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out from its newest checkpoint, if any.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Steps of the whole run, repeating the plans. Default: one pass."
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON document at the end instead of a line per step.")
    ] = False,
) -> None:
    """Train a model on plans: one optimizer step per plan, or num_minibatches of them."""
    from harts_cli.output import compiling_shown, print_json, print_line, progress_bar, warn
    from harts_core.exec.parallel.launch import read_launch
    from harts_core.exec.run import RunOptions, state_of_run, train_run

    options = RunOptions(
        plans=tuple(plans),
        trees=tuple(tree),
        config=config,
        out=out,
        checkpoint=checkpoint,
        resume=resume,
        steps=steps,
    )
    try:
        with progress_bar() as progress, compiling_shown(progress, announce=read_launch().is_main):
            result = train_run(
                options,
                progress=progress,
                on_step=lambda metrics: None if json_output else print_line(_line(metrics)),
                on_warning=warn,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(state_of_run(out)) from None
    if not result.is_main:
        return
    if json_output:
        print_json(
            {
                "run": str(out),
                "checkpoint": str(result.checkpoint),
                "steps_before": result.steps_before,
                "steps": [metrics.to_dict() for metrics in result.steps],
            }
        )
    elif not result.steps:
        print_line(f"nothing to do: {out} has {result.steps_before} steps already")


def _line(metrics: StepMetrics) -> str:
    """One step on one line."""
    own = "  ".join(f"{name} {value:.4g}" for name, value in metrics.objective.items())
    return (
        f"step {metrics.step}  loss {metrics.loss:.8g}  "
        f"grad_norm {metrics.grad_norm:.4g}  lr {metrics.lr:.3g}  "
        f"tokens {metrics.original_tokens:,} → {metrics.compact_tokens:,}  "
        f"{metrics.tokens_per_s:,.0f} tokens/s  {own}"
    )
