"""What the cache holds and when each part of it is needed: known exactly before the first unit runs.

A block's values come into being in its owner's forward and are read by its readers' forwards, first and
second (``recompute`` events), and again by their backwards where these run every layer again. Its gradient
comes into being in the first reader's backward, every reader's backward adds to it, and the owner's backward
starts from it. Sums need the state dtype, what is not yet a sum or no more added to does not: the gradient is
as narrow as the values outside the backwards of the second to the last reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cache_policy.blocks import Block, CacheBlocks
from harts_core.plan.cache_policy.rows import POINT_TABLES, Int64, RowBytes, Table, point_rows, row_code
from harts_core.plan.schedule.units import Event
from harts_core.trees.rollout_tree import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheObject:
    """One part of the cache that lives and moves as a whole.

    Attributes:
        block: index of its block.
        gradient: the block's gradient; otherwise its values.
        uses: passes that need it, increasing; the first makes it.
        sizes: bytes in each of these passes. Between two of them it has the smaller of their sizes.
    """

    block: int
    gradient: bool
    uses: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The most that it needs."""
        return max(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheTrace:
    """The cache's exact future.

    Attributes:
        passes: the forwards, second forwards and backwards, in order.
        objects: all parts, the values of each block before its gradient.
    """

    passes: tuple[Event, ...]
    objects: tuple[CacheObject, ...]

    @property
    def total_bytes(self) -> int:
        """What is kept at the end if nothing is ever freed."""
        return sum(o.num_bytes for o in self.objects)


def cache_trace(
    blocks: CacheBlocks, sizes: Sequence[tuple[int, int]], events: Sequence[Event], *, reread: bool = False
) -> CacheTrace:
    """Join the blocks with an order of events.

    Args:
        blocks: of the plan.
        sizes: bytes of the values and of the gradient in the state dtype of each block (``block_sizes``).
        events: of one process, in order, with every unit that imports from another one among them. Without
            backwards (a forward-only pass) there are no gradients.
        reread: whether backwards read the values again, because they run every layer again.
    """
    passes = tuple(e for e in events if e.kind in ("forward", "recompute", "backward"))
    at: dict[tuple[str, int], int] = {(e.kind, e.unit): i for i, e in enumerate(passes)}
    objects = []
    for i, (block, (value_bytes, gradient_bytes)) in enumerate(zip(blocks.blocks, sizes, strict=True)):
        if ("forward", block.owner) not in at:
            continue
        forwards = [at["forward", unit] for unit in (block.owner, *block.readers)]
        backwards = [at[k] for unit in block.readers if (k := ("backward", unit)) in at]
        again = [at[k] for unit in block.readers if (k := ("recompute", unit)) in at]
        reads = sorted(forwards + again + (backwards if reread else []))
        sizes_read = (value_bytes,) * len(reads)
        objects.append(CacheObject(block=i, gradient=False, uses=tuple(reads), sizes=sizes_read))
        if backwards:
            uses = (*sorted(backwards), at["backward", block.owner])
            narrow = min(value_bytes, gradient_bytes)
            added = (narrow, *(gradient_bytes,) * (len(backwards) - 1), narrow)
            objects.append(CacheObject(block=i, gradient=True, uses=uses, sizes=added))
    return CacheTrace(passes=passes, objects=tuple(objects))


def block_sizes(
    bundle: PlanBundle, blocks: CacheBlocks, row_bytes: RowBytes, tree: RolloutTree | None
) -> list[tuple[int, int]]:
    """Bytes of the values and of the gradient (in the state dtype) of every block.

    Keys and values have room for all allocated tokens; of the other tables a block has the rows of its own
    tokens that some unit reads.

    Args:
        bundle: a valid plan.
        blocks: its blocks.
        row_bytes: bytes of one row in each table.
        tree: see ``point_rows``.
    """
    points = point_rows(bundle, tree)
    sizes = []
    for block in blocks.blocks:
        rows: dict[Table, int] = {"keys": block.allocated_tokens if block.keys else 0}
        for table in POINT_TABLES:
            rows[table] = _count(points[table], block)
        sizes.append(
            (
                sum(n * row_bytes.value(table) for table, n in rows.items()),
                sum(n * row_bytes.gradient(table) for table, n in rows.items()),
            )
        )
    return sizes


def _count(codes: Int64, block: Block) -> int:
    """How many of the coded tokens are the block's own."""
    total = 0
    for line, start, stop in block.runs:
        low, high = np.searchsorted(codes, row_code(line, np.array([start, stop])))
        total += int(high - low)
    return total
