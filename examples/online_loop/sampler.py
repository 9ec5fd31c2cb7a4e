"""Sampling from the training model itself, with the prefix sharing of its training steps.

Every call merges the running rollouts into a tree and runs one forward over it. There is no key/value cache:
enough for a toy, and the sampled log-probabilities are those that training would compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from harts_core.exec.layout import build_unit_layout
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.unit import unit_hidden
from harts_core.plan.options import PlanOptions
from harts_core.plan.step import plan_step
from harts_core.trees.build import Trajectory


@dataclass(slots=True, kw_only=True)
class Rollout:
    """A running rollout: its tokens, and which of them were sampled with which log-probability."""

    group: str
    tokens: list[int]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def observe(self, token: int) -> None:
        """The environment's next token."""
        self.tokens.append(token)

    def branch(self) -> Rollout:
        """Another rollout with the same past."""
        return Rollout(
            group=self.group,
            tokens=list(self.tokens),
            sampled=list(self.sampled),
            logprobs=list(self.logprobs),
        )


@torch.no_grad()
def sample_token(model: HybridModel, rollouts: list[Rollout], generator: torch.Generator) -> None:
    """Append one token to every rollout, drawn from the model's distribution at temperature 1."""
    rows = [
        Trajectory(trajectory_id=str(i), group_id=rollout.group, tokens=rollout.tokens, loss_spans=[])
        for i, rollout in enumerate(rollouts)
    ]
    total = sum(len(rollout.tokens) for rollout in rollouts)
    tree, plan = plan_step(rows, PlanOptions(dp=1, capacity=total, planner="harts-l1", chunk=16))
    layout = build_unit_layout(plan, tree, 0)
    hidden = unit_hidden(model, layout)
    last = [0] * len(rollouts)
    table = plan.assignments
    for row, span, stop in zip(table.row.tolist(), table.span.tolist(), table.stop.tolist(), strict=True):
        last[int(tree.trajectory_id[row])] = layout.row_of(span, stop - 1)
    logp = torch.log_softmax(model.lm_head(hidden[last]).float(), dim=-1)
    drawn = torch.multinomial(logp.exp(), 1, generator=generator)
    for rollout, token, value in zip(
        rollouts, drawn[:, 0].tolist(), logp.gather(1, drawn)[:, 0].tolist(), strict=True
    ):
        rollout.sampled.append(len(rollout.tokens))
        rollout.logprobs.append(value)
        rollout.tokens.append(token)
