"""Φ: how plans are compared (DESIGN §3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
