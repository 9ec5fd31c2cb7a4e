"""psRL: semantic groups to workers by longest processing time, token-wise microbatches on each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts_core.plan.cost_model import CostModel
from harts_core.plan.layout import Layout
from harts_core.plan.planners.groups import row_groups
from harts_core.plan.planners.packing import spread_heaviest_first
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.plan.planners.token_wise import layout_token_wise
from harts_core.plan.planners.worker_tokens import work_coefficients
from harts_core.progress import Progress
from harts_core.trees.neighbours import neighbour_lcp

LEVELLING_MOVES = 2
"""Moves of parts of groups, times D."""
EVEN_ENOUGH = 0.01
"""Work above the mean, as a part of it, that is left alone."""


def plan_psrl(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan as psRL does (sharing "tree", no producers; rows may be longer than the capacity).

    Groups go to the worker with the least work so far, the heaviest first (``place_groups``). Each worker's
    tokens are cut into microbatches of equal work at any token; later ones import what they need of earlier
    ones.

    Raises:
        InfeasiblePlanError: a worker has fewer tokens than another one needs microbatches.
    """
    return layout_token_wise(problem, place_groups(problem))


def place_groups(problem: PlanProblem) -> Int32:
    """int32 [M], the worker of each row: groups by longest processing time; none without a row.

    Groups are few and coarse, so that alone leaves workers apart. Then, ``LEVELLING_MOVES`` times D at most,
    the worker with the most work gives the end of one group (in sequence order) to the one with the least: as
    much as brings one of them nearest to the mean. What it shared with the rest of its group is computed
    again. A worker without a row always gets one; otherwise moves end when the most work is within
    ``EVEN_ENOUGH`` of the mean, or would not fall.
    """
    group = row_groups(problem)
    parts = [_Part.of_rows(problem, np.flatnonzero(group == g)) for g in range(int(group.max()) + 1)]
    owner = spread_heaviest_first(np.array([p.total for p in parts]), problem.dp).tolist()
    for _ in range(LEVELLING_MOVES * problem.dp):
        if not _move_part(problem, parts, owner):
            break
    worker = np.empty(len(problem.rows), np.int32)
    for part, d in zip(parts, owner, strict=True):
        worker[part.rows] = d
    return worker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """Sequences of one group on one worker.

    Attributes:
        rows: int64 [n], indices into the problem's rows, ascending.
        work: float64 [n], T(s) of each, with the one before it cached.
        alone: float64 [n], T(s) with nothing cached.
    """

    rows: Int64
    work: npt.NDArray[np.float64]
    alone: npt.NDArray[np.float64]

    @classmethod
    def of_rows(cls, problem: PlanProblem, rows: Int64) -> _Part:
        lcp = neighbour_lcp(problem.tree.lcp, problem.rows[rows], np.arange(len(rows)) == 0)
        length = problem.length[rows]
        return cls(
            rows=rows,
            work=sequence_work(length, lcp, problem.cost_model),
            alone=sequence_work(length, np.zeros_like(lcp), problem.cost_model),
        )

    @property
    def total(self) -> float:
        return float(self.work.sum())


def _move_part(problem: PlanProblem, parts: list[_Part], owner: list[int]) -> bool:
    """One move from the heaviest to the lightest worker; False: none is worth while."""
    load = np.bincount(owner, [p.total for p in parts], minlength=problem.dp)
    light, mean = int(load.argmin()), float(load.mean())
    starving = light not in owner
    num_rows = np.bincount(owner, [len(p.rows) for p in parts], minlength=problem.dp)
    heavy = int(np.where(num_rows > 1, load, 0.0).argmax())
    mine = [i for i, d in enumerate(owner) if d == heavy]
    if load[heavy] <= (1 + EVEN_ENOUGH) * mean and not starving:
        return False
    need = min(load[heavy] - mean, mean - load[light])
    best: tuple[float, int, int, float] | None = None
    for i in mine:
        part = parts[i]
        given = np.cumsum(part.work[::-1])[::-1]  # by moving the rows from each one on
        taken = given - part.work + part.alone
        error = np.abs(given - need) + (taken - given)
        first = int(len(mine) == 1)  # the heavy worker keeps a row
        if first < len(error):
            k = first + int(error[first:].argmin())
            if best is None or error[k] < best[0]:
                best = float(error[k]), i, k, float(load[light] + taken[k])
    if best is None or (best[3] >= load[heavy] and not starving):
        return False
    _, i, k, _ = best
    rows = parts[i].rows
    if k == 0:
        owner[i] = light
    else:
        parts[i] = _Part.of_rows(problem, rows[:k])
        parts.append(_Part.of_rows(problem, rows[k:]))
        owner.append(light)
    return True


def sequence_work(length: Int64, shared: Int32, cost_model: CostModel) -> npt.NDArray[np.float64]:
    """float64 [M], T(s) = α₁·l_suf·l + α₂·l_suf + α₃ of each sequence.

    l is its length and l_suf what it does not share with the sequence of its group before it. A token's and
    a query-key pair's cost, forward and backward together, give α₂ and α₁; the cost model has no cost per
    sequence, so α₃ = 0.

    Args:
        length, shared: int [M], l and l − l_suf.
        cost_model: the coefficients.
    """
    suffix = (length - shared).astype(np.float64)
    pair, token = work_coefficients(cost_model)
    return pair * suffix * length + token * suffix
