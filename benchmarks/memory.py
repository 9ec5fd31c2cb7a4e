"""Peak memory of a training step, shared and not, with and without recomputation, at equal capacity.

Each line is a process of its own. After the model, the optimizer and the plan are in memory and one unit of
one sequence has run, the kernel's peak counter is reset; the line shows how far resident memory rose above
that while one step ran (gradients included, which are the same for all). Beside it: the most bytes that
interfaces between units held, and the step's loss.

    python benchmarks/memory.py
    python benchmarks/memory.py --workload step --preset cpu-bench --shorter 8

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
from pathlib import Path

import torch
from workloads import shortened_workload

from harts_core.exec.config import OptimizerSection
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree

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


def measure(arguments: argparse.Namespace) -> dict[str, object]:
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
        tree, PlanOptions(dp=1, capacity=capacity, chunk=arguments.chunk, planner=arguments.planner)
    )
    model = HybridModel(config, dtype=torch.float32, seed=0)
    optimizer = Optimizer(model.named_parameters(), OptimizerSection(learning_rate=0.0))
    trainer = Trainer(model, Grpo(), optimizer, recompute=arguments.recompute)
    data = trainer.prepare(bundle, tree)
    small = torch.zeros(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.neg, small, use_reentrant=False).backward()  # imports
    reset_peak()
    before = resident_bytes("VmRSS")
    metrics = trainer.step_on(data)
    return {
        "planner": arguments.planner,
        "recompute": arguments.recompute,
        "capacity": capacity,
        "original_tokens": metrics.original_tokens,
        "computed_tokens": metrics.compact_tokens,
        "units": metrics.units,
        "windows": len(bundle.windows),
        "peak_bytes": resident_bytes("VmHWM") - before,
        "interface_bytes": metrics.interface_bytes,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "loss": metrics.loss,
    }


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
    parser.add_argument("--planner", choices=PLANNERS, help="measure in this process, print JSON")
    parser.add_argument("--recompute", default="none", choices=("none", "layer"))
    arguments = parser.parse_args()
    if arguments.planner:
        json.dump(measure(arguments), sys.stdout)
        return
    shared = [a for a in sys.argv[1:] if a != "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "524288"}
    records = []
    for recompute in ("none", "layer"):
        for planner in PLANNERS:
            command = [sys.executable, __file__, *shared, "--planner", planner, "--recompute", recompute]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            records.append(json.loads(done.stdout))
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
            f"  recompute {r['recompute']:<6} {r['planner']:<9} {r['computed_tokens']:>8,} tokens computed  "
            f"{r['units']:>3} units  {r['windows']:>2} windows  peak {r['peak_bytes'] / MIB:8.1f} MiB  "
            f"interfaces {r['interface_bytes'] / MIB:7.1f} MiB  loss {r['loss']:.7g}"
        )


if __name__ == "__main__":
    main()
