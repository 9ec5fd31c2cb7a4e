"""Runs of a flattened tensor as boxes, against numpy's own flattening."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts_core.exec.weights.regions import Region, are_disjoint, flat_regions, whole_region


@given(st.data())
def test_boxes_of_a_run_are_its_elements_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(shape)
    boxes = list(flat_regions(shape, start, stop))
    found = [int(x) for box in boxes for x in whole[box.slices()].ravel()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(whole[box.slices()].shape == box.shape and box.numel > 0 for box in boxes)


def test_a_run_in_a_matrix() -> None:
    assert list(flat_regions((4, 5), 3, 17)) == [
        Region((0, 3), (1, 2)),
        Region((1, 0), (2, 5)),
        Region((3, 0), (1, 2)),
    ]
    assert list(flat_regions((4, 5), 5, 15)) == [Region((1, 0), (2, 5))]
    assert list(flat_regions((4, 5), 6, 9)) == [Region((1, 1), (1, 3))]
    assert list(flat_regions((4, 5), 7, 7)) == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Region((0, 0), (2, 3)), Region((1, 1), (4, 4)), Region((1, 1), (1, 2))),
        (Region((0, 0), (2, 3)), Region((2, 0), (1, 3)), None),
        (Region((), ()), Region((), ()), Region((), ())),
    ],
)
def test_overlap(a: Region, b: Region, expected: Region | None) -> None:
    assert a.overlap(b) == b.overlap(a) == expected


@given(st.data())
def test_disjoint(data: st.DataObject) -> None:
    """Against counting the boxes on every element."""
    dims = data.draw(st.integers(1, 3))
    numbers = st.tuples(*[st.integers(0, 3)] * dims)
    boxes = [Region(start, shape) for start, shape in data.draw(st.lists(st.tuples(numbers, numbers)))]
    covered = np.zeros((7,) * dims, np.int64)
    for box in boxes:
        covered[box.slices()] += 1
    assert are_disjoint(boxes) == (covered.max() <= 1)


def test_moved_and_whole() -> None:
    part = Region((1, 2), (2, 2)).moved((4, 0))
    assert part == Region((5, 2), (2, 2))
    assert part.slices((5, 0)) == (slice(0, 2), slice(2, 4))
    assert whole_region((3, 2)).stop == (3, 2)
