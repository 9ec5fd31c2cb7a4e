"""Peak memory of a training step, shared and not, with and without recomputation, at equal capacity.

Each line is a process of its own. After the model, the optimizer and the plan are in memory and one unit of
one sequence has run, the kernel's peak counter is reset; the line shows how far resident memory rose above
that while one step ran (gradients included, which are the same for all). Beside it: the most tokens whose
graphs were alive, the most bytes that blocks of interfaces held, the bytes moved out of the memory that the
budget limits (on a CPU they stay in the process), forwards run, operations, and the step's loss and gradient
norm.

    python benchmarks/memory.py
    python benchmarks/memory.py --workload step --preset cpu-bench --shorter 8
    python benchmarks/memory.py --planners psrl --recompute none layer unit unit+layer --budget-share 0.5

Linux only. ``MALLOC_MMAP_THRESHOLD_`` is set, so that freed tensors go back to the system at once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import torch
from workloads import shortened_workload

from harts_core.exec.blocks import CacheSettings
from harts_core.exec.config import OptimizerSection
from harts_core.exec.flops import step_flops, unit_flops
from harts_core.exec.layout import build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.recompute import Recompute
from harts_core.plan.schedule.second_forwards import peak_graphs, with_second_forwards
from harts_core.plan.schedule.units import unit_events, unit_links

PLANNERS = ("expanded", "harts-l1", "harts")
MIB = 1 << 20


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak since the reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in /proc/self/status: this benchmark needs Linux")


def reset_peak() -> None:
    """Give freed memory back and start a new peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One step of one planner in this process."""
    torch.set_num_threads(1)
    config = PRESETS[arguments.preset]
    tree = shortened_workload(
        arguments.workload,
        rows=arguments.rows,
        shorter=arguments.shorter,
        vocab_size=config.vocab_size,
        seed=arguments.seed,
    )
    capacity = arguments.capacity or 65_536 // arguments.shorter
    bundle = plan_tree(
        tree,
        PlanOptions(
            dp=1,
            capacity=capacity,
            chunk=arguments.chunk,
            planner=arguments.planner,
            on_too_long=arguments.on_too_long,
        ),
    )
    (recompute,) = arguments.recompute
    model = HybridModel(config, dtype=torch.float32, seed=0)
    optimizer = Optimizer(model.named_parameters(), OptimizerSection(learning_rate=0.0))
    trainer = Trainer(
        model, Grpo(), optimizer, recompute=recompute, cache=CacheSettings(budget_bytes=arguments.budget)
    )
    data = trainer.prepare(bundle, tree)
    small = torch.zeros(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.neg, small, use_reentrant=False).backward()  # imports
    reset_peak()
    before = resident_bytes("VmRSS")
    seconds = time.process_time()
    metrics = trainer.step_on(data)
    seconds = time.process_time() - seconds
    events = unit_events(unit_links(bundle), bundle.units_of_replica(0).tolist())
    events = with_second_forwards(events, recompute)
    flops = {u: unit_flops(config, build_unit_layout(bundle, tree, u)) for u in range(bundle.num_units)}
    return {
        "planner": arguments.planner,
        "recompute": recompute,
        "budget": arguments.budget,
        "capacity": capacity,
        "original_tokens": metrics.original_tokens,
        "computed_tokens": metrics.compact_tokens,
        "units": metrics.units,
        "windows": len(bundle.windows),
        "forwards": sum(event.kind in ("forward", "recompute") for event in events),
        "gflop": step_flops(flops, events, recompute).total / 1e9,
        "graph_tokens": peak_graphs(events, bundle.units.padded_tokens),
        "peak_bytes": resident_bytes("VmHWM") - before,
        "interface_bytes": metrics.interface_bytes,
        "offloaded_bytes": metrics.cache_offloaded_bytes,
        "cpu_s": seconds,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
    }


def measure_apart(options: list[str]) -> dict[str, Any]:
    """The same in a process of its own; ``options`` are added to this process's."""
    shared = [a for a in sys.argv[1:] if a != "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "524288"}
    command = [sys.executable, __file__, *shared, *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="tree-step", choices=("tree-step", "step"))
    parser.add_argument("--preset", default="cpu-bench", choices=[p for p in PRESETS if p.startswith("cpu")])
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--shorter", type=int, default=16, help="lengths are the paper's divided by it")
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--capacity", type=int, help="default: 65,536 divided by --shorter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--on-too-long", default="error", choices=("error", "split"))
    parser.add_argument("--planners", nargs="+", default=PLANNERS)
    parser.add_argument("--recompute", nargs="+", default=["none", "layer"], choices=get_args(Recompute))
    parser.add_argument(
        "--budget-share", type=float, help="also with a budget of this share of the blocks' peak"
    )
    parser.add_argument("--planner", help="measure one planner and recompute in this process, print JSON")
    parser.add_argument("--budget", type=int, help="with --planner")
    arguments = parser.parse_args()
    if arguments.planner:
        json.dump(measure(arguments), sys.stdout)
        return
    records = []
    for recompute in arguments.recompute:
        for planner in arguments.planners:
            one = ["--planner", planner, "--recompute", recompute]
            records.append(measure_apart(one))
            peak = records[-1]["interface_bytes"]
            if arguments.budget_share and peak:
                records.append(measure_apart([*one, "--budget", str(int(arguments.budget_share * peak))]))
    if arguments.json:
        json.dump(records, sys.stdout, indent=2)
        return
    first = records[0]
    print(
        f"{arguments.preset}, {first['original_tokens']:,} original tokens, capacity {first['capacity']:,}; "
        f"weights (as much again for gradients) {first['weight_bytes'] / MIB:.0f} MiB"
    )
    for r in records:
        print(
            f"  recompute {r['recompute']:<10} {r['planner']:<9}{' budget' if r['budget'] else '       '} "
            f"{r['computed_tokens']:>8,} tokens computed  {r['units']:>3} units  {r['windows']:>2} windows  "
            f"{r['forwards']:>3} forwards  graphs of {r['graph_tokens']:>7,} tokens  "
            f"peak {r['peak_bytes'] / MIB:8.1f} MiB  blocks {r['interface_bytes'] / MIB:7.1f} MiB  "
            f"offloaded {r['offloaded_bytes'] / MIB:7.1f} MiB  {r['gflop']:6.1f} GFLOP  {r['cpu_s']:5.1f} s  "
            f"loss {r['loss']:.9g}  |g| {r['grad_norm']:.17g}"
        )


if __name__ == "__main__":
    main()
