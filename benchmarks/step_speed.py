"""How much faster is a training step on a shared plan? Beside the ratio of computed tokens.

One process trains the same model on an ``expanded`` and on a ``harts-l1`` plan of the same rollouts, one step
of each in turn, and reports medians.

    python benchmarks/step_speed.py --preset cpu-bench --rows 96 --steps 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch

from harts_core.exec.config import OptimizerSection
from harts_core.exec.metrics import StepMetrics
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec

PLANNERS = ("expanded", "harts-l1")


def measure(tree: RolloutTree, preset: str, capacity: int, steps: int) -> dict[str, list[StepMetrics]]:
    """Steps of both plans, alternated; the first of each (allocations, caches) is left out."""
    trainers, data = {}, {}
    for planner in PLANNERS:
        model = HybridModel(PRESETS[preset], dtype=torch.float32, seed=0)
        optimizer = Optimizer(model.named_parameters(), OptimizerSection(learning_rate=1e-4))
        trainers[planner] = Trainer(model, Grpo(), optimizer)
        bundle = plan_tree(tree, PlanOptions(dp=1, capacity=capacity, planner=planner))
        data[planner] = trainers[planner].prepare(bundle, tree)
    taken: dict[str, list[StepMetrics]] = {planner: [] for planner in PLANNERS}
    for _ in range(steps + 1):
        for planner in PLANNERS:
            taken[planner].append(trainers[planner].step_on(data[planner]))
    return {planner: metrics[1:] for planner, metrics in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="cpu-bench", choices=[p for p in PRESETS if p.startswith("cpu")])
    parser.add_argument("--rows", type=int, default=96, help="rows of the synthetic tree-step workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tree = build_tree(generate(workload_spec(rows=arguments.rows, seed=arguments.seed)))
    taken = measure(tree, arguments.preset, arguments.capacity, arguments.steps)
    seconds = {p: [m.seconds for m in metrics] for p, metrics in taken.items()}
    tokens = {p: metrics[0].compact_tokens for p, metrics in taken.items()}
    ratios = [a / b for a, b in zip(seconds["expanded"], seconds["harts-l1"], strict=True)]
    losses = {p: [m.loss for m in metrics] for p, metrics in taken.items()}
    result = {
        "preset": arguments.preset,
        "threads": arguments.threads,
        "original_tokens": tree.original_tokens,
        "computed_tokens": tokens,
        "median_s": {p: statistics.median(s) for p, s in seconds.items()},
        "token_ratio": tokens["expanded"] / tokens["harts-l1"],
        "speed_ratio": statistics.median(ratios),
        "speed_ratio_range": [min(ratios), max(ratios)],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
    }
    if arguments.json:
        json.dump(result, sys.stdout, indent=2)
        return
    print(f"{arguments.preset}, {arguments.threads} thread(s), {tree.original_tokens:,} original tokens")
    for planner in PLANNERS:
        median = statistics.median(seconds[planner])
        rate = tree.original_tokens / median
        print(
            f"  {planner:<9} {tokens[planner]:>8,} tokens computed  {median:8.3f} s a step  "
            f"{rate:>9,.0f} original tokens/s  {tokens[planner] / median:>8,.0f} computed tokens/s"
        )
    low, high = min(ratios), max(ratios)
    print(
        f"  speed ratio {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}), token ratio "
        f"{tokens['expanded'] / tokens['harts-l1']:.2f}, largest loss difference "
        f"{result['largest_loss_difference']:.1e}"
    )


if __name__ == "__main__":
    main()
