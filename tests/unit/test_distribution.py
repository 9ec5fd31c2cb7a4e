from __future__ import annotations

import itertools

import numpy as np
import pytest

from harts_core.distribution import NUM_BINS, describe


@pytest.mark.parametrize(
    "values",
    [[1], [0, 0, 0], [3, 99, 50], [0.25, 0.75], [-5, 5], [1e9, 2e9], [0.1, 0.2, 0.3], [0.3, 0.3], [7, 31]],
)
def test_few_round_bins_cover_all_values(values: list[float]) -> None:
    result = describe(np.array(values))
    assert result.count == sum(result.counts) == len(values)
    assert result.edges[0] <= min(values)
    assert result.edges[-1] > max(values)
    assert 1 <= len(result.counts) <= NUM_BINS + 1
    expected = [sum(a <= v < b for v in values) for a, b in itertools.pairwise(result.edges)]
    assert list(result.counts) == expected
    assert (result.minimum, result.maximum) == (min(values), max(values))
    assert result.mean == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("high", [1, 5, 11, 12, 20, 26, 100, 12345])
def test_whole_numbers_have_whole_bins(high: int) -> None:
    edges = describe(np.arange(high + 1)).edges
    assert all(e == int(e) for e in edges)


def test_small_whole_numbers_have_a_bin_each() -> None:
    result = describe(np.array([10, 11, 10]))
    assert result.edges == (10.0, 11.0, 12.0)
    assert result.counts == (2, 1)


def test_nothing() -> None:
    result = describe(np.empty(0))
    assert (result.count, result.edges, result.counts, result.mean) == (0, (), (), 0.0)
