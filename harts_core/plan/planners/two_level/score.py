"""Φ: how plans are compared (DESIGN §3), and a bound on it for every plan without producers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harts_core.plan.bounds import least_tokens_within_capacity
from harts_core.plan.build import unit_table
from harts_core.plan.bundle import CONSUMER, PRODUCER, UnitTable
from harts_core.plan.cost_model import CostModel
from harts_core.plan.layout import Layout


class Score(NamedTuple):
    """Less is better, lexicographically.

    Attributes:
        cost: Φ = Σ over slots and windows of (max_d cost_forward + max_d cost_backward).
        padded_tokens: of all units.
        imbalance: the heaviest replica's padded tokens over the mean, less 1.
        largest_replica: its padded tokens.
    """

    cost: float
    padded_tokens: int
    imbalance: float
    largest_replica: int


def score_layout(layout: Layout, *, dp: int, pad: int, cost_model: CostModel) -> Score:
    """The score of a layout on D replicas with padding multiple A."""
    units = unit_table(layout, pad, cost_model)
    cost = 0.0
    for kind, place in ((CONSUMER, units.slot), (PRODUCER, units.window)):
        for column in (units.cost_forward, units.cost_backward):
            cost += _sum_of_maxima(units, kind, place, column, dp)
    totals = np.bincount(units.replica, units.padded_tokens.astype(np.float64), dp)  # exact below 2^53
    return Score(
        cost=cost,
        padded_tokens=int(totals.sum()),
        imbalance=float(totals.max() * dp / totals.sum() - 1),
        largest_replica=int(totals.max()),
    )


def _sum_of_maxima(
    units: UnitTable, kind: int, place: npt.NDArray[np.int32], column: npt.NDArray[np.float64], dp: int
) -> float:
    mine = np.flatnonzero(units.kind == kind)
    table = np.zeros((int(place[mine].max(initial=-1)) + 1, dp))
    table[place[mine], units.replica[mine]] = column[mine]
    return float(table.max(axis=1, initial=0.0).sum())


def least_cost_without_producers(
    length: npt.NDArray[np.int64], lcp: npt.NDArray[np.int32], *, dp: int, capacity: int, cost_model: CostModel
) -> float:
    """A lower bound on Φ of every plan without producers: no slot costs less than its replicas' mean, the
    consumers hold at least the least tokens within the capacity, and every token of the trie meets all keys
    of its path at least once.

    Args:
        length, lcp: int [N], rows in lexicographic order.
        dp: D.
        capacity: T ≥ every length.
        cost_model: coefficients.
    """
    tokens = least_tokens_within_capacity(length, lcp, capacity=capacity, dp=dp)
    shared = lcp.astype(np.int64)
    pairs = int((length * (length + 1) // 2 - shared * (shared + 1) // 2).sum())
    alpha = cost_model.alpha_forward + cost_model.alpha_backward
    beta = cost_model.beta_forward + cost_model.beta_backward
    return (alpha * tokens + beta * pairs) / dp
