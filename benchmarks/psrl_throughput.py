"""Measured updates of psRL, harts and no sharing on the four shapes of ``psrl.py``, shortened, on one CPU.

Every worker's units run forward and backward on a small MoE model, all planners in turn in one process; the
time is CPU time, so that other programs count little. Per planner: original tokens per second of all workers
together (the work saved), the same with every worker on its own device and the slowest one counted (balance
included), both over those without sharing, and the spread of the workers' times, (max − min) / mean. The
placements' spread comes from the same runs.

    python benchmarks/psrl_throughput.py
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import numpy as np
import torch
from psrl import PLACEMENTS, PLANNERS, specs
from torch import Tensor
from workloads import shorten

from harts_core.exec.head import unit_logprobs
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.windows import UnitExecutor, UnitForward
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate


def worker_seconds(model: HybridModel, bundle: PlanBundle, tree: RolloutTree) -> np.ndarray:
    """float64 [D], CPU seconds of each worker's forwards and backwards."""

    def loss(forward: UnitForward) -> Tensor | None:
        if not len(forward.layout.trained_row):
            return None
        return unit_logprobs(
            model, forward.hidden, forward.layout, imported_hidden=forward.imported_hidden
        ).sum()

    links = unit_links(bundle)
    seconds = np.zeros(bundle.dp)
    for worker in range(bundle.dp):
        events = unit_events(links, bundle.units_of_replica(worker).tolist())
        executor = UnitExecutor(model, bundle, tree, loss, events, links=links)
        start = time.process_time()
        for event in events:
            executor.run(event)
        seconds[worker] = time.process_time() - start
    model.zero_grad()
    return seconds


def main() -> None:
    """Print both tables as markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--shorter", type=int, default=16, help="divide all lengths and the capacity")
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = PRESETS["cpu-bench"]
    model = HybridModel(config, dtype=torch.float32, seed=0)
    table = [
        "| workload | planner | tokens/s | gain | gain, slowest worker | spread |",
        "|---|---|---|---|---|---|",
    ]
    spreads = [f"| workload | {' | '.join(PLACEMENTS)} |", "|---" * (len(PLACEMENTS) + 1) + "|"]
    for name, spec in specs(arguments.rows, seed=0).items():
        print(name, file=sys.stderr, flush=True)
        tree = build_tree(generate(shorten(replace(spec, vocab_size=config.vocab_size), arguments.shorter)))
        plans = {
            p: plan_tree(
                tree, PlanOptions(dp=arguments.dp, capacity=32_768 // arguments.shorter, chunk=16, planner=p)
            )
            for p in dict.fromkeys((*PLANNERS, *PLACEMENTS))
        }
        runs: dict[str, list[np.ndarray]] = {p: [] for p in plans}
        for _ in range(arguments.repeats):
            for p, bundle in plans.items():
                runs[p].append(worker_seconds(model, bundle, tree))
        seconds = {p: np.stack(found).min(axis=0) for p, found in runs.items()}  # the least disturbed run
        base = seconds["expanded"]
        for p in PLANNERS:
            mine = seconds[p]
            table.append(
                f"| {name} | {p} | {tree.original_tokens / mine.sum():,.0f} | "
                f"{base.sum() / mine.sum():.2f} | {base.max() / mine.max():.2f} | "
                f"{np.ptp(mine) / mine.mean():.1%} |"
            )
        cells = (f"{np.ptp(seconds[p]) / seconds[p].mean():.1%}" for p in PLACEMENTS)
        spreads.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join([*table, "", *spreads]))


if __name__ == "__main__":
    main()
