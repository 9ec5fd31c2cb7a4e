"""First fit in O(log K): the free room of bins in a maximum tree."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt


def empty_rooms(num_bins: int) -> npt.NDArray[np.int64]:
    """The tree for up to ``num_bins`` bins, none open yet. The root is at 1, the bins fill the last half."""
    return np.zeros(2 << max(1, (num_bins - 1).bit_length()), np.int64)


@numba.njit(cache=True)
def set_room(rooms: Any, b: int, tokens: int) -> None:
    """Set the free room of bin b."""
    i = len(rooms) // 2 + b
    rooms[i] = tokens
    i //= 2
    while i:
        rooms[i] = max(rooms[2 * i], rooms[2 * i + 1])
        i //= 2


@numba.njit(cache=True)
def first_with_room(rooms: Any, tokens: int) -> int:
    """The first bin with room for ``tokens`` ≥ 1, or −1."""
    if rooms[1] < tokens:
        return -1
    i = 1
    while i < len(rooms) // 2:
        i = 2 * i if rooms[2 * i] >= tokens else 2 * i + 1
    return i - len(rooms) // 2
