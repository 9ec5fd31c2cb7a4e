"""harts plan: from a rollout-tree file to a validated plan bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harts_core.plan.bundle import PlanBundle


def plan(
    tree: Annotated[Path, typer.Argument(metavar="TREE", help="Rollout-tree file, from harts ingest.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan bundle, a folder.")],
    dp: Annotated[int, typer.Option(help="Data-parallel replicas.")],
    capacity: Annotated[int, typer.Option(help="Compact tokens that a microbatch may hold.")],
    planner: Annotated[
        str,
        typer.Option(help="harts, or one to compare with: harts-l1, ortools-ffd, psrl, expanded, …"),
    ] = "harts",
    pad: Annotated[int, typer.Option(help="Computed tokens are rounded up to a multiple of it.")] = 1,
    chunk: Annotated[int, typer.Option(help="Chunk length of the linear-attention kernel.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    cost_model: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Preset, or TOML/JSON file of unit costs.")
    ] = None,
    producer_capacity: Annotated[
        int | None, typer.Option(help="Tokens that a producer may compute. Default: the capacity.")
    ] = None,
    max_live_producers: Annotated[
        int, typer.Option(help="Producers that may be alive at once on a replica.")
    ] = 2,
    max_window_slots: Annotated[
        int | None,
        typer.Option(help="Slots that may share an inner producer (planner harts)."),
    ] = None,
    effort: Annotated[int, typer.Option(help="Rounds of search of planner harts.")] = 2,
    time_budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="Add whole rounds of search for so long.")
    ] = 0.0,
    search_budget: Annotated[
        float, typer.Option(help="Deterministic seconds per shard of planner ortools-ffd.")
    ] = 1.0,
    on_too_long: Annotated[
        str,
        typer.Option(metavar="error|drop|split", help="Trajectories longer than the capacity."),
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="Print parameters, metrics and times.")] = False,
) -> None:
    """Plan a rollout tree for training. Every plan passes an independent validator before it is written."""
    import time
    from dataclasses import replace

    from harts_cli.output import compiling_shown, print_json, progress_bar
    from harts_core.files import refuse_inputs
    from harts_core.plan.bundle_file import write_bundle
    from harts_core.plan.cost_model import DEFAULT_COST_MODEL, load_cost_model
    from harts_core.plan.options import PlanOptions
    from harts_core.plan.plan_tree import plan_tree
    from harts_core.trees.tree_file import read_tree

    refuse_inputs(output, [tree, *([Path(cost_model)] if cost_model else [])])
    options = PlanOptions(
        dp=dp,
        capacity=capacity,
        planner=planner,
        pad=pad,
        chunk=chunk,
        seed=seed,
        cost_model=load_cost_model(cost_model or DEFAULT_COST_MODEL),
        producer_capacity=producer_capacity,
        max_live_producers=max_live_producers,
        max_window_slots=max_window_slots,
        effort=effort,
        time_budget_s=time_budget,
        search_budget=search_budget,
        on_too_long=on_too_long,
    )
    start = time.perf_counter()
    with progress_bar() as progress, compiling_shown(progress) as clock:
        rollouts = read_tree(tree)
        read_s = time.perf_counter() - start
        bundle = plan_tree(rollouts, options, progress)
    runtime = {"read_s": read_s, "compile_s": clock.seconds, **bundle.runtime}
    runtime["planning_s"] += read_s - clock.seconds
    bundle = replace(bundle, runtime=runtime)
    manifest = write_bundle(output, bundle)
    if as_json:
        print_json({"output": str(output), **manifest, "runtime": runtime})
    else:
        _print_summary(bundle, output)


def _print_summary(bundle: PlanBundle, output: Path) -> None:
    from rich.markup import escape
    from rich.table import Table

    from harts_cli.output import stdout, warn

    m, t = bundle.metrics, bundle.runtime
    dropped = bundle.parameters["dropped_rows"]
    if dropped:
        warn(f"{len(dropped)} trajectories longer than the capacity were dropped (listed in plan.json)")
    table = Table(title=escape(f"{output} ({bundle.planner})"), title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("bound", justify="right")
    rows: list[tuple[str, str, str]] = [
        ("original tokens", f"{m['original_tokens']:,}", ""),
        ("trie tokens", f"{m['trie_tokens']:,}", ""),
        ("computed tokens", f"{m['residual_tokens'] + m['producer_tokens']:,}", ""),
        ("within-microbatch compression", f"{m['within_compression']:.3f}", f"{m['bound_within']:.3f}"),
        ("decoder compression", f"{m['decoder_compression']:.3f}", f"{m['bound_decoder']:.3f}"),
        ("balance", f"{m['balance']:.4f}", "1"),
        ("effective compression", f"{m['effective_compression']:.3f}", f"{m['bound_decoder']:.3f}"),
        ("slot balance, 5th percentile", f"{m['slot_balance_p5']:.4f}", "1"),
        ("step balance", f"{m['step_balance']:.4f}", "1"),
        ("producer tokens in windows", f"{m['producer_tokens']:,} in {m['num_windows']:,}", ""),
        ("microbatches in slots", f"{m['num_consumers']:,} in {m['num_slots']:,}", ""),
        ("linear-attention calls", f"{m['num_rounds']:,}", ""),
        ("replay tokens", f"{m['replay_tokens']:,}", ""),
        ("seconds", f"{t['planning_s']:.3f}", ""),
        *((f"  {name}", f"{t[f'{name}_s']:.3f}", "") for name in ("read", "plan", "rounds", "validate")),
        *(
            [("compiling, first use (in the parts, not in the sum)", f"{t['compile_s']:.3f}", "")]
            if t["compile_s"]
            else []
        ),
    ]
    for row in rows:
        table.add_row(*row)
    stdout().print(table)
