"""How far apart are parallel layouts in bfloat16, beside the rounding of bfloat16 itself?

The same step (a plan with sharing windows, experts with their losses, advantages) of a model with the same
bfloat16 weights runs in one process in float32 and in bfloat16, and in bfloat16 on parallel layouts, each in
processes of its own on this machine. Markdown on stdout: how far every bfloat16 run is from the one in
float32, and every layout from one process in bfloat16: relative differences of the loss, of the gradient's
norm and of the gradient as a whole, its cosine, the parameter whose gradient differs most (of those that hold
at least a thousandth of the norm), and the share of tokens that go to another expert.

    python benchmarks/layout_parity.py        # about two CPU minutes
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workloads import shortened_workload

from harts_core.exec.config import Dtype, OptimizerSection, ParallelSection
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.model.moe_losses import RouterTerms
from harts_core.exec.objectives import Reinforce
from harts_core.exec.parallel.job import join_job
from harts_core.exec.parallel.launch import read_launch
from harts_core.exec.trainer import Trainer
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree

MODEL = PRESETS["cpu-moe"]
LEAST_SHARE = 1e-3
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 + SP, EP2": {"tp": 2, "sp": True, "ep": 2},
    "PP2": {"pp": 2},
    "DP2, EP2": {"dp": 2, "ep": 2},
}
COLUMNS = ("loss", "gradient norm", "gradient", "cosine", "worst parameter", "routed otherwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Loss, whole gradients by parameter, and tokens of each expert [layers, experts]."""

    loss: float
    gradients: dict[str, Tensor]
    routed: Tensor

    @property
    def flat(self) -> Tensor:
        """All gradients."""
        return torch.cat([g.flatten().double() for _, g in sorted(self.gradients.items())])


def run_step(parallel: ParallelSection, dtype: Dtype, seed: int) -> Step | None:
    """One step in this process or its job; None on all but the main process."""
    torch.set_num_threads(1)
    tree = shortened_workload("tree", rows=16, shorter=64, vocab_size=MODEL.vocab_size, seed=seed)
    capacity = int(tree.length.max())
    plan = plan_tree(tree, PlanOptions(planner="harts", dp=2, capacity=capacity, chunk=16, pad=2))
    whole = HybridModel(MODEL, dtype=torch.bfloat16, seed=seed)
    weights = dict(whole.named_parameters())
    with join_job(parallel, read_launch(), "cpu") as job:
        model = HybridModel(MODEL, dtype=getattr(torch, dtype), spec=job.spec, seed=None)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(job.spec.shard_of(parameter).own_part(weights[name]))
            for bias in model.expert_biases:
                bias.zero_()
        optimizer = job.optimizer(model, OptimizerSection(), sharded=False)
        router = RouterTerms(z_loss_coef=0.001, balance_loss_coef=0.01)
        trainer = Trainer(model, Reinforce(), optimizer, router=router, ranks=job.ranks)
        result = trainer.backward(trainer.prepare(plan, tree))
        gradients = job.collect((n, optimizer.gradient(n), p) for n, p in optimizer.parameters())
        stages = job.gather(result.expert_counts)
        if not job.is_main:
            return None
        routed = torch.cat([s for s in stages[:: parallel.dp * parallel.tp] if s is not None])
        return Step(loss=result.loss, gradients=gradients, routed=routed)


def start(parallel: Mapping[str, Any], dtype: Dtype, seed: int) -> Step:
    """``run_step`` in processes of its own."""
    count = ParallelSection(**parallel).num_processes
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.pt"
        arguments = [sys.executable, __file__, "--worker", json.dumps(parallel), dtype, str(file)]
        job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = []
        for rank in range(count):
            env = os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen([*arguments, "--seed", str(seed)], env=env))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"the processes of {dict(parallel)} failed")
        return Step(**torch.load(file, weights_only=True))


def differences(step: Step, reference: Step) -> list[str]:
    """The columns."""
    flat, expected = step.flat, reference.flat
    errors = {
        name: float((step.gradients[name].double() - g.double()).norm() / g.double().norm())
        for name, g in reference.gradients.items()
        if g.norm() >= LEAST_SHARE * expected.norm()
    }
    worst = max(errors, key=errors.__getitem__)
    cosine = float(torch.dot(flat, expected) / (flat.norm() * expected.norm()))
    moved = float((step.routed - reference.routed).abs().sum() / 2 / reference.routed.sum())
    return [
        f"{abs(step.loss - reference.loss) / abs(reference.loss):.1e}",
        f"{abs(float(flat.norm() / expected.norm()) - 1):.1e}",
        f"{float((flat - expected).norm() / expected.norm()):.2%}",
        f"{cosine:.5f}",
        f"{errors[worst]:.1%} `{worst.removeprefix('model.')}`",
        f"{moved:.2%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        layout, dtype, file = arguments.worker
        step = run_step(ParallelSection(**json.loads(layout)), dtype, arguments.seed)
        if step is not None:
            torch.save(asdict(step), file)
        return
    exact, alone = (start({}, dtype, arguments.seed) for dtype in ("float32", "bfloat16"))
    steps = {name: start(layout, "bfloat16", arguments.seed) for name, layout in LAYOUTS.items()}
    print(f"| bfloat16 | against | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for name, step in {"one process": alone, **steps}.items():
        print(f"| {name} | float32 | {' | '.join(differences(step, exact))} |")
    for name, step in steps.items():
        print(f"| {name} | one process | {' | '.join(differences(step, alone))} |")


if __name__ == "__main__":
    main()
