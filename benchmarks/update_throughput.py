"""Original tokens per second of a whole update, shared and not, beside the bound that operations set.

One process, one model (learning rate 0: the weights stay, the work is that of a real step), the variants in
turn, again and again. Per variant: the median rate, the median of the paired ratios to ``expanded``, the
ratio of exactly counted operations (``harts_core.exec.flops``), and their quotient, the efficiency.

    python benchmarks/update_throughput.py tree-step
    python benchmarks/update_throughput.py step
    python benchmarks/update_throughput.py path/to/step_wise.parquet --groups airline/1,airline/43

``by node`` and ``by level`` run the ``harts-l1`` plan with one linear-attention call per tree node or level.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from time_shares import PARTS, time_shares
from workloads import real_rollouts, shortened_workload

from harts_core.exec.config import LinearCalls, OptimizerSection
from harts_core.exec.flops import UnitFlops, unit_flops
from harts_core.exec.layout import build_unit_layout
from harts_core.exec.model.config import PRESETS, ModelConfig
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Reinforce
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.step_data import StepData
from harts_core.exec.trainer import Trainer
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.rollout_tree import RolloutTree

VARIANTS: dict[str, tuple[str, LinearCalls]] = {
    "expanded": ("expanded", "rounds"),
    "by node": ("harts-l1", "nodes"),
    "by level": ("harts-l1", "levels"),
    "harts-l1": ("harts-l1", "rounds"),
    "harts": ("harts", "rounds"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A tree, the model that fits its vocabulary, and how it is planned."""

    name: str
    tree: RolloutTree
    config: ModelConfig
    capacity: int
    chunk: int


def make_workload(arguments: argparse.Namespace) -> Workload:
    """The named shortened workload, or the file's groups."""
    config = PRESETS[arguments.preset]
    if arguments.workload in ("tree-step", "step"):
        tree = shortened_workload(
            arguments.workload,
            rows=arguments.rows,
            shorter=arguments.shorter,
            vocab_size=config.vocab_size,
            seed=arguments.seed,
        )
        capacity, chunk = 65_536 // arguments.shorter, 16
    else:
        tree = real_rollouts(Path(arguments.workload), tuple(arguments.groups.split(",")))
        config = replace(config, vocab_size=int(tree.suffix.values.max()) + 1)
        capacity, chunk = 8192, 64
    return Workload(
        name=Path(arguments.workload).name,
        tree=tree,
        config=config,
        capacity=arguments.capacity or capacity,
        chunk=arguments.chunk or chunk,
    )


