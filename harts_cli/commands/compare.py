"""harts compare: planners side by side on one rollout tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harts_core.errors import ConfigError, PlanError


def compare(
    tree: Annotated[Path, typer.Argument(metavar="TREE", help="Rollout-tree file, from harts ingest.")],
    dp: Annotated[str, typer.Option(metavar="D,D,…", help="Data-parallel replicas.")],
    capacity: Annotated[int, typer.Option(help="Compact tokens that a microbatch may hold.")],
    planners: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,…", help="Planners to compare. Default: all.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N,N,…", help="Seeds of the searches.")] = "0",
    pad: Annotated[int, typer.Option(help="Computed tokens are rounded up to a multiple of it.")] = 1,
    chunk: Annotated[int, typer.Option(help="Chunk length of the linear-attention kernel.")] = 64,
    cost_model: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Preset, or TOML/JSON file of unit costs.")
    ] = None,
    effort: Annotated[int, typer.Option(help="Rounds of search of planner harts.")] = 2,
    search_budget: Annotated[
        float, typer.Option(help="Deterministic seconds per shard of planner ortools-ffd.")
    ] = 1.0,
    on_too_long: Annotated[
        str, typer.Option(metavar="error|drop", help="Trajectories longer than the capacity.")
    ] = "error",
    block_tokens: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Fixed block sizes, beside the adaptive blocks of the cache."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="train.toml: the cache in bytes of its model, not in tokens."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every plan's metrics.")] = False,
) -> None:
    """Compare planners: compression, balance, cache, time. Nothing is written; every plan is validated."""
    from dataclasses import asdict

    from harts_cli.output import compiling_shown, fail, print_json, progress_bar, stdout
    from harts_cli.report.compare_view import WIDTH, compare_report
    from harts_cli.report.terminal import print_report
    from harts_core.exec.cache_bytes import cache_row_bytes
    from harts_core.exec.config import read_config
    from harts_core.exec.model_section import resolve_model_config
    from harts_core.plan.cache_policy.rows import TOKENS
    from harts_core.plan.compare import compare_planners
    from harts_core.plan.cost_model import DEFAULT_COST_MODEL, load_cost_model
    from harts_core.plan.options import PlanOptions
    from harts_core.plan.planners import PLANNERS
    from harts_core.trees.tree_file import read_tree

    replicas = _integers("--dp", dp)
    fixed = [] if block_tokens is None else _integers("--block-tokens", block_tokens)
    options = PlanOptions(
        dp=replicas[0],
        capacity=capacity,
        pad=pad,
        chunk=chunk,
        cost_model=load_cost_model(cost_model or DEFAULT_COST_MODEL),
        effort=effort,
        search_budget=search_budget,
        on_too_long=on_too_long,
    )
    sizes = TOKENS
    if config is not None:
        read = read_config(config)
        model = resolve_model_config(read.model, where=str(config))
        sizes = cache_row_bytes(model, read.runtime.dtype, tensor_parallel=read.parallel.tp)
    with progress_bar() as progress, compiling_shown(progress):
        comparison = compare_planners(
            read_tree(tree),
            planners=list(PLANNERS) if planners is None else planners.split(","),
            dp=replicas,
            seeds=_integers("--seeds", seeds),
            options=options,
            block_tokens=fixed,
            row_bytes=sizes,
            progress=progress,
        )
    if as_json:
        print_json(asdict(comparison))
    else:
        print_report(stdout(WIDTH), compare_report(str(tree), comparison))
    if not comparison.num_plans:
        fail("no planner found a plan")
        raise typer.Exit(PlanError.exit_code)


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} must be integers separated by commas, not {text!r}") from None
