"""Variable-length rows of numbers as two flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[Any]


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, contiguous and locked against writing (shared by frozen data classes)."""
    array = np.ascontiguousarray(array)
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ragged:
    """N variable-length rows: row i is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
        offsets: int64 [N + 1], starts at 0, non-decreasing, ends at ``len(values)``.
        values: [offsets[-1]], any dtype.
        valid: bool [N], False where the row is null (its length is then 0); ``None``: no nulls.
    """

    offsets: npt.NDArray[np.int64]
    values: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", read_only(np.asarray(self.offsets, np.int64)))
        object.__setattr__(self, "values", read_only(np.asarray(self.values)))
        if self.valid is not None:
            object.__setattr__(self, "valid", read_only(np.asarray(self.valid, np.bool_)))
        o = self.offsets
        if o.ndim != 1 or len(o) == 0 or o[0] != 0 or o[-1] != len(self.values) or np.any(o[1:] < o[:-1]):
            raise ValueError("offsets must rise from 0 to len(values)")
        if self.valid is not None and len(self.valid) != len(self):
            raise ValueError("valid must have one entry per row")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        """Row ``row`` as a view."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [N], the number of values of each row."""
        return np.diff(self.offsets)

    def is_null(self, row: int) -> bool:
        """Whether the row is null (as opposed to empty)."""
        return self.valid is not None and not bool(self.valid[row])

    def take(self, rows: npt.NDArray[np.int64]) -> Ragged:
        """The named rows, in the named order."""
        lengths = self.lengths[rows]
        offsets = offsets_from_lengths(lengths)
        index = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        valid = None if self.valid is None else self.valid[rows]
        return Ragged(offsets=offsets, values=self.values[index], valid=valid)

    @classmethod
    def from_rows(
        cls, rows: Iterable[Sequence[Any] | npt.NDArray[Any] | None], dtype: npt.DTypeLike
    ) -> Ragged:
        """Pack rows; ``None`` becomes a null row."""
        arrays = [None if r is None else np.asarray(r, dtype) for r in rows]
        lengths = np.array([0 if a is None else len(a) for a in arrays], np.int64)
        present = [a for a in arrays if a is not None and len(a)]
        values = np.concatenate(present) if present else np.empty(0, dtype)
        valid = None if all(a is not None for a in arrays) else np.array([a is not None for a in arrays])
        return cls(offsets=offsets_from_lengths(lengths), values=values, valid=valid)


def offsets_from_lengths(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """int64 [N + 1] offsets of consecutive rows of the given lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
