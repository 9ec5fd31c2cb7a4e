"""How far are a shared plan's bfloat16 logits from those of trajectory-by-trajectory execution?

Every token of a shortened tree-step workload is compared: the cosine of its full-vocabulary logits, Harts
against one forward per trajectory, and the loss of the step with the norm and direction of its gradient, with
and without activation recomputation. A second baseline shows what bfloat16 itself does: the same trajectories
repeated in packed microbatches.

    python benchmarks/logit_cosine.py --rows 40
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from workloads import shortened_workload

from harts_core.exec.config import OptimizerSection, Recompute
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Reinforce
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.exec.windows import UnitExecutor, UnitForward
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.rollout_tree import RolloutTree

BLOCK = 2048
"""Positions whose logits are compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's loss and all its gradients, flat, in float64."""

    loss: float
    gradient: Tensor


def every_position(tree: RolloutTree) -> RolloutTree:
    """The same rows with all positions but the first trained, so that the head reads every token."""
    return build_tree(
        Trajectory(
            trajectory_id=tree.trajectory_id[row],
            group_id=tree.group_id[row],
            tokens=tree.tokens(row),
            loss_spans=np.array([(1, tree.length[row])]),
            advantages=None if tree.advantages is None else tree.advantages[row][:1],
        )
        for row in range(tree.num_rows)
    )


def position_hidden(model: HybridModel, bundle: PlanBundle, tree: RolloutTree) -> Tensor:
    """The final hidden state that predicts each trained position, [n, D], by (row, position)."""
    found: list[tuple[np.ndarray, np.ndarray, Tensor]] = []

    def collect(forward: UnitForward) -> None:
        layout = forward.layout.to(model.device)
        if len(layout.trained_row):
            parts = [forward.hidden] + ([] if forward.imported_hidden is None else [forward.imported_hidden])
            rows = layout.head_rows[layout.head_label_row[layout.trained_label]]
            found.append((layout.trained_row, layout.trained_index, torch.cat(parts)[rows]))

    order = np.lexsort((bundle.units.order, bundle.units.replica)).tolist()
    events = unit_events(unit_links(bundle), order, training=False)
    executor = UnitExecutor(model, bundle, tree, collect, events)
    for event in events:
        executor.run(event)
    row, index = (np.concatenate([part[i] for part in found]) for i in (0, 1))
    return torch.cat([part[2] for part in found])[torch.tensor(np.lexsort((index, row)))]


def one_by_one(model: HybridModel, tree: RolloutTree) -> Tensor:
    """``position_hidden`` with a forward per trajectory, each in a tree of its own."""
    parts = []
    for row in range(tree.num_rows):
        alone = build_tree(
            [
                Trajectory(
                    trajectory_id="0",
                    group_id="0",
                    tokens=tree.tokens(row),
                    loss_spans=tree.loss_spans[row].reshape(-1, 2),
                )
            ]
        )
        options = PlanOptions(dp=1, capacity=int(alone.length[0]), planner="expanded", chunk=16)
        parts.append(position_hidden(model, plan_tree(alone, options), alone))
    return torch.cat(parts)


@torch.no_grad()
def logit_cosines(model: HybridModel, a_ND: Tensor, b_ND: Tensor) -> Tensor:
    """[N], cosine of the full-vocabulary logits of two hidden states; logits in the model dtype."""
    cosines = []
    for first in range(0, len(a_ND), BLOCK):
        a, b = (model.lm_head(x[first : first + BLOCK]).double() for x in (a_ND, b_ND))
        cosines.append(torch.nn.functional.cosine_similarity(a, b, dim=-1))
    return torch.cat(cosines)


def step_of(
    optimizer: Optimizer, model: HybridModel, bundle: PlanBundle, tree: RolloutTree, recompute: Recompute
) -> Step:
    """Loss and gradients of one REINFORCE step, without an update."""
    trainer = Trainer(model, Reinforce(), optimizer, recompute=recompute)
    result = trainer.backward(trainer.prepare(bundle, tree))
    gradients = [g.detach().double().flatten() for g in optimizer.gradients().values()]
    return Step(loss=result.loss, gradient=torch.cat(gradients))


def compare_steps(base: Step, other: Step) -> dict[str, float]:
    """Differences of two steps."""
    cosine = torch.nn.functional.cosine_similarity(base.gradient, other.gradient, dim=0)
    return {
        "loss": other.loss,
        "loss_difference": abs(other.loss - base.loss),
        "gradient_cosine": float(cosine),
        "gradient_norm_ratio": float(other.gradient.norm() / base.gradient.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--shorter", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="cpu-bench", choices=[p for p in PRESETS if p.startswith("cpu")])
    parser.add_argument("--initializer-range", type=float, default=0.05)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = replace(PRESETS[arguments.preset], initializer_range=arguments.initializer_range)
    made = shortened_workload(
        "tree-step",
        rows=arguments.rows,
        shorter=arguments.shorter,
        vocab_size=config.vocab_size,
        seed=arguments.seed,
    )
    tree = every_position(made)
    model = HybridModel(config, dtype=torch.bfloat16, seed=arguments.seed)

    def plan(planner: str, capacity: int) -> PlanBundle:
        return plan_tree(tree, PlanOptions(dp=1, capacity=capacity, planner=planner, chunk=16))

    longest, capacity = int(tree.length.max()), 65_536 // arguments.shorter
    plans = {"harts": plan("harts", capacity), "repeated": plan("expanded", capacity)}
    alone = one_by_one(model, tree)
    hidden = {name: position_hidden(model, bundle, tree) for name, bundle in plans.items()}
    cosines = {name: logit_cosines(model, alone, found) for name, found in hidden.items()}
    optimizer = Optimizer(model.named_parameters(), OptimizerSection())
    base = step_of(optimizer, model, plan("expanded", longest), tree, "none")
    steps = {
        f"{name}, recompute {recompute}": compare_steps(
            base, step_of(optimizer, model, bundle, tree, recompute)
        )
        for name, bundle in plans.items()
        for recompute in ("none", "layer")
    }
    result = {
        "original_tokens": tree.original_tokens,
        "computed_tokens": int(plans["harts"].units.computed_tokens.sum()),
        "positions": len(alone),
        "logit_cosine": {
            name: {
                "mean": float(c.mean()),
                "minimum": float(c.min()),
                "share_of_equal_bits": float((hidden[name] == alone).all(-1).double().mean()),
            }
            for name, c in cosines.items()
        },
        "baseline_loss": base.loss,
        "steps": steps,
    }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
