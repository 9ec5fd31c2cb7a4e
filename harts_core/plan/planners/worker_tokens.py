"""One worker's tokens in depth-first order, and how they are cut into microbatches of equal work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.errors import InfeasiblePlanError
from harts_core.plan.cost_model import CostModel
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.segments import SegmentTree, build_segment_tree

MOST_MICROBATCHES = 2
"""Times the fewest that the capacity allows: more are not tried in order to even out their work."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerTokens:
    """One worker's tokens in depth-first order.

    Attributes:
        rows: int32 [M], its rows of the tree, ascending.
        length: int32 [M], their tokens.
        tree: their segment tree (``tree.row`` indexes ``rows``).
        first: int64 [V + 1], tokens before each segment.
        work: float64 [V + 1], their work.
        per_token, per_pair: a token at position t costs per_token + per_pair·(t + 1).
    """

    rows: Int32
    length: Int32
    tree: SegmentTree
    first: Int64
    work: npt.NDArray[np.float64]
    per_token: float
    per_pair: float

    @classmethod
    def of_rows(cls, problem: PlanProblem, mine: npt.NDArray[Any]) -> WorkerTokens:
        """The tokens of some rows of a problem.

        Args:
            problem: the problem.
            mine: int [M], M ≥ 1, indices into ``problem.rows``, ascending.
        """
        rows = problem.rows[mine]
        length = problem.tree.length[rows]
        tree = build_segment_tree(length, neighbour_lcp(problem.tree.lcp, rows, np.arange(len(rows)) == 0))
        per_pair, per_token = work_coefficients(problem.cost_model)
        start, stop = tree.start.astype(np.float64), tree.stop.astype(np.float64)
        keys = (stop * (stop + 1) - start * (start + 1)) / 2
        tokens = tree.stop.astype(np.int64) - tree.start
        return cls(
            rows=rows,
            length=length,
            tree=tree,
            first=np.concatenate([[0], np.cumsum(tokens)]),
            work=np.concatenate([[0.0], np.cumsum(per_token * tokens + per_pair * keys)]),
            per_token=per_token,
            per_pair=per_pair,
        )

    @property
    def num_tokens(self) -> int:
        """Compact tokens of the worker."""
        return int(self.first[-1])

    def tokens_of_work(self, work: npt.NDArray[np.float64]) -> Int64:
        """int64, how many leading tokens have about so much work (to the nearest token)."""
        segment = np.clip(np.searchsorted(self.work, work, side="right") - 1, 0, len(self.tree) - 1)
        rest = np.maximum(work - self.work[segment], 0.0)
        # The first x tokens of a segment that starts at s: linear·x + per_pair/2·x² = rest.
        linear = self.per_token + self.per_pair * (self.tree.start[segment] + 0.5)
        x = 2 * rest / (linear + np.sqrt(linear * linear + 2 * self.per_pair * rest))
        room = (self.first[segment + 1] - self.first[segment]).astype(np.float64)
        return np.asarray(self.first[segment] + np.minimum(np.rint(x), room), np.int64)


def work_coefficients(cost: CostModel) -> tuple[float, float]:
    """(α₁, α₂): work of a query-key pair and of a token, forward and backward together."""
    return cost.beta_forward + cost.beta_backward, cost.alpha_forward + cost.alpha_backward


def cut_tokens(worker: WorkerTokens, *, count: int, capacity: int) -> Int64:
    """int64 [count + 1], cuts 0 = c₀ < c₁ < … in tokens: microbatches of equal work within the capacity.

    Where a cut of equal work would exceed the capacity, or leave too many or too few tokens for the rest, it
    is the nearest that does not, and the rest is cut evenly again.

    Args:
        worker: its tokens.
        count: at least tokens / capacity, at most the tokens.
        capacity: tokens of a microbatch.
    """
    cuts = _even_cuts(worker, count)
    if np.diff(cuts).min() <= 0 or np.diff(cuts).max() > capacity:
        cuts = _bounded_cuts(worker, count, capacity)
    return cuts


def _bounded_cuts(worker: WorkerTokens, count: int, capacity: int) -> Int64:
    """Cuts from left to right, each as even as the capacity and the tokens left allow."""
    total = worker.num_tokens
    cuts = np.zeros(count + 1, np.int64)
    done = 0.0
    for j in range(1, count):
        left = count - j
        low = max(int(cuts[j - 1]) + 1, total - left * capacity)
        high = min(int(cuts[j - 1]) + capacity, total - left)
        target = done + (float(worker.work[-1]) - done) / (left + 1)
        cuts[j] = np.clip(worker.tokens_of_work(np.array([target]))[0], low, high)
        done = float(_work_of_tokens(worker, int(cuts[j])))
    cuts[count] = total
    return cuts


def _even_cuts(worker: WorkerTokens, count: int) -> Int64:
    cuts = worker.tokens_of_work(np.linspace(0.0, float(worker.work[-1]), count + 1, dtype=np.float64))
    cuts[0], cuts[-1] = 0, worker.num_tokens
    return cuts


def _work_of_tokens(worker: WorkerTokens, tokens: int) -> float:
    """The work of the first ``tokens`` tokens."""
    segment = int(np.searchsorted(worker.first, tokens, side="right")) - 1
    if segment == len(worker.tree):
        return float(worker.work[-1])
    x = tokens - int(worker.first[segment])
    start = int(worker.tree.start[segment])
    return (
        float(worker.work[segment]) + worker.per_token * x + worker.per_pair * (x * start + x * (x + 1) / 2)
    )


def count_microbatches(workers: list[WorkerTokens], capacity: int) -> int:
    """The microbatches that every worker gets.

    The fewest for which cuts of equal work keep to the capacity on all workers; at most ``MOST_MICROBATCHES``
    times the fewest possible.

    Raises:
        InfeasiblePlanError: a worker has fewer tokens than another one needs microbatches.
    """
    tokens = [w.num_tokens for w in workers]
    fewest = -(-max(tokens) // capacity)
    if fewest > min(tokens):
        raise InfeasiblePlanError(
            f"a replica has {min(tokens)} tokens, too few for {fewest} microbatches (what another one needs)",
            where=f"replica {int(np.argmin(tokens))}",
            hint="raise --capacity or lower --dp",
        )
    most = min(MOST_MICROBATCHES * fewest, min(tokens))
    for count in range(fewest, most + 1):
        if all(np.diff(_even_cuts(w, count)).max() <= capacity for w in workers):
            return count
    return most
