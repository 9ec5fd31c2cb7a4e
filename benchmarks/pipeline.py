"""What pipeline schedules cost: simulated makespans of consumer 1F1B and its two rivals at the paper's size.

Each workload is planned for every D with every limit on the slots of a window. The first table compares the
schedules at every P: makespans and activation tokens are over those of ``harts`` on the plan with the first
limit. The second shows what the lag of the backwards buys on that plan, and in how many more tokens'
activations. Medians over the seeds. Markdown on stdout, progress on stderr.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --kinds tree-step --dp 8 --stages 2 4 --seeds 0
    python benchmarks/pipeline.py --tree tree.arrow
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.pipeline import DEFAULT_LAG, SCHEDULES
from harts_core.plan.schedule.report import PipelineReport, pipeline_report
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec
from harts_core.trees.tree_file import read_tree


def workloads(arguments: argparse.Namespace) -> Iterator[tuple[str, list[RolloutTree]]]:
    """Name and trees: the given files, or those of every kind."""
    if arguments.tree:
        yield "files", [read_tree(path) for path in arguments.tree]
        return
    for kind in arguments.kinds:
        print(f"making {kind}", file=sys.stderr, flush=True)
        specs = [workload_spec(kind=kind, preset="paper", seed=seed) for seed in arguments.seeds]
        yield kind, [build_tree(generate(spec)) for spec in specs]


def plan(tree: RolloutTree, dp: int, limit: int, arguments: argparse.Namespace) -> PlanBundle:
    """A plan of the planner harts; limit 0: none."""
    return plan_tree(tree, PlanOptions(dp=dp, capacity=arguments.capacity, max_window_slots=limit or None))


def num_runs(bundle: PlanBundle) -> int:
    """Windows one after the other: runs of slots with one innermost window."""
    first = bundle.units_of_replica(0)
    window = bundle.units.window[first][bundle.units.kind[first] == CONSUMER]
    return 1 + int((window[1:] != window[:-1]).sum())


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of each column."""
    return np.median(np.array(rows, float), axis=0).tolist()


def peak_tokens(report: PipelineReport) -> int:
    """Most activation tokens alive on a stage, schedule harts."""
    return max(max(replica.peak_activation_tokens) for replica in report.schedules[0].replicas)


def window_lines(name: str, dp: int, trees: list[RolloutTree], arguments: argparse.Namespace) -> list[str]:
    """The first table's rows of one workload and D: for each limit and P one."""
    lines, first = [], {}
    for limit in arguments.max_window_slots:
        bundles = [plan(tree, dp, limit, arguments) for tree in trees]
        about = []
        for bundle in bundles:
            m = bundle.metrics
            about.append([m["num_slots"], num_runs(bundle), m["decoder_compression"], m["balance"]])
        slots, runs, decoder, balance = medians(about)
        for stages in arguments.stages:
            found = []
            for i, bundle in enumerate(bundles):
                report = pipeline_report(bundle, num_stages=stages)
                spans = [line.makespan for line in report.schedules]
                base, tokens = first.setdefault((i, stages), (spans[0], peak_tokens(report)))
                found.append(
                    [*(span / base for span in spans), peak_tokens(report) / tokens]
                    + [line.slowdown for line in report.schedules[1:]]
                )
            ours, apart, backward, tokens, over, over_backward = medians(found)
            lines.append(
                f"| {name}, D = {dp} | {limit or 'none'} | {slots:g} | {runs:g} | {decoder:.2f} | "
                f"{balance:.3f} | {stages} | {ours:.3f} | {apart:.3f} | {backward:.3f} | {over:.2f} | "
                f"{over_backward:.2f} | {tokens:.2f} |"
            )
    return lines


def lag_lines(name: str, dp: int, trees: list[RolloutTree], arguments: argparse.Namespace) -> list[str]:
    """The second table's rows: for each lag its makespan and activation tokens, over those of the first."""
    lines = []
    bundles = [plan(tree, dp, arguments.max_window_slots[0], arguments) for tree in trees]
    for stages in arguments.stages:
        cells = []
        base: list[tuple[float, int]] = []
        for lag in arguments.lags:
            reports = [pipeline_report(b, num_stages=stages, kinds=SCHEDULES[:1], lag=lag) for b in bundles]
            now = [(report.schedules[0].makespan, peak_tokens(report)) for report in reports]
            base = base or now
            span, tokens = medians([(s / s0, t / t0) for (s, t), (s0, t0) in zip(now, base, strict=True)])
            cells.append(f"{span:.3f} | {tokens:.2f}")
        lines.append(f"| {name}, D = {dp} | {stages} | " + " | ".join(cells) + " |")
    return lines


def print_table(columns: Sequence[str], lines: list[str]) -> None:
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    print("\n".join(lines) + "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", type=Path, nargs="+", default=[])
    parser.add_argument("--kinds", nargs="+", default=["tree-step", "step"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--max-window-slots", type=int, nargs="+", default=[0, 6, 4, 3], help="0: no limit")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--capacity", type=int, default=65_536)
    arguments = parser.parse_args()
    windows: list[str] = []
    lags: list[str] = []
    for name, trees in workloads(arguments):
        for dp in arguments.dp:
            print(f"planning {name} for {dp} replicas", file=sys.stderr, flush=True)
            windows += window_lines(name, dp, trees, arguments)
            lags += lag_lines(name, dp, trees, arguments)
    print(f"lag {DEFAULT_LAG}; makespans of harts, non-overlapping, backward-first\n")
    columns = ["plan", "most slots", "slots", "windows", "decoder", "balance", "P", *SCHEDULES]
    print_table([*columns, "non-overlapping ÷ harts", "backward-first ÷ harts", "tokens"], windows)
    print_table(["plan", "P", *(name for lag in arguments.lags for name in (f"lag {lag}", "tokens"))], lags)


if __name__ == "__main__":
    main()
