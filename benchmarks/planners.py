"""All planners side by side: what they reach, how long they take, at the paper's size and on real rollouts.

Ten steps of each of the paper's two workloads (1,617 rows each), every planner, D = 2, 4, 8, T = 65,536: one
table at the largest D and one over D, medians over steps; every plan has passed the validator. Then the
speed of harts against the first solution of OR-Tools, and real rollouts at T = 16,384 where the data is
beside the checkout. Markdown on stdout, progress on stderr.

    python benchmarks/planners.py                     # everything; about an hour, nearly all of it OR-Tools
    python benchmarks/planners.py --quick             # one step, D = 8, a short search
    python benchmarks/planners.py --planners harts harts-l1 expanded
    python benchmarks/planners.py --tree tree.arrow --dp 2 --capacity 16384
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from harts_core.plan.compare import PlannerResult, compare_planners, medians
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS
from harts_core.trees.build import build_tree
from harts_core.trees.ingest import ingest
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec
from harts_core.trees.tree_file import read_tree, write_tree

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenized"
"""Step-wise rows of real rollouts, present beside some checkouts."""
REAL_CAPACITY, REAL_DP = 16_384, (2, 4)
T = TypeVar("T")
Steps = dict[str, list[PlannerResult]]


def workload(kind: str, seed: int) -> Path:
    """The rollout-tree file of one step, made once per machine."""
    spec = workload_spec(kind=kind, preset="paper", seed=seed)
    key = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / "harts-benchmarks" / f"{kind}-{seed}-{key}.arrow"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_tree(path, build_tree(generate(spec)))
    return path


def plan_all(
    name: str, tree: RolloutTree, planners: Sequence[str], dp: Sequence[int], options: PlanOptions
) -> Steps:
    """The results on one tree, under its name."""
    results = []
    for planner in planners:
        print(f"{name}: {planner}", file=sys.stderr, flush=True)
        compared = compare_planners(tree, planners=[planner], dp=dp, seeds=[0], options=options)
        results += compared.results
    return {name: results}


def table_at(results: Iterable[PlannerResult], dp: int) -> list[str]:
    """Every planner at one D: compression, balance and time, medians over the steps."""
    names = ("within", "decoder", "η", "effective", "of bound", "P5", "step", "K", "windows", "seconds")
    lines = [f"| D = {dp} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    mine = [r for r in results if r.dp == dp]
    # psrl cuts trajectories, so that nothing but the trie bounds what it shares within a microbatch
    bounds = medians([r for r in mine if r.planner != "psrl"])
    if bounds is not None:
        m = bounds[0]
        lines.append(f"| bound | {m['bound_within']:.3f} | {m['bound_decoder']:.3f} | 1 | | | 1 | 1 | | | |")
    for planner in dict.fromkeys(r.planner for r in mine):
        middle = medians([r for r in mine if r.planner == planner])
        if middle is None:
            reason = next(r.failure for r in mine if r.planner == planner)
            lines.append(f"| {planner} | no plan: {reason} |" + " |" * (len(names) - 1))
            continue
        m, seconds = middle
        lines.append(
            f"| {planner} | {m['within_compression']:.3f} | {m['decoder_compression']:.3f} "
            f"| {m['balance']:.4f} | {m['effective_compression']:.3f} "
            f"| {1 - m['gap_effective_compression']:.1%} | {m['slot_balance_p5']:.3f} "
            f"| {m['step_balance']:.3f} | {m['num_consumers']:.0f} | {m['num_windows']:.0f} "
            f"| {seconds:.3f} |"
        )
    return lines


def table_over_dp(results: Iterable[PlannerResult]) -> list[str]:
    """Every planner over D: decoder compression × balance = effective compression."""
    results = list(results)
    replicas = list(dict.fromkeys(r.dp for r in results))
    lines = [
        "| decoder × η | " + " | ".join(f"D = {d}" for d in replicas) + " |",
        "|---|" + "---|" * len(replicas),
    ]
    for planner in dict.fromkeys(r.planner for r in results):
        cells = []
        for d in replicas:
            middle = medians([r for r in results if (r.planner, r.dp) == (planner, d)])
            if middle is None:
                cells.append("no plan")
                continue
            m = middle[0]
            cells.append(
                f"{m['decoder_compression']:.3f} × {m['balance']:.4f} = {m['effective_compression']:.3f}"
            )
        lines.append(f"| {planner} | " + " | ".join(cells) + " |")
    return lines


def speed(path: Path, dp: int, capacity: int) -> str:
    """harts, reading included, against ortools-ffd's first solution, in CPU seconds: each runs on one core,
    and other work on the machine does not count."""

    def timed(work: Callable[[], T]) -> tuple[T, float]:
        start = time.process_time()
        return work(), time.process_time() - start

    options = PlanOptions(dp=dp, capacity=capacity, search_budget=0.0)
    tree = read_tree(path)
    plan_tree(tree, options)  # loads what is compiled
    _, read_s = timed(lambda: read_tree(path))
    ours, harts_s = timed(lambda: plan_tree(tree, options))
    theirs, ortools_s = timed(lambda: plan_tree(tree, replace(options, planner="ortools-ffd")))
    total = read_s + harts_s
    compression = ours.metrics["decoder_compression"] / theirs.metrics["decoder_compression"]
    points = 100 * (ours.metrics["balance"] - theirs.metrics["balance"])
    return (
        f"D = {dp}, CPU seconds: harts {total:.2f} ({read_s:.2f} of them read the file), ortools-ffd's first "
        f"solution {ortools_s:.2f}: {ortools_s / total:.1f}x. Decoder compression {compression:.2f}x, "
        f"balance {points:+.1f} points."
    )


def real_trees() -> Iterable[tuple[str, RolloutTree]]:
    """(name, tree) of the real rollouts beside the checkout."""
    for path in sorted(REAL.glob("*.step_wise.parquet")):
        yield path.name.removesuffix(".step_wise.parquet"), ingest([path])[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", type=Path, nargs="+", help="plan these files instead")
    parser.add_argument("--kinds", nargs="+", default=["tree-step", "step"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), choices=list(PLANNERS))
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--capacity", type=int, default=65_536)
    parser.add_argument("--effort", type=int, default=2)
    parser.add_argument("--search-budget", type=float, default=1.0, help="of ortools-ffd, per shard")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="also write every result to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.dp, arguments.search_budget = [0], [8], 0.1
    return arguments


def main() -> None:
    arguments = parse_arguments()
    options = PlanOptions(
        dp=1,
        capacity=arguments.capacity,
        effort=arguments.effort,
        search_budget=arguments.search_budget,
        on_too_long="drop",
    )
    tables: Steps = {}

    def show(title: str, steps: Steps) -> None:
        tables.update(steps)
        results = list(itertools.chain.from_iterable(steps.values()))
        replicas = max(r.dp for r in results)
        print(f"\n## {title}\n")
        print("\n".join([*table_at(results, replicas), "", *table_over_dp(results)]), flush=True)

    if arguments.tree:
        for path in arguments.tree:
            tree = read_tree(path)
            show(path.name, plan_all(path.name, tree, arguments.planners, arguments.dp, options))
    else:
        for kind in arguments.kinds:
            steps: Steps = {}
            for seed in arguments.seeds:
                tree = read_tree(workload(kind, seed))
                steps |= plan_all(f"{kind} {seed}", tree, arguments.planners, arguments.dp, options)
            show(f"{kind}, seeds {', '.join(map(str, arguments.seeds))}, T = {arguments.capacity:,}", steps)
        if {"harts", "ortools-ffd"} <= set(arguments.planners):
            path = workload(arguments.kinds[0], arguments.seeds[0])
            print(f"\n{speed(path, max(arguments.dp), arguments.capacity)}", flush=True)
        for name, tree in real_trees():
            small = replace(options, capacity=REAL_CAPACITY)
            kept = int((tree.length <= REAL_CAPACITY).sum())
            title = (
                f"{name}, {kept:,} of {tree.num_rows:,} rows (the others are longer), T = {REAL_CAPACITY:,}"
            )
            show(title, plan_all(name, tree, arguments.planners, REAL_DP, small))
    if arguments.json:
        text = json.dumps({name: [asdict(r) for r in results] for name, results in tables.items()}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
