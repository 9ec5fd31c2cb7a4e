"""What the producers of a placement hold: shared prefixes, and private ones that even the slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harts_core.plan.planners.two_level.depths import (
    Groups,
    count_tokens,
    extend_depth,
    group_items,
    shared_depth,
)
from harts_core.plan.planners.two_level.placement import Placement
from harts_core.plan.planners.two_level.water_levels import lower_levels, split_producers

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """Limits of producers.

    Attributes:
        capacity: tokens that one producer may compute.
        live: producers that may be alive at once on a replica.
        pad: A, computed tokens are rounded up to a multiple of it.
    """

    capacity: int
    live: int
    pad: int

    @property
    def blocks(self) -> int:
        """Blocks of ``pad`` tokens that one producer may compute."""
        return self.capacity // self.pad


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """Nested producers of a placement, outermost first.

    Attributes:
        placement: the placement; within a window, slots are ordered by decreasing residual on all replicas.
        windows: per level, int64 [J], the window of each slot.
        depth: per level, int64 [L], tokens of each item held down to the level.
    """

    placement: Placement
    windows: tuple[Int64, ...]
    depth: tuple[Int64, ...]


def share_prefixes(length: Int64, lcp: Int32, placement: Placement, limits: ProducerLimits) -> Sharing:
    """Producers for a placement.

    With several windows, an outer producer for the whole step holds the tokens that several windows of the
    replica use; a window's inner ones hold those that several of its consumers use. Then private prefixes
    move from heavy consumers to the producers, and from inner producers to the outer one, where that lowers
    what a step pays (:mod:`harts_core.plan.planners.two_level.water_levels`). All moves are in blocks of
    ``pad`` tokens, so that padded counts never rise.

    Args:
        length, lcp: int [L], items in lexicographic order.
        placement: where they go.
        limits: of the producers.
    """
    dp, windows = placement.dp, int(placement.window_of_slot[-1]) + 1
    window = placement.window_of_slot[placement.slot]
    cells = group_items(lcp, placement.replica * windows + window, dp * windows)
    replicas = group_items(lcp, placement.replica, dp)
    nested = limits.live if windows == 1 else max(1, limits.live - 1)  # inner producers of a window
    inner_room = nested * limits.blocks
    outer_room = limits.blocks if windows > 1 and limits.live > 1 else 0
    none = np.zeros(len(length), np.int64)
    outer = extend_depth(replicas, none, shared_depth(replicas, window), np.full(dp, outer_room * limits.pad))
    shared = np.maximum(outer, shared_depth(cells, placement.slot))
    inner = extend_depth(cells, outer, shared, np.full(cells.count, inner_room * limits.pad))
    if not inner.any():
        return Sharing(placement=placement, windows=(), depth=())
    # Below a shared prefix for which there was no room, nothing can be hoisted for one consumer alone.
    limit = np.where(inner == shared, length, inner)
    placement, inner, moved = _hoist(
        length, limit, lcp, placement, cells, replicas, outer, inner, inner_room, outer_room, limits.pad
    )
    outer = extend_depth(cells, outer, inner, moved)
    return _cut_levels(placement, cells, outer, inner, limits)


def _hoist(
    length: Int64, limit: Int64, lcp: Int32, placement: Placement, cells: Groups, replicas: Groups, outer: Int64,
    inner: Int64, inner_room: int, outer_room: int, pad: int,
) -> tuple[Placement, Int64, Int64]:  # fmt: skip
    """(the placement with slots by rank, the inner depth, the tokens of each cell that the outer producer
    takes). Only tokens within ``limit`` can be hoisted."""
    dp, num_slots = placement.dp, len(placement.window_of_slot)
    windows = cells.count // dp
    consumers = group_items(lcp, placement.replica * num_slots + placement.slot, dp * num_slots)
    residual = count_tokens(consumers, length, inner).reshape(dp, num_slots)
    rank = np.lexsort((-residual, np.broadcast_to(placement.window_of_slot, residual.shape)))  # [D, J]
    position = np.argsort(rank, axis=1)  # the new slot of each old one
    placement = replace(placement, slot=position[placement.replica, placement.slot])
    residual = np.take_along_axis(residual, rank, axis=1)
    hoistable = count_tokens(consumers, limit, inner).reshape(dp, num_slots)
    hoistable = np.take_along_axis(hoistable, rank, axis=1)
    blocks = -(-residual // pad)
    fixed = np.where(hoistable == residual, 0, blocks - hoistable // pad)
    begins = np.searchsorted(placement.window_of_slot, np.arange(windows))
    within = np.arange(num_slots) - begins[placement.window_of_slot]
    table = np.zeros((2, dp, windows, int(within.max()) + 1), np.int64)
    table[0][:, placement.window_of_slot, within] = blocks
    table[1][:, placement.window_of_slot, within] = fixed
    held = -(-count_tokens(cells, inner, outer).reshape(dp, windows) // pad)
    base = -(-count_tokens(replicas, outer) // pad)
    level = lower_levels(table[0], table[1], held, base, inner_room, outer_room)
    hoisted = np.maximum(0, blocks - level[placement.window_of_slot, within])
    held += np.add.reduceat(hoisted, begins, axis=1)
    moved = np.zeros_like(held)
    if outer_room:
        moved = split_producers(held, base, inner_room, outer_room)
    consumers = group_items(lcp, placement.replica * num_slots + placement.slot, dp * num_slots)
    inner = extend_depth(consumers, inner, limit, (hoisted * pad).ravel())
    return placement, inner, (moved * pad).ravel()


def _cut_levels(
    placement: Placement, cells: Groups, outer: Int64, inner: Int64, limits: ProducerLimits
) -> Sharing:
    """The outer level, and as many nested inner ones of about equal size as the capacity asks for."""
    windows: list[Int64] = []
    depth: list[Int64] = []
    if outer.any():
        windows.append(np.zeros(len(placement.window_of_slot), np.int64))
        depth.append(outer)
    blocks = -(-count_tokens(cells, inner, outer) // limits.pad)
    largest = int(blocks.max())
    parts = -(-largest // limits.blocks)
    for i in range(1, parts + 1):
        budget = np.full(cells.count, -(-largest * i // parts) * limits.pad)
        windows.append(placement.window_of_slot)
        depth.append(extend_depth(cells, outer, inner, budget))
    return Sharing(placement=placement, windows=tuple(windows), depth=tuple(depth))
