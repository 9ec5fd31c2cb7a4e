"""harts inspect: look into rollout trees, plans, their pipeline schedules and caches, and compare plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from harts_cli.report.sections import Report

app = typer.Typer(
    help="Look into rollout trees, plans, pipeline schedules and caches, compare plans.", no_args_is_help=True
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Also write the report as one self-contained HTML page.")
]
GateOption = Annotated[
    list[str] | None,
    typer.Option("--fail-under", metavar="METRIC=VALUE", help="Exit 1 if the metric is lower; repeatable."),
]


@app.command("tree")
def tree(
    file: Annotated[Path, typer.Argument(help="Rollout-tree file.")],
    json: JsonOption = False,
    html: HtmlOption = None,
    fail_under: GateOption = None,
) -> None:
    """Show what a rollout tree shares: rows, lengths, forks, compression, groups."""
    from harts_cli.output import compiling_shown
    from harts_cli.report.gates import missed_gates, parse_gates
    from harts_cli.report.tree_view import tree_report
    from harts_core.trees.statistics import tree_statistics
    from harts_core.trees.tree_file import read_tree

    gates = parse_gates(fail_under or [])
    with compiling_shown():
        statistics = tree_statistics(read_tree(file))
    missed = missed_gates(gates, statistics.metrics)
    _show(statistics, tree_report(str(file), statistics), json=json, html=html, inputs=(file,))
    _stop_if(missed)


@app.command("plan")
def plan(
    bundle: Annotated[Path, typer.Argument(help="Plan bundle (folder).")],
    tree_file: Annotated[
        Path | None, typer.Option("--tree", help="Its rollout-tree file: check the plan against it first.")
    ] = None,
    json: JsonOption = False,
    html: HtmlOption = None,
    fail_under: GateOption = None,
) -> None:
    """Show a plan: metrics, replicas, slots, windows, rounds, fill."""
    from harts_cli.output import compiling_shown
    from harts_cli.report.gates import missed_gates, parse_gates
    from harts_cli.report.plan_view import plan_sections
    from harts_core.plan.bundle_file import read_bundle
    from harts_core.plan.report import plan_report
    from harts_core.plan.validate import validate_plan
    from harts_core.trees.tree_file import read_tree

    gates = parse_gates(fail_under or [])
    loaded = read_bundle(bundle)
    with compiling_shown():
        if tree_file is not None:
            validate_plan(loaded, read_tree(tree_file))
        report = plan_report(loaded, validated=tree_file is not None)
    missed = missed_gates(gates, report.metrics)
    _show(report, plan_sections(str(bundle), report), json=json, html=html, inputs=(bundle, tree_file))
    _stop_if(missed)


@app.command("schedule")
def schedule(
    bundle: Annotated[Path, typer.Argument(help="Plan bundle (folder).")],
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")] = 2,
    kind: Annotated[
        Literal["harts", "non-overlapping", "backward-first", "all"],
        typer.Option("--schedule", help="The schedule to show."),
    ] = "all",
    replica: Annotated[
        int | None, typer.Option("--replica", help="The replica to draw. Default: the slowest.")
    ] = None,
    lag: Annotated[
        int,
        typer.Option(
            "--lag", min=1, help="Consumers by which a stage's backwards lag behind the next stage's."
        ),
    ] = 2,
    max_live_producers: Annotated[
        int | None,
        typer.Option("--max-live-producers", min=0, help="On a stage. Default: P per level of producers."),
    ] = None,
    json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Simulate a plan's pipeline schedules: Gantt chart, makespan, bubbles, live producers."""
    from harts_cli.report.schedule_view import schedule_report
    from harts_core.plan.bundle_file import read_bundle
    from harts_core.plan.schedule.pipeline import SCHEDULES
    from harts_core.plan.schedule.report import pipeline_report

    report = pipeline_report(
        read_bundle(bundle),
        num_stages=pp,
        kinds=SCHEDULES if kind == "all" else (kind,),
        replica=replica,
        lag=lag,
        max_live_producers=max_live_producers,
    )
    _show(report, schedule_report(str(bundle), report), json=json, html=html, inputs=(bundle,))


@app.command("memory")
def memory(
    bundle: Annotated[Path, typer.Argument(help="Plan bundle (folder).")],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="train.toml: count bytes of its model, not tokens."),
    ] = None,
    tree_file: Annotated[
        Path | None,
        typer.Option("--tree", help="Its rollout-tree file: check the plan, count hidden states for heads."),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", min=0, help="Of a replica's cache. Default: the config's, or half the peak."
        ),
    ] = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="As harts logprob runs the plan: without backwards.")
    ] = False,
    json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Simulate a plan's cache: memory over the microbatches under several policies."""
    from harts_cli.output import compiling_shown
    from harts_cli.report.memory_view import memory_sections
    from harts_core.exec.cache_bytes import cache_row_bytes
    from harts_core.exec.config import read_config
    from harts_core.exec.model_section import resolve_model_config
    from harts_core.plan.bundle_file import read_bundle
    from harts_core.plan.cache_policy.report import memory_report
    from harts_core.plan.cache_policy.rows import TOKENS
    from harts_core.plan.recompute import Recompute
    from harts_core.plan.validate import validate_plan
    from harts_core.trees.tree_file import read_tree

    sizes = TOKENS
    recompute: Recompute = "none"
    if config is not None:
        read = read_config(config)
        model = resolve_model_config(read.model, where=str(config))
        sizes = cache_row_bytes(model, read.runtime.dtype, tensor_parallel=read.parallel.tp)
        recompute = read.runtime.recompute
        if budget is None:
            budget = read.runtime.memory_budget_bytes or None
    loaded = read_bundle(bundle)
    with compiling_shown():
        loaded_tree = None if tree_file is None else read_tree(tree_file)
        if loaded_tree is not None:
            validate_plan(loaded, loaded_tree)
        report = memory_report(
            loaded,
            row_bytes=sizes,
            tree=loaded_tree,
            budget=budget,
            recompute=recompute,
            forward_only=forward_only,
        )
    inputs = tuple(path for path in (bundle, config, tree_file) if path is not None)
    _show(report, memory_sections(str(bundle), report), json=json, html=html, inputs=inputs)


@app.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(help="Plan bundle.")],
    b: Annotated[Path, typer.Argument(help="Plan bundle to compare with it.")],
    json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Compare two plans; exit 1 if they differ (clock times are not compared)."""
    from harts_cli.report.diff_view import diff_report
    from harts_core.plan.bundle_file import read_bundle
    from harts_core.plan.diff import diff_plans

    result = diff_plans(read_bundle(a), read_bundle(b))
    _show(result, diff_report(str(a), str(b), result), json=json, html=html, inputs=(a, b))
    if not result.same:
        raise typer.Exit(1)


def _show(
    data: Any, report: Report, *, json: bool, html: Path | None, inputs: tuple[Path | None, ...]
) -> None:
    """Print a report (``data``: the dataclass that --json prints) and write its HTML page (on no input)."""
    from dataclasses import asdict

    from harts_cli.output import print_json, stdout
    from harts_cli.report.html import write_html
    from harts_cli.report.terminal import print_report
    from harts_core.files import refuse_inputs

    if html is not None:
        refuse_inputs(html, (path for path in inputs if path is not None))
        write_html(html, report)
    if json:
        print_json(asdict(data))
    else:
        print_report(stdout(), report)


def _stop_if(missed: list[str]) -> None:
    """Exit 1 with the sentences, if there are any."""
    from harts_cli.output import fail

    for sentence in missed:
        fail(sentence)
    if missed:
        raise typer.Exit(1)
