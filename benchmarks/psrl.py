"""psRL beside harts and no sharing, on four shapes of agent rollouts; markdown on stdout.

Each workload is sampled in its own way: whole trajectories (search), steps with the whole history (web),
steps without earlier thinking (house), steps of branching rollouts (network). The lengths are chosen, not
measured ones. For every planner the first table has, from the validated plan:

- compression: original tokens over tokens computed;
- workers: mean over max of the replicas' estimated work (cost model, forward and backward);
- spread: coefficient of variation of the estimated work of the microbatches of a replica, mean over replicas;
- cache: the most keys and values of other units' tokens (and their gradients) alive at once on a replica, in
  thousands of tokens: exact blocks, freed after their last use;
- activations: the most computed tokens whose graph is alive at once on a replica, in thousands;
- gain: estimated time of the step without sharing over the planner's; every slot and window takes its slowest
  replica's.

The second table compares placements alone: the spread of the workers' estimated time, (max − min) / mean.

    python benchmarks/psrl.py               # a minute
    python benchmarks/psrl.py --rows 60     # quick
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

import numpy as np

from harts_core.errors import InfeasiblePlanError
from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.cache_policy.blocks import cache_blocks
from harts_core.plan.cache_policy.rows import TOKENS
from harts_core.plan.cache_policy.simulate import simulate
from harts_core.plan.cache_policy.trace import block_sizes, cache_trace
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.units import peak_alive, unit_events, unit_links
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.statistics import tree_statistics
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import LengthRange, WorkloadSpec, workload_spec

PLANNERS = ("expanded", "harts", "psrl")
PLACEMENTS = ("length-balanced", "prefix-first", "balance-first", "psrl")


def lengths(minimum: int, median: float, maximum: int, sigma: float) -> LengthRange:
    """Short for the specs below."""
    return LengthRange(minimum=minimum, median=median, maximum=maximum, sigma=sigma)


def specs(rows: int, seed: int) -> dict[str, WorkloadSpec]:
    """The four workloads."""

    def paper(kind: str) -> WorkloadSpec:
        spec = workload_spec(kind=kind, preset="paper", rows=rows, seed=seed)
        return replace(spec, mean_length=None, rollouts=(8, 8), max_length=32_000)

    return {
        "search-agent": replace(
            paper("trajectory"),
            system_tokens=603,
            task_tokens=lengths(30, 90, 400, 0.5),
            action_tokens=(60, 260),
            observation_tokens=lengths(300, 900, 3_000, 0.5),
            turns=lengths(2, 4, 10, 0.4),
        ),
        "web-agent": replace(
            paper("step"),
            system_tokens=1_807,
            task_tokens=lengths(60, 150, 500, 0.5),
            action_tokens=(80, 350),
            observation_tokens=lengths(500, 2_000, 6_000, 0.6),
            turns=lengths(4, 9, 20, 0.4),
        ),
        "house-agent": replace(
            paper("step-no-think"),
            system_tokens=1_203,
            task_tokens=lengths(100, 250, 700, 0.5),
            action_tokens=(40, 180),
            observation_tokens=lengths(20, 60, 300, 0.6),
            turns=lengths(8, 20, 45, 0.35),
        ),
        "network-agent": replace(
            paper("tree-step"),
            system_tokens=3_009,
            task_tokens=lengths(300, 900, 3_000, 0.5),
            action_tokens=(150, 500),
            observation_tokens=lengths(200, 700, 2_500, 0.6),
            turns=lengths(5, 12, 30, 0.4),
            rollouts=(2, 3),
            expansions=(6, 10),
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the tables show of one plan; see the module."""

    compression: float
    workers: float
    spread: float
    cache: int
    activations: int
    time: float
    work: np.ndarray


def measure(bundle: PlanBundle, tree: RolloutTree) -> Measured:
    """Estimated work, cache and activations of a plan."""
    u = bundle.units
    cost = u.cost_forward + u.cost_backward
    work = np.bincount(u.replica, cost, minlength=bundle.dp)
    spreads = []
    for d in range(bundle.dp):
        mine = cost[(u.replica == d) & (u.kind == CONSUMER)]
        spreads.append(float(mine.std() / mine.mean()))
    place = np.where(u.kind == CONSUMER, u.slot, int(u.slot.max()) + 1 + u.window)
    slowest = np.zeros(int(place.max()) + 1)
    np.maximum.at(slowest, place, cost)
    links = unit_links(bundle)
    blocks = cache_blocks(bundle)
    sizes = block_sizes(bundle, blocks, TOKENS, tree)
    cache = activations = 0
    for d in range(bundle.dp):
        events = unit_events(links, bundle.units_of_replica(d).tolist())
        cache = max(cache, simulate(cache_trace(blocks, sizes, events)).counters.peak_bytes)
        activations = max(activations, peak_alive(events, u.padded_tokens))
    return Measured(
        compression=bundle.metrics["decoder_compression"],
        workers=float(work.mean() / work.max()),
        spread=float(np.mean(spreads)),
        cache=cache,
        activations=activations,
        time=float(slowest.sum()),
        work=work,
    )


def plan(tree: RolloutTree, planner: str, arguments: argparse.Namespace) -> Measured | None:
    """A planner's plan, measured; None where it has none."""
    options = PlanOptions(dp=arguments.dp, capacity=arguments.capacity, planner=planner)
    try:
        return measure(plan_tree(tree, options), tree)
    except InfeasiblePlanError as error:
        print(f"{planner}: {error}", file=sys.stderr)
        return None


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=32_768)
    arguments = parser.parse_args()
    names = ("planner", "compression", "workers", "spread", "cache", "activations", "gain")
    table = [f"| workload (rows, tokens, prefix match) | {' | '.join(names)} |", "|---" * 8 + "|"]
    spreads = [f"| workload | {' | '.join(PLACEMENTS)} |", "|---" * (len(PLACEMENTS) + 1) + "|"]
    for name, spec in specs(arguments.rows, arguments.seed).items():
        print(name, file=sys.stderr, flush=True)
        tree = build_tree(generate(spec))
        s = tree_statistics(tree)
        found = {p: plan(tree, p, arguments) for p in dict.fromkeys((*PLANNERS, *PLACEMENTS))}
        title = f"{name} ({s.rows:,}, {s.tokens / 1e6:.2f}M, {s.prefix_match_rate:.1%})"
        base = found["expanded"]
        for planner in PLANNERS:
            m = found[planner]
            if m is None or base is None:
                table.append(f"| {title} | {planner} | – | | | | | |")
                continue
            table.append(
                f"| {title} | {planner} | {m.compression:.2f} | {m.workers:.3f} | {m.spread:.3f} | "
                f"{m.cache / 1e3:.1f} | {m.activations / 1e3:.1f} | {base.time / m.time:.2f} |"
            )
        cells = [
            "–" if (m := found[p]) is None else f"{np.ptp(m.work) / m.work.mean():.1%}" for p in PLACEMENTS
        ]
        spreads.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join([*table, "", *spreads]))


if __name__ == "__main__":
    main()
