"""Decoder compression × balance of the planner harts over seconds, by effort.

For every effort (rounds of search) one line: the medians over trees of what a plan reaches, and of the
seconds it takes (placement, call plans, validation; reading the file is not counted). Any process that
shares the cores shows in the seconds; ``cpu`` does not count it.

    python benchmarks/two_level_curve.py                            # tree-step, seeds 0-2, D = 8
    python benchmarks/two_level_curve.py --kind step --dp 2 4 8 16 32 --efforts 2
    python benchmarks/two_level_curve.py --tree a.arrow b.arrow --capacity 65536
    python benchmarks/two_level_curve.py --copies 1 10 100 --efforts 1 --seeds 0     # scale
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import build_tree
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec
from harts_core.trees.tree_file import read_tree


def trees(arguments: argparse.Namespace) -> Iterator[tuple[str, RolloutTree]]:
    """(name, tree) of everything to plan."""
    if arguments.tree:
        for path in arguments.tree:
            yield path.stem, read_tree(path)
        return
    for seed in arguments.seeds:
        spec = workload_spec(kind=arguments.kind, preset="paper", seed=seed)
        yield f"{arguments.kind} {seed}", build_tree(generate(spec))


def copied(tree: RolloutTree, copies: int) -> RolloutTree:
    """The columns that planning reads, for as many copies of all tasks under the one system prompt.

    Planning reads lengths and shared prefixes only, so the tokens themselves are left out.
    """
    if copies == 1:
        return tree
    n = tree.num_rows * copies
    lcp = np.tile(tree.lcp, copies)
    lcp[:: tree.num_rows] = int(tree.lcp[1:].min())
    lcp[0] = 0
    nothing = Ragged(offsets=np.zeros(n + 1, np.int64), values=np.empty(0, np.int32))
    return RolloutTree(
        trajectory_id=tuple(map(str, range(n))),
        group_id=tree.group_id * copies,
        length=np.tile(tree.length, copies),
        lcp=lcp,
        suffix=nothing,
        loss_spans=nothing,
        metadata={"content_sha256": tree.content_sha256},
    )


def report(name: str, planned: list[RolloutTree], options: PlanOptions) -> None:
    """Plan every tree and print one line of medians."""
    lines = []
    for tree in planned:
        started = time.process_time()
        bundle = plan_tree(tree, options)
        m = bundle.metrics
        lines.append(
            (
                m["effective_compression"], m["effective_compression"] / m["bound_decoder"],
                m["decoder_compression"] / m["bound_decoder"], m["balance"], m["slot_balance_p5"],
                m["step_balance"], m["within_compression"], m["num_slots"], m["num_windows"],
                bundle.runtime["planning_s"], time.process_time() - started,
            )
        )  # fmt: skip
    (product, of_bound, decoder, balance, p5, step, within, slots, windows, seconds, cpu) = map(
        statistics.median, zip(*lines, strict=True)
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{name:<18} D {options.dp:>2}  effort {options.effort:>3}  decoder x balance {product:.3f} "
        f"({of_bound:.1%} of the bound)  decoder {decoder:.1%}  balance {balance:.4f}  P5 {p5:.3f}  "
        f"step {step:.4f}  within {within:.3f}  slots {slots:g}  windows {windows:g}  "
        f"{seconds:.2f} s  cpu {cpu:.2f} s  {memory:.1f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", type=Path, nargs="+")
    parser.add_argument("--kind", default="tree-step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dp", type=int, nargs="+", default=[8])
    parser.add_argument("--capacity", type=int, default=65_536)
    parser.add_argument("--efforts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--copies", type=int, nargs="+", default=[1], help="multiples of every tree's tasks")
    parser.add_argument("--each", action="store_true", help="one line per tree, not medians")
    arguments = parser.parse_args()
    loaded = list(trees(arguments))
    plan_tree(loaded[0][1], PlanOptions(dp=arguments.dp[0], capacity=arguments.capacity, effort=1))  # compile
    groups = [(name, [tree]) for name, tree in loaded]
    if not arguments.each:
        groups = [(f"{len(loaded)} trees", [tree for _, tree in loaded])]
    for name, group in groups:
        for copies in arguments.copies:
            planned = [copied(tree, copies) for tree in group]
            label = name if copies == 1 else f"{name}, {planned[0].num_rows} rows"
            for dp in arguments.dp:
                for effort in arguments.efforts:
                    report(label, planned, PlanOptions(dp=dp, capacity=arguments.capacity, effort=effort))


if __name__ == "__main__":
    main()
