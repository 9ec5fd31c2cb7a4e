"""psRL beside harts, no sharing, and psRL with fixed blocks, on four shapes of agent rollouts; markdown.

Two tables for each workload (``workloads.agent_workloads``). *Planned*, at full size, from validated plans of
several seeds, medians (the least of the seeds in parentheses):

- compression: original tokens over computed ones; with fixed blocks, if nothing is copied (sharing in whole
  blocks only);
- workers, spread: mean over max of the workers' estimated work; coefficient of variation of the work of a
  worker's microbatches;
- alive: most computed tokens on a worker that wait for their backward at once, in thousands;
- peak, released: most GiB of Ling-3.0-tiny in bfloat16 that a worker keeps for later units at once, freed
  after their last use, and what that saves against freeing nothing; fixed blocks shared by copying;
- copied: tokens that are kept once more than needed;
- gain: estimated time of the step without sharing over the planner's; recomputing: with the forwards of units
  that others import from run twice (``recompute = "unit"``), so that no more than one unit is alive.

*Measured*, one worker's share with all lengths divided: original tokens per CPU second of forward and
backward of a small MoE model, all ways in turn in one process, and their gain over no sharing run by run
(median, least and most of all seeds and repeats); peak and released as above, measured on the tensors, in
float32; recomputing as above. Fixed blocks are executed twice: copied, as the runtime keeps them, and
computed again, on the same rows changed so that they share whole blocks only.

    python benchmarks/psrl.py                               # half a CPU hour, most of it measured
    python benchmarks/psrl.py --rows 60 --seeds 0 --measured-rows 0
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from unit_times import Step, alternate, run_step
from workloads import agent_workloads, share_whole_blocks, shorten

from harts_core.exec.blocks import CacheSettings
from harts_core.exec.cache_bytes import cache_row_bytes
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.plan.cache_policy.simulate import CacheCounters
from harts_core.plan.compare import PlannerResult, compare_planners
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import build_tree
from harts_core.trees.statistics import tree_statistics
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import WorkloadSpec

PLANNERS = ("expanded", "harts", "psrl")
FIXED_SIZES = (1, 16, 32, 128, 512)
EXECUTED_SIZES = (1, 16)
PLANNED = (
    "compression",
    "workers",
    "spread",
    "alive",
    "peak",
    "released",
    "copied",
    "gain",
    "gain, recomputing",
)
MEASURED = ("tokens/s", "gain", "least", "most", "peak MiB", "released")

Seeded = Callable[[int], WorkloadSpec]


def planned(spec: Seeded, arguments: argparse.Namespace) -> list[str]:
    """Lines of a workload's first table, with its title."""
    results: dict[str, list[PlannerResult]] = {p: [] for p in PLANNERS}
    shapes = []
    for seed in arguments.seeds:
        tree = build_tree(generate(spec(seed)))
        shapes.append(tree_statistics(tree))
        comparison = compare_planners(
            tree,
            planners=PLANNERS,
            dp=[arguments.dp],
            seeds=[seed],
            options=PlanOptions(dp=arguments.dp, capacity=arguments.capacity),
            block_tokens=FIXED_SIZES,
            row_bytes=cache_row_bytes(PRESETS["ling-3.0-tiny"], "bfloat16"),
        )
        for result in comparison.results:
            results[result.planner].append(result)
    tokens, match, group_match = (
        middle(getattr(s, name) for s in shapes)
        for name in ("tokens", "prefix_match_rate", "group_prefix_match_rate")
    )
    groups = middle(s.groups for s in shapes)
    lines = [
        f"{arguments.rows:,} rows, {groups:.0f} groups, {tokens / 1e6:.1f}M tokens, prefix match {match:.1%} "
        f"(same group {group_match:.1%})",
        "",
        *head("planner", PLANNED),
    ]
    for planner in PLANNERS:
        lines += planned_lines(results[planner], results["expanded"])
    pairs = [(h.work, p.work) for h, p in zip(results["harts"], results["psrl"], strict=True)]
    ratios = [h.step_cost / p.step_cost for h, p in pairs if h and p]
    again = [
        (h.step_cost + h.second_forward_cost) / (p.step_cost + p.second_forward_cost)
        for h, p in pairs
        if h and p
    ]
    for title, found in (("", ratios), (", recomputing", again)):
        by_seed = ", ".join(f"{r:.3f}" for r in found)
        lines += ["", f"estimated time of harts over psrl, by seed{title}: {by_seed}"]
    return lines


