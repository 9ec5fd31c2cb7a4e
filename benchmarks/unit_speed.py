"""Speed of one unit on one thread: ``python benchmarks/unit_speed.py [--preset cpu-bench] [--chunk 64]``.

A synthetic tree-step workload as one consumer, shared and repeated: CPU time of forward, log-probabilities
and backward (best of several alternating repeats) per unit, and computed tokens per second.
"""

from __future__ import annotations

import argparse
import time

import torch

from harts_core.exec.head import unit_logprobs
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.unit import unit_hidden
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import build_tree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec


def measure(model: HybridModel, layout: UnitLayout) -> tuple[float, float, float]:
    """CPU seconds of forward, head and backward."""
    model.zero_grad(set_to_none=True)
    clock = [time.process_time()]
    hidden = unit_hidden(model, layout)
    clock.append(time.process_time())
    logprobs = unit_logprobs(model, hidden, layout)
    clock.append(time.process_time())
    logprobs.sum().backward()
    clock.append(time.process_time())
    return clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="cpu-bench", choices=[p for p in PRESETS if p.startswith("cpu")])
    parser.add_argument("--rows", type=int, default=32, help="rows of the workload")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tree = build_tree(generate(workload_spec(rows=arguments.rows, seed=0)))
    model = HybridModel(PRESETS[arguments.preset], dtype=torch.float32, kda_backend=arguments.backend, seed=0)
    layouts = {}
    for planner in ("harts-l1", "expanded"):
        options = PlanOptions(dp=1, capacity=tree.original_tokens, planner=planner, chunk=arguments.chunk)
        layouts[planner] = build_unit_layout(plan_tree(tree, options), tree, 0)
    best = {planner: (float("inf"),) * 3 for planner in layouts}
    for _ in range(arguments.repeats):
        for planner, layout in layouts.items():
            best[planner] = min(best[planner], measure(model, layout), key=sum)
    for planner, layout in layouts.items():
        forward, head, backward = best[planner]
        print(
            f"{planner}: {layout.num_rows} tokens, {len(layout.packed_rows) - layout.num_rows} replayed, "
            f"{len(layout.attention)} sequences in {len(layout.rounds)} rounds: forward {forward:.3f} s, "
            f"head {head:.3f} s, backward {backward:.3f} s, "
            f"{layout.num_rows / sum(best[planner]):.0f} tokens/s"
        )
    tokens = layouts["expanded"].num_rows / layouts["harts-l1"].num_rows
    print(f"{tokens:.2f}x fewer tokens, {sum(best['expanded']) / sum(best['harts-l1']):.2f}x less time")


if __name__ == "__main__":
    main()
