"""What every planner is given and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from harts_core.errors import InfeasiblePlanError
from harts_core.plan.cost_model import DEFAULT_COST_MODEL, PRESETS, CostModel
from harts_core.plan.layout import Layout, layout_consumers
from harts_core.progress import Progress
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.ragged import read_only
from harts_core.trees.rollout_tree import RolloutTree

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanProblem:
    """One planning problem: the rows to place and the limits.

    Attributes:
        tree: the rollout tree.
        rows: int32 [M], the rows to place, ascending; M ≥ dp. Every length ≤ capacity, but for planners that
            split trajectories.
        length: int64 [M], tokens of each.
        lcp: int32 [M], tokens shared with the one before; 0 for the first.
        dp: D.
        capacity: T, compact tokens of a consumer.
        seed: of randomised searches.
        pad: A, computed tokens are rounded up to a multiple of it.
        producer_capacity: tokens that a producer may compute.
        max_live_producers: producers that may be alive at once on a replica.
        max_window_slots: slots that may share an inner producer; None: any number.
        cost_model: coefficients of unit costs, which planners with producers compare plans by.
        effort: rounds of search, ≥ 1.
        time_budget_s: planners may add whole rounds until so many seconds have passed.
        search_budget: deterministic seconds that a solver may search each of its models.
    """

    tree: RolloutTree
    rows: Int32
    length: Int64
    lcp: Int32
    dp: int
    capacity: int
    seed: int
    pad: int
    producer_capacity: int
    max_live_producers: int
    max_window_slots: int | None
    cost_model: CostModel
    effort: int
    time_budget_s: float
    search_budget: float

    @classmethod
    def of_rows(
        cls,
        tree: RolloutTree,
        rows: Int32,
        *,
        dp: int,
        capacity: int,
        seed: int,
        pad: int = 1,
        producer_capacity: int | None = None,
        max_live_producers: int = 2,
        max_window_slots: int | None = None,
        cost_model: CostModel = PRESETS[DEFAULT_COST_MODEL],
        effort: int = 2,
        time_budget_s: float = 0.0,
        search_budget: float = 1.0,
    ) -> PlanProblem:
        """The problem of placing some rows of a tree; ``producer_capacity`` None: the capacity."""
        first = np.zeros(len(rows), np.bool_)
        first[:1] = True
        return cls(
            tree=tree,
            rows=read_only(rows),
            length=read_only(tree.length[rows].astype(np.int64)),
            lcp=read_only(neighbour_lcp(tree.lcp, rows, first)),
            dp=dp,
            capacity=capacity,
            seed=seed,
            pad=pad,
            producer_capacity=producer_capacity or capacity,
            max_live_producers=max_live_producers,
            max_window_slots=max_window_slots,
            cost_model=cost_model,
            effort=effort,
            time_budget_s=time_budget_s,
            search_budget=search_budget,
        )

    def with_rows(self, rows: Int32) -> PlanProblem:
        """The same problem for other rows of the tree, ascending."""
        first = np.zeros(len(rows), np.bool_)
        first[:1] = True
        return replace(
            self,
            rows=read_only(rows),
            length=read_only(self.tree.length[rows].astype(np.int64)),
            lcp=read_only(neighbour_lcp(self.tree.lcp, rows, first)),
        )

    def whole_slots(self, num_consumers: int) -> int:
        """The least multiple of D that is ≥ ``num_consumers`` and positive."""
        return max(1, -(-num_consumers // self.dp)) * self.dp

    def layout(self, consumer: Int32, weight: Int64, *, sharing: str) -> Layout:
        """The layout of a partition, its consumers placed on slots and replicas.

        Args:
            consumer: int32 [M], 0 ≤ consumer < K, the consumer of each row; K a multiple of D.
            weight: int64 [K], their compact tokens.
            sharing: as for :func:`layout_consumers`.
        """
        slot, replica = place_consumers(weight, self.dp)
        return self.layout_at(slot[consumer], replica[consumer], sharing=sharing)

    def layout_at(self, slot: Int32, replica: Int32, *, sharing: str) -> Layout:
        """The layout of consumers whose places are decided.

        Args:
            slot, replica: int32 [M], where each row is evaluated.
            sharing: as for :func:`layout_consumers`.
        """
        row_slot = np.full(self.tree.num_rows, -1, np.int32)
        row_replica = np.full(self.tree.num_rows, -1, np.int32)
        row_slot[self.rows] = slot
        row_replica[self.rows] = replica
        return layout_consumers(self.tree, dp=self.dp, replica=row_replica, slot=row_slot, sharing=sharing)

    def no_plan(self, num_consumers: int) -> InfeasiblePlanError:
        """The error where the rows need more consumers than can all be non-empty."""
        return InfeasiblePlanError(
            f"{len(self.rows)} trajectories need {num_consumers} consumers of {self.capacity} tokens, which "
            f"cannot be a multiple of {self.dp} replicas with no consumer empty",
            hint="raise --capacity or lower --dp",
        )


class Planner(Protocol):
    """A planner: a pure function of its problem."""

    def __call__(self, problem: PlanProblem, progress: Progress) -> Layout:
        """Decide the layout.

        Raises:
            InfeasiblePlanError: the limits allow no plan, or none was found.
        """


def place_consumers(weight: Int64, dp: int) -> tuple[Int32, Int32]:
    """(slot, replica) of consumers: by decreasing weight, D consecutive ones form a slot; in it the heavier
    go to the replica with the least so far (ties: lower indices first).

    Args:
        weight: int64 [K], K a multiple of ``dp``.
        dp: D.
    """
    order = np.argsort(-weight, kind="stable").reshape(-1, dp)
    slot = np.empty(len(weight), np.int32)
    replica = np.empty(len(weight), np.int32)
    total = np.zeros(dp, np.int64)
    for j, consumers in enumerate(order):
        lightest = np.argsort(total, kind="stable")
        slot[consumers] = j
        replica[consumers] = lightest
        total[lightest] += weight[consumers]
    return slot, replica


def partition_score(weight: Int64, dp: int) -> tuple[int, int, int]:
    """J of a placed partition: (Σ w, Σ over slots of max_d w, max_d of a replica's total). Less is better."""
    slot, replica = place_consumers(weight, dp)
    table = np.zeros((len(weight) // dp, dp), np.int64)
    table[slot, replica] = weight
    return int(weight.sum()), int(table.max(axis=1).sum()), int(table.sum(axis=0).max())