def planned_lines(results: Sequence[PlannerResult], base: Sequence[PlannerResult]) -> list[str]:
    """A planner's line, and for psrl those of the fixed sizes."""
    if any(r.failure for r in results):
        return [f"| {results[0].planner} | " + "; ".join(r.failure for r in results if r.failure)]
    work = [r.work for r in results if r.work]
    caches = [r.cache for r in results if r.cache]
    costs = [b.work.step_cost for b in base if b.work]
    gains = [cost / w.step_cost for cost, w in zip(costs, work, strict=True)]
    again = [cost / (w.step_cost + w.second_forward_cost) for cost, w in zip(costs, work, strict=True)]
    lines = []
    for i, block in enumerate(caches[0].blocks):
        if block.block_tokens is not None and results[0].planner != "psrl":
            continue
        same = [c.blocks[i] for c in caches]
        compression = [b.decoder_compression for b in same]
        name, cells = results[0].planner, [with_least(compression, ".2f")]
        peak = f"{middle(b.peak for b in same) / 2**30:.2f}"
        copied = f"{middle(b.copied_tokens for b in same):,.0f}"
        if block.block_tokens is None:
            cells += [
                with_least([w.replica_balance for w in work], ".3f"),
                f"{middle(w.microbatch_spread for w in work):.3f}",
                f"{middle(w.peak_alive_tokens for w in work) / 1e3:.0f}",
                peak,
                with_least([c.release_saving for c in caches], ".1%"),
                copied,
                with_least(gains, ".2f"),
                with_least(again, ".2f"),
            ]
        else:
            name, cells = (
                f"psrl, blocks of {block.block_tokens}",
                [*cells, "", "", "", peak, "", copied, "", ""],
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def measured(spec: Seeded, arguments: argparse.Namespace) -> list[str]:
    """Lines of a workload's second table."""
    torch.set_num_threads(1)
    config = PRESETS["cpu-bench"]
    model = HybridModel(config, dtype=torch.float32, seed=0)
    speeds: dict[str, list[float]] = {}
    gains: dict[str, list[float]] = {}
    caches: dict[str, list[CacheCounters]] = {}
    for seed in arguments.measured_seeds:
        small = replace(spec(seed), rows=arguments.measured_rows, vocab_size=config.vocab_size)
        steps = executed_steps(shorten(small, arguments.shorter), arguments)
        run_step(model, steps["psrl"])  # which holds most at once: gets the memory from the system
        runs = alternate(model, steps, arguments.repeats)
        base = runs["expanded"]
        for name, mine in runs.items():
            seconds = [run.seconds.sum() for run in mine]
            speeds.setdefault(name, []).extend(steps[name].tree.original_tokens / s for s in seconds)
            gains.setdefault(name, []).extend(b.seconds.sum() / s for b, s in zip(base, seconds, strict=True))
            caches.setdefault(name, []).append(mine[0].cache[0])
        seen = ", ".join(f"{name} {middle(found):.2f}" for name, found in gains.items())
        print(f"  up to seed {seed}: {seen}", file=sys.stderr, flush=True)
    return [
        *head("executed", MEASURED),
        *(
            f"| {name} | {middle(speeds[name]):,.0f} | {middle(found):.2f} | {min(found):.2f} | "
            f"{max(found):.2f} | {middle(c.peak_bytes for c in caches[name]) / 2**20:.1f} | "
            f"{middle(map(released, caches[name])):.1%} |"
            for name, found in gains.items()
        ),
    ]


def released(cache: CacheCounters) -> float:
    """What freeing after the last use saved: without it, all that was allocated stays."""
    return 1 - cache.peak_bytes / cache.allocated_bytes if cache.allocated_bytes else 0.0


def head(first: str, columns: Sequence[str]) -> list[str]:
    """The head of a markdown table."""
    return [f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]


def middle(values: Iterable[float]) -> float:
    """The median."""
    return float(statistics.median(values))


def with_least(values: Sequence[float], form: str) -> str:
    """The median, and the least in parentheses."""
    return f"{middle(values):{form}} ({min(values):{form}})"


def integers(text: str) -> list[int]:
    """A list of integers separated by commas."""
    return [int(part) for part in text.split(",")]


def executed_steps(spec: WorkloadSpec, arguments: argparse.Namespace) -> dict[str, Step]:
    """What is executed of one workload."""
    tree = build_tree(generate(spec))
    options = PlanOptions(
        dp=1, capacity=arguments.capacity // arguments.shorter, chunk=arguments.measured_chunk
    )
    steps = {
        planner: Step(bundle=plan_tree(tree, replace(options, planner=planner)), tree=tree)
        for planner in PLANNERS
    }
    for planner in ("harts", "psrl"):
        steps[f"{planner}, recomputing"] = replace(steps[planner], recompute="unit")
    for size in EXECUTED_SIZES:
        steps[f"psrl, blocks of {size}, copied"] = replace(
            steps["psrl"], cache=CacheSettings(block_tokens=size)
        )
    whole = share_whole_blocks(tree, EXECUTED_SIZES[-1])
    steps[f"psrl, blocks of {EXECUTED_SIZES[-1]}, computed again"] = Step(
        bundle=plan_tree(whole, replace(options, planner="psrl")), tree=whole
    )
    return steps


def main() -> None:
    """Print the tables of every workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=str, help="names, separated by commas; default: all")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seeds", type=integers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=32_768)
    parser.add_argument("--measured-rows", type=int, default=48, help="0: plans only")
    parser.add_argument("--measured-seeds", type=integers, default=[0, 1, 2])
    parser.add_argument("--measured-chunk", type=int, default=16)
    parser.add_argument("--shorter", type=int, default=16, help="divide lengths and capacity of the measured")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    names = list(agent_workloads(1, 0)) if arguments.workloads is None else arguments.workloads.split(",")
    for name in names:

        def spec(seed: int, name: str = name) -> WorkloadSpec:
            return agent_workloads(arguments.rows, seed)[name]

        print(name, file=sys.stderr, flush=True)
        print(f"### {name}\n\n" + "\n".join(planned(spec, arguments)) + "\n", flush=True)
        if arguments.measured_rows:
            print("\n".join(measured(spec, arguments)) + "\n", flush=True)


if __name__ == "__main__":
    main()
