"""What the planners reach on the paper-shaped workload, and how long they take.

One line per planner and seed: compression within microbatches and its bound, balance, seconds of planning
(placement, call plans and validation; reading the file is not counted). ``--tree`` plans rollout-tree files
of your own instead.

    python benchmarks/planners.py                              # tree-step, seeds 0-2, D = 8, T = 65,536
    python benchmarks/planners.py --kind step --seeds 0 1 2 --planners harts-l1
    python benchmarks/planners.py --tree tree.arrow --dp 2 --capacity 16384
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec
from harts_core.trees.tree_file import read_tree

SHOWN = ("within_compression", "bound_within", "decoder_compression", "bound_decoder", "balance")
SHOWN += ("effective_compression", "slot_balance_p5", "step_balance", "num_consumers")


def trees(arguments: argparse.Namespace) -> Iterator[tuple[str, RolloutTree]]:
    """(name, tree) of everything to plan."""
    if arguments.tree:
        for path in arguments.tree:
            yield path.name, read_tree(path)
        return
    for seed in arguments.seeds:
        spec = workload_spec(kind=arguments.kind, preset=arguments.preset, seed=seed)
        yield f"{arguments.kind} {seed}", build_tree(generate(spec))


def measure(tree: RolloutTree, planner: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Metrics, and the fastest of the repeats in seconds by part."""
    options = PlanOptions(dp=arguments.dp, capacity=arguments.capacity, planner=planner)
    bundles = [plan_tree(tree, options) for _ in range(arguments.repeats)]
    fastest = min((b.runtime for b in bundles), key=lambda runtime: float(runtime["planning_s"]))
    return {name: bundles[0].metrics[name] for name in SHOWN} | fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", type=Path, nargs="+")
    parser.add_argument("--kind", default="tree-step")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), choices=list(PLANNERS))
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=2, help="the first may compile; the fastest counts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for name, tree in trees(arguments):
        for planner in arguments.planners:
            results.append({"tree": name, "planner": planner, **measure(tree, planner, arguments)})
            if not arguments.json:
                r = results[-1]
                print(
                    f"{name:<14} {planner:<9} within {r['within_compression']:.3f} of "
                    f"{r['bound_within']:.3f}  "
                    f"decoder x balance {r['effective_compression']:.3f}  balance {r['balance']:.4f}  "
                    f"P5 {r['slot_balance_p5']:.4f}  step {r['step_balance']:.4f}  "
                    f"K {r['num_consumers']:>4}  {r['planning_s']:.3f} s",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for planner in arguments.planners:
        mine = [r for r in results if r["planner"] == planner]
        ratio = statistics.median(r["within_compression"] / r["bound_within"] for r in mine)
        seconds = statistics.median(r["planning_s"] for r in mine)
        print(f"median of {planner}: {ratio:.1%} of the bound within microbatches, {seconds:.3f} s")


if __name__ == "__main__":
    main()
