"""One packed linear-attention call per round, per tree level, or per tree node: the layer alone.

Forward and backward of the packed calls of one layer (gathers and replay included, projections not) on every
unit of a ``harts-l1`` plan, the three cuts in turn; medians of the paired ratios to the plan's rounds.

    python benchmarks/node_calls.py tree-step --shorter 256 --chunk 64
    python benchmarks/node_calls.py path/to/step_wise.parquet --groups group,group
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from workloads import real_rollouts, shortened_workload

from harts_core.exec.config import LinearCalls
from harts_core.exec.kda import get_kda_backend
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.kda_rounds import KdaInputs, run_rounds
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.rollout_tree import RolloutTree

CUTS: tuple[LinearCalls, ...] = ("rounds", "levels", "nodes")


def random_inputs(rows: int, heads: int, width: int) -> KdaInputs:
    """Inputs of the ranges that a layer makes; leaves that gather gradients."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, heads, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(width), dim=-1) for _ in range(2))
    tensors = {"q": q, "k": k, "v": normal(width), "g": -normal(width).square(), "beta": normal().sigmoid()}
    return KdaInputs(**{name: tensor.requires_grad_() for name, tensor in tensors.items()})


def layer_s(layouts: list[UnitLayout], heads: int, width: int) -> float:
    """CPU seconds of forward and backward over all units."""
    backend = get_kda_backend("torch")
    seconds = 0.0
    for layout in layouts:
        inputs = random_inputs(layout.num_rows, heads, width)
        start = time.process_time()
        out, _ = run_rounds(backend, inputs, layout.to("cpu"))
        out.sum().backward()
        seconds += time.process_time() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", help="tree-step, step, or a rollout file")
    parser.add_argument("--groups", default="", help="prompt groups of a rollout file, comma-separated")
    parser.add_argument("--rows", type=int, default=80)
    parser.add_argument("--shorter", type=int, default=256)
    parser.add_argument("--capacity", type=int, help="default: the longest row or 1,024")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="key and value width of a head")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tree: RolloutTree
    if arguments.workload in ("tree-step", "step"):
        tree = shortened_workload(
            arguments.workload, rows=arguments.rows, shorter=arguments.shorter, vocab_size=4096
        )
    else:
        tree = real_rollouts(Path(arguments.workload), tuple(arguments.groups.split(",")))
    capacity = arguments.capacity or max(1024, int(tree.length.max()))
    plan = plan_tree(tree, PlanOptions(dp=1, capacity=capacity, planner="harts-l1", chunk=arguments.chunk))
    layouts = {
        cut: [build_unit_layout(plan, tree, unit, linear_calls=cut) for unit in range(plan.num_units)]
        for cut in CUTS
    }
    seconds: dict[str, list[float]] = {cut: [] for cut in CUTS}
    for repeat in range(arguments.repeats + 1):
        for cut in CUTS:
            spent = layer_s(layouts[cut], arguments.heads, arguments.width)
            if repeat:  # the first of each fills caches
                seconds[cut].append(spent)
    tokens = int(plan.units.computed_tokens.sum())
    nodes = len(plan.spans.start)
    print(
        f"{tree.original_tokens:,} original tokens, {tokens:,} computed in {nodes} nodes, "
        f"chunk {plan.chunk}\n"
    )
    print("| calls of | calls | packed tokens | ms | against rounds |\n|---|---|---|---|---|")
    for cut in CUTS:
        ratio = statistics.median(a / b for a, b in zip(seconds[cut], seconds["rounds"], strict=True))
        packed = sum(len(layout.packed_rows) for layout in layouts[cut])
        calls = sum(len(layout.rounds) for layout in layouts[cut])
        ms = 1000 * statistics.median(seconds[cut])
        print(f"| {cut} | {calls} | {packed:,} | {ms:.0f} | {ratio:.2f}× |")


if __name__ == "__main__":
    main()
