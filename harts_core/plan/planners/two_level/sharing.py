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
    dp, windows, num_slots = placement.dp, placement.num_windows, len(placement.window_of_slot)
    window = placement.window_of_slot[placement.slot]
    cells = group_items(lcp, placement.replica * windows + window, dp * windows)
    replicas = group_items(lcp, placement.replica, dp)
    consumers = group_items(lcp, placement.replica * num_slots + placement.slot, dp * num_slots)
    nested = limits.live if windows == 1 else max(1, limits.live - 1)  # inner producers of a window
    inner_room = nested * limits.blocks
    outer_room = limits.blocks if windows > 1 and limits.live > 1 else 0
    none = np.zeros(len(length), np.int64)
    across = shared_depth(replicas, window)
    outer = extend_depth(replicas, none, across, np.full(dp, outer_room * limits.pad))
    outer = _keep_gains(replicas, consumers, length, none, outer, limits.pad)
    shared = np.maximum(outer, shared_depth(cells, placement.slot))
    inner = extend_depth(cells, outer, shared, np.full(cells.count, inner_room * limits.pad))
    inner = _keep_gains(cells, consumers, length, outer, inner, limits.pad)
    if not inner.any():
        return Sharing(placement=placement, windows=(), depth=())
    # Below a shared prefix that is not held, nothing can move for one consumer, or one window, alone.
    limit = np.where(inner == shared, length, inner)
    open_outer = np.ones(dp, np.bool_)
    open_outer[placement.replica[outer < across]] = False
    placement, inner, moved = _hoist(
        length, limit, placement, cells, consumers,
        inner=inner, inner_held=count_tokens(cells, inner, outer), inner_room=inner_room,
        outer_held=np.where(open_outer, -(-count_tokens(replicas, outer) // limits.pad), outer_room),
        outer_room=outer_room, pad=limits.pad,
    )  # fmt: skip
    outer = extend_depth(cells, outer, inner, moved)
    return _cut_levels(placement, cells, outer, inner, limits)


def _keep_gains(
    groups: Groups, consumers: Groups, length: Int64, outside: Int64, depth: Int64, pad: int
) -> Int64:
    """``depth`` in the groups whose producer computes fewer blocks than its consumers save; elsewhere
    ``outside``, what outer producers hold."""

    def blocks(held: Int64) -> Int64:
        return np.asarray(-(-count_tokens(consumers, length, held) // pad))

    group_of_consumer = np.zeros(consumers.count, np.int64)
    group_of_consumer[consumers.group] = groups.group
    gain = -count_tokens(groups, depth, outside) // pad  # rounded away from 0
    np.add.at(gain, group_of_consumer, blocks(outside) - blocks(depth))
    return np.where(gain[groups.group] > 0, depth, outside)


def _hoist(
    length: Int64, limit: Int64, placement: Placement, cells: Groups, consumers: Groups, *, inner: Int64,
    inner_held: Int64, inner_room: int, outer_held: Int64, outer_room: int, pad: int,
) -> tuple[Placement, Int64, Int64]:  # fmt: skip
    """Order the slots of each window by residual, lower them to even levels, and split what is held.

    Args:
        length, limit: int64 [L]; tokens beyond the limit cannot be hoisted.
        placement, cells, consumers: where the items are.
        inner: int64 [L], depth held before.
        inner_held: int64 [cells], tokens held by inner producers.
        outer_held: int64 [D], blocks held by outer producers.
        inner_room, outer_room: blocks; ``pad``: tokens of a block.

    Returns:
        The placement in the new order of slots, the inner depth, and the tokens of each cell that its outer
        producer takes.
    """
    dp, num_slots = placement.dp, len(placement.window_of_slot)
    residual = count_tokens(consumers, length, inner).reshape(dp, num_slots)
    hoistable = count_tokens(consumers, limit, inner).reshape(dp, num_slots)
    rank = np.lexsort((-residual, np.broadcast_to(placement.window_of_slot, residual.shape)))  # [D, J]
    blocks = -(-residual // pad)
    fixed = np.where(hoistable == residual, 0, blocks - hoistable // pad)
    blocks, fixed = np.take_along_axis(blocks, rank, axis=1), np.take_along_axis(fixed, rank, axis=1)
    windows = placement.num_windows
    begins = np.searchsorted(placement.window_of_slot, np.arange(windows))
    within = np.arange(num_slots) - begins[placement.window_of_slot]
    table = np.zeros((2, dp, windows, int(within.max()) + 1), np.int64)
    table[0][:, placement.window_of_slot, within] = blocks
    table[1][:, placement.window_of_slot, within] = fixed
    held = -(-inner_held.reshape(dp, windows) // pad)
    level = lower_levels(table[0], table[1], held, outer_held, inner_room, outer_room)
    hoisted = np.maximum(0, blocks - level[placement.window_of_slot, within])
    held += np.add.reduceat(hoisted, begins, axis=1)
    moved = split_producers(held, outer_held, inner_room, outer_room) if outer_room else np.zeros_like(held)
    position = np.argsort(rank, axis=1)  # the new slot of each old one
    of_consumer = np.take_along_axis(hoisted, position, axis=1)
    inner = extend_depth(consumers, inner, limit, (of_consumer * pad).ravel())
    placement = replace(placement, slot=position[placement.replica, placement.slot])
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
