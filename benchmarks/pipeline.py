"""What pipeline schedules cost: simulated makespans of consumer 1F1B and its two rivals at the paper's size.

Each workload is planned for every D; the first table compares the schedules at every P, the second shows what
a larger lag of the backwards buys, and in how many more tokens' activations. The estimate beside the measured
ratio is 1 + (W − 1)·(P − 1) / (U + P − 1): a replica has U units (microbatches and producers) in W windows,
and at each of the W − 1 bounds a drained pipeline loses P − 1 units. Markdown on stdout, progress on stderr.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --kinds tree-step --dp 8 --stages 2 4
    python benchmarks/pipeline.py --plan plan/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.bundle_file import read_bundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.report import PipelineReport, pipeline_report
from harts_core.trees.build import build_tree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec


def plans(arguments: argparse.Namespace) -> Iterator[tuple[str, PlanBundle]]:
    """Name and plan, of the given folders or of every workload and D."""
    for folder in arguments.plan:
        yield folder.name, read_bundle(folder)
    for kind in () if arguments.plan else arguments.kinds:
        print(f"making {kind}", file=sys.stderr, flush=True)
        tree = build_tree(generate(workload_spec(kind=kind, preset="paper", seed=arguments.seed)))
        for dp in arguments.dp:
            print(f"planning {kind} for {dp} replicas", file=sys.stderr, flush=True)
            options = PlanOptions(planner="harts", dp=dp, capacity=arguments.capacity, seed=arguments.seed)
            yield f"{kind}, D = {dp}", plan_tree(tree, options)


def num_runs(bundle: PlanBundle) -> int:
    """Windows one after the other: runs of slots with one innermost window."""
    first = bundle.units_of_replica(0)
    window = bundle.units.window[first][bundle.units.kind[first] == CONSUMER]
    return 1 + int((window[1:] != window[:-1]).sum())


def comparison_line(name: str, bundle: PlanBundle, report: PipelineReport) -> str:
    """One row of the first table."""
    ours, apart, backward_first = report.schedules
    windows, stages = num_runs(bundle), report.stages
    units = float(np.bincount(bundle.units.replica).mean())
    estimate = 1 + (windows - 1) * (stages - 1) / (units + stages - 1)
    producers = max(max(r.peak_producers) for r in ours.replicas)
    return (
        f"| {name} | {report.slots} | {windows} | {stages} | {apart.slowdown:.3f} ({estimate:.2f}) | "
        f"{backward_first.slowdown:.3f} | {ours.bubble_share:.1%} | {apart.bubble_share:.1%} | "
        f"{backward_first.bubble_share:.1%} | {producers} |"
    )


def lag_line(name: str, bundle: PlanBundle, stages: int, lags: list[int]) -> str:
    """One row of the second table: makespan and activation tokens, over those of the first lag."""
    found = []
    for lag in lags:
        report = pipeline_report(bundle, num_stages=stages, lag=lag)
        ours, apart = report.schedules[:2]
        tokens = max(max(r.peak_activation_tokens) for r in ours.replicas)
        found.append((ours.makespan, tokens, apart.slowdown))
    span, tokens, _ = found[0]
    cells = (f"{s / span:.3f} ({t / tokens:.2f}); {slowdown:.3f}" for s, t, slowdown in found)
    return f"| {name} | {stages} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plan", type=Path, nargs="+", default=[])
    parser.add_argument("--kinds", nargs="+", default=["tree-step", "step"])
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--capacity", type=int, default=65_536)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    compared, lagged = [], []
    for name, bundle in plans(arguments):
        for stages in arguments.stages:
            report = pipeline_report(bundle, num_stages=stages)
            compared.append(comparison_line(name, bundle, report))
            lagged.append(lag_line(name, bundle, stages, arguments.lags))
    columns = (
        "plan",
        "slots",
        "windows",
        "P",
        "non-overlapping ÷ harts (estimate)",
        "backward-first ÷ harts",
        "bubbles: harts",
        "non-overlapping",
        "backward-first",
        "live producers",
    )
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    print("\n".join(compared) + "\n")
    print(
        "| makespan (activation tokens); non-overlapping ÷ harts | P | "
        + " | ".join(f"lag {lag}" for lag in arguments.lags)
        + " |"
    )
    print("|---" * (2 + len(arguments.lags)) + "|")
    print("\n".join(lagged))


if __name__ == "__main__":
    main()
