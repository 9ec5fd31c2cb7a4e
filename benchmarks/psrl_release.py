"""What freeing cache blocks after their last use saves, executed, on the branching step-wise shape.

The network-agent workload with all lengths divided is trained on (one step, a small MoE model, float32),
planned by psRL and by harts, all workers in turn. Peak and allocated bytes are measured on the tensors that
units keep for later units; without release all that a worker allocates would stay until the end of the step,
so that is its peak then. The simulation of the same plan has to agree to the byte. Markdown on stdout, the
worse worker of each plan.

    python benchmarks/psrl_release.py           # two CPU minutes
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from psrl import head, integers
from unit_times import Step, run_step
from workloads import agent_workloads, shorten

from harts_core.exec.cache_bytes import cache_row_bytes
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.plan.cache_policy.report import memory_report
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import build_tree
from harts_core.trees.synth.samples import generate

PLANNERS = ("psrl", "harts")
COLUMNS = ("units", "windows", "peak MiB", "without release", "saved", "simulated")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--seeds", type=integers, default=[0, 1, 2])
    parser.add_argument("--shorter", type=int, default=16, help="divide lengths and capacity")
    parser.add_argument("--capacity", type=int, default=32_768)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--dp", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = HybridModel(PRESETS["cpu-bench"], dtype=torch.float32, seed=0)
    print("\n".join(head("planner, seed", COLUMNS)))
    for seed in arguments.seeds:
        spec = replace(
            agent_workloads(arguments.rows, seed)["network-agent"], vocab_size=model.config.vocab_size
        )
        tree = build_tree(generate(shorten(spec, arguments.shorter)))
        for planner in PLANNERS:
            options = PlanOptions(
                planner=planner,
                dp=arguments.dp,
                capacity=arguments.capacity // arguments.shorter,
                chunk=arguments.chunk,
            )
            bundle = plan_tree(tree, options)
            caches = run_step(model, Step(bundle=bundle, tree=tree)).cache
            peak, kept = max(c.peak_bytes for c in caches), max(c.allocated_bytes for c in caches)
            simulated = memory_report(
                bundle, row_bytes=cache_row_bytes(model.config, "float32"), tree=tree, fixed_sizes=()
            )
            same = (peak, kept) == tuple(p.peak for p in simulated.policies[:2])
            saved = 1 - peak / kept if kept else 0.0
            print(
                f"| {planner}, {seed} | {bundle.num_units} | {len(bundle.windows)} | {peak / 2**20:.1f} | "
                f"{kept / 2**20:.1f} | {saved:.1%} | {'same' if same else 'OTHER'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