class Variant:
    """One way to run the workload's step: a plan, its operations, and a trainer on the common model."""

    def __init__(
        self, name: str, workload: Workload, model: HybridModel, plans: dict[str, PlanBundle]
    ) -> None:
        planner, calls = VARIANTS[name]
        self.bundle = plans[planner]
        optimizer = Optimizer(model.named_parameters(), OptimizerSection(learning_rate=0.0))
        self.trainer = Trainer(model, Reinforce(), optimizer, linear_calls=calls)
        self.data: StepData = self.trainer.prepare(self.bundle, workload.tree)
        layouts = [
            build_unit_layout(self.bundle, workload.tree, unit, linear_calls=calls)
            for unit in range(self.bundle.num_units)
        ]
        self.flops = sum((unit_flops(workload.config, layout) for layout in layouts), UnitFlops())
        self.calls = sum(len(layout.rounds) for layout in layouts)
        self.replayed = sum(len(layout.packed_rows) - layout.num_rows for layout in layouts)
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.loss = 0.0

    def step(self) -> None:
        """One timed step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.loss = self.trainer.step_on(self.data).loss
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)


def measure(workload: Workload, arguments: argparse.Namespace) -> dict[str, Variant]:
    """Every variant ``repeats`` times, alternating, after one warm-up of each that shares."""
    names = arguments.variants.split(",")
    model = HybridModel(workload.config, dtype=torch.float32, seed=0)
    plans = {}
    for planner in {VARIANTS[name][0] for name in names}:
        options = PlanOptions(dp=1, capacity=workload.capacity, chunk=workload.chunk, planner=planner)
        plans[planner] = plan_tree(workload.tree, options)
    variants = {name: Variant(name, workload, model, plans) for name in names}
    for name, variant in variants.items():
        if name != "expanded":
            variant.trainer.step_on(variant.data)
    for _ in range(arguments.repeats):
        for variant in variants.values():
            variant.step()
    return variants


def summary(workload: Workload, variants: dict[str, Variant], clock: str) -> list[dict[str, object]]:
    """One record per variant, ratios against ``expanded``."""
    base = variants["expanded"]
    records: list[dict[str, object]] = []
    for name, variant in variants.items():
        seconds = {v: getattr(variants[v], f"{clock}_s") for v in ("expanded", name)}
        ratios = [a / b for a, b in zip(seconds["expanded"], seconds[name], strict=True)]
        bound = base.flops.total / variant.flops.total
        records.append(
            {
                "variant": name,
                "computed_tokens": int(variant.bundle.units.computed_tokens.sum()),
                "replayed_tokens": variant.replayed,
                "units": variant.bundle.num_units,
                "linear_attention_calls": variant.calls,
                "seconds": statistics.median(seconds[name]),
                "tokens_per_s": workload.tree.original_tokens / statistics.median(seconds[name]),
                "speed_ratio": statistics.median(ratios),
                "speed_ratio_range": (min(ratios), max(ratios)),
                "flop_ratio": bound,
                "efficiency": statistics.median(ratios) / bound,
                "forward_flops": asdict(variant.flops),
                "loss": variant.loss,
            }
        )
    return records


def print_summary(workload: Workload, records: list[dict[str, object]], clock: str) -> None:
    tree = workload.tree
    print(
        f"{workload.name}: {tree.num_rows} rows, {tree.original_tokens:,} original tokens, "
        f"trie {tree.trie_tokens:,}; capacity {workload.capacity:,}, chunk {workload.chunk}; {clock} time\n"
    )
    print(
        "| variant | computed | replayed | units | calls | original tokens/s | speed | bound | efficiency |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for r in records:
        low, high = r["speed_ratio_range"]  # type: ignore[misc]
        print(
            f"| {r['variant']} | {r['computed_tokens']:,} | {r['replayed_tokens']:,} | {r['units']} | "
            f"{r['linear_attention_calls']} | {r['tokens_per_s']:,.0f} | {r['speed_ratio']:.2f} "
            f"({low:.2f}–{high:.2f}) | {r['flop_ratio']:.2f} | {r['efficiency']:.2f} |"
        )
    losses = [float(r["loss"]) for r in records]  # type: ignore[arg-type]
    print(f"\nlosses from {min(losses):.9g} to {max(losses):.9g}")


def print_shares(variants: dict[str, Variant], names: list[str]) -> dict[str, dict[str, float]]:
    shares = {n: time_shares(variants[n].trainer, variants[n].step) for n in names}
    print("\n| part | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for part in PARTS:
        print(f"| {part} | " + " | ".join(f"{shares[n][part]:.1%}" for n in names) + " |")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", help="tree-step, step, or a rollout file")
    parser.add_argument("--groups", default="airline/1,airline/43", help="prompt groups of a rollout file")
    parser.add_argument("--rows", type=int, default=200, help="rows of a shortened workload")
    parser.add_argument("--shorter", type=int, default=32, help="lengths and capacity are divided by this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="cpu-bench", choices=[p for p in PRESETS if p.startswith("cpu")])
    parser.add_argument("--capacity", type=int, help="default: 65,536 / shorter, or 8,192 for a file")
    parser.add_argument("--chunk", type=int, help="default: 16, or 64 for a file")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=("cpu", "wall"), default="cpu", help="cpu: robust on a shared machine"
    )
    parser.add_argument("--shares", default="", help="variants whose time is split by part, at the end")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workload = make_workload(arguments)
    variants = measure(workload, arguments)
    records = summary(workload, variants, arguments.clock)
    if arguments.json:
        json.dump(
            {"original_tokens": workload.tree.original_tokens, "variants": records}, sys.stdout, indent=2
        )
        return
    print_summary(workload, records, arguments.clock)
    if arguments.shares:
        print_shares(variants, arguments.shares.split(","))


if __name__ == "__main__":
    main()
