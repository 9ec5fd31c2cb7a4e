"""Boxes within tensors: which part of a tensor is read or written. Plain numbers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor: from ``start`` on, ``shape`` elements along each dimension."""

    start: Ints
    shape: Ints

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> Ints:
        """The end along each dimension, exclusive."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def slices(self, origin: Ints | None = None) -> tuple[slice, ...]:
        """To index a tensor whose first element is at ``origin`` (default: the whole tensor)."""
        first = origin or (0,) * len(self.start)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, first, strict=True))

    def moved(self, offset: Ints) -> Region:
        """The same box, where its coordinates count from ``-offset``."""
        return Region(tuple(a + o for a, o in zip(self.start, offset, strict=True)), self.shape)

    def overlap(self, other: Region) -> Region | None:
        """What both have; None where that is nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Region(start, shape) if all(n > 0 for n in shape) else None


def whole_region(shape: Ints) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), shape)


def are_disjoint(regions: Iterable[Region]) -> bool:
    """Whether no two boxes of a tensor have an element in common."""
    open_: list[Region] = []  # that reach beyond the first index of the box at hand
    for region in sorted(regions, key=lambda region: region.start):
        open_ = [other for other in open_ if other.stop[:1] > region.start[:1]]
        if any(region.overlap(other) for other in open_):
            return False
        open_.append(region)
    return True


def flat_regions(shape: Ints, start: int, stop: int) -> Iterator[Region]:
    """A run of a flattened tensor as boxes, in order: each box's elements are consecutive in the run.

    A run within a matrix is at most three boxes: the rest of a row, whole rows, the begin of a row.

    Args:
        shape: of the tensor.
        start, stop: element numbers in row-major order, 0 ≤ start ≤ stop ≤ number of elements.
    """
    if start == stop:
        return
    if not shape:
        yield Region((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _within(shape, last, start - last * row, stop - last * row)
        return
    if first * row > start:
        yield from _within(shape, first - 1, start - (first - 1) * row, row)
    if last > first:
        yield Region((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if stop > last * row:
        yield from _within(shape, last, 0, stop - last * row)


def _within(shape: Ints, index: int, start: int, stop: int) -> Iterator[Region]:
    """The same within one index of the first dimension."""
    for region in flat_regions(shape[1:], start, stop):
        yield Region((index, *region.start), (1, *region.shape))
