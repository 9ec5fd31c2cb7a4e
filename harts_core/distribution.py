"""Summaries of many numbers for reports: a few quantiles and a histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_BINS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """How a set of numbers is spread.

    Attributes:
        count: how many; with 0 all other numbers are 0 and there is no bin.
        minimum, median, mean, p90, maximum: of the numbers.
        edges: bounds of the histogram's half-open bins, one more than ``counts``.
        counts: numbers in each bin.
    """

    count: int
    minimum: float
    median: float
    mean: float
    p90: float
    maximum: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]


def describe(values: npt.NDArray[Any]) -> Distribution:
    """Summarise numbers (any shape, finite); bins have a round width and begin at a multiple of it."""
    values = np.asarray(values, np.float64).reshape(-1)
    if not len(values):
        return Distribution(
            count=0, minimum=0.0, median=0.0, mean=0.0, p90=0.0, maximum=0.0, edges=(), counts=()
        )
    low, high = float(values.min()), float(values.max())
    edges = _round_edges(low, high, whole=bool(np.all(values == np.floor(values))))
    counts, _ = np.histogram(values, edges)
    return Distribution(
        count=len(values),
        minimum=low,
        median=float(np.median(values)),
        mean=float(values.mean()),
        p90=float(np.percentile(values, 90)),
        maximum=high,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )


def _round_edges(low: float, high: float, whole: bool) -> npt.NDArray[np.float64]:
    """Edges of at most NUM_BINS + 1 half-open bins that cover [low, high].

    Their width is 1, 2, 2.5 or 5 times a power of ten, and a whole number for whole numbers.
    """
    least = 1.0 if whole else 0.0
    raw = max((high - low) / NUM_BINS, least) or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    factors = (1, 2, 5, 10) if whole and power == 1 else (1, 2, 2.5, 5, 10)
    width = next(m * power for m in factors if m * power >= raw * (1 - 1e-12))
    first, last = math.floor(low / width), math.floor(high / width) + 1
    return np.arange(first, last + 1, dtype=np.float64) * width
