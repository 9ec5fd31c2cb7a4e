"""Cache blocks: how the tokens that a unit keeps for later units are grouped.

An adaptive block is a reusable span: a run of tokens of one unit that the same later units read. Blocks of a
fixed size B are cut at the multiples of B along the path from the root, and only whole blocks are shared:

- a block is allocated whole; positions that no token fills are wasted;
- where paths part inside a block, each path has a block of its own, and the tokens before are *copied* into
  it, also those that another unit computed;
- who does not copy computes again: an import that ends at p has p mod B tokens in a block that goes on
  differently, or not at all, and so cannot be shared. They count as *recomputed*, the alternative to copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.plan.cache_policy.rows import ImportLines, import_lines

Int64 = npt.NDArray[np.int64]
Readers = tuple[tuple[int, bool], ...]
"""(unit, whether it attends), by unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block; with a fixed size, a run of blocks that the same units read.

    Attributes:
        owner: the unit that computes its tokens.
        runs: (line in the spans table, start, stop) of the owner's tokens in it, along the path; not empty.
        readers: units that read it, increasing.
        keys: whether some reader attends to it.
        num_blocks: blocks of the run.
        allocated_tokens: tokens that there is room for.
        copied_tokens: of other units, copied in before ``runs``.
    """

    owner: int
    runs: tuple[tuple[int, int, int], ...]
    readers: tuple[int, ...]
    keys: bool
    num_blocks: int = 1
    allocated_tokens: int
    copied_tokens: int = 0

    @property
    def own_tokens(self) -> int:
        """Tokens of the owner in it."""
        return sum(stop - start for _, start, stop in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheBlocks:
    """All blocks of a plan.

    Attributes:
        block_tokens: their fixed size; None: adaptive.
        blocks: by owner.
        imported_tokens: tokens read of other units, counted for every reader.
        cached_tokens: different tokens that are read.
        recomputed_tokens: of ``imported_tokens``, those outside whole shared blocks.
    """

    block_tokens: int | None
    blocks: tuple[Block, ...]
    imported_tokens: int
    cached_tokens: int
    recomputed_tokens: int

    @property
    def copied_tokens(self) -> int:
        """Tokens stored once more than needed."""
        return sum(b.own_tokens + b.copied_tokens for b in self.blocks) - self.cached_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks, those of runs counted singly."""
        return sum(b.num_blocks for b in self.blocks)

    @property
    def allocated_tokens(self) -> int:
        """Tokens that there is room for."""
        return sum(b.allocated_tokens for b in self.blocks)

    @property
    def fragmentation(self) -> float:
        """Share of the allocated tokens that do not hold a token, or hold one once more than needed."""
        allocated = self.allocated_tokens
        return 1 - self.cached_tokens / allocated if allocated else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of tokens of one line of the spans table that all have the same readers."""

    line: int
    start: int
    stop: int
    readers: Readers


def cache_blocks(bundle: PlanBundle, block_tokens: int | None = None) -> CacheBlocks:
    """The blocks of a plan.

    Args:
        bundle: a valid plan.
        block_tokens: the fixed size; None: adaptive.
    """
    imports = import_lines(bundle)
    pieces = _pieces(imports)
    if block_tokens is None:
        blocks = [_block(bundle, ((p.line, p.start, p.stop),), p.readers) for p in pieces]
        recomputed = 0
    else:
        blocks = list(_fixed_blocks(bundle, pieces, block_tokens))
        recomputed = _partial_tokens(bundle, block_tokens)
    return CacheBlocks(
        block_tokens=block_tokens,
        blocks=tuple(blocks),
        imported_tokens=int((imports.stop - imports.start).sum()),
        cached_tokens=sum(p.stop - p.start for p in pieces),
        recomputed_tokens=recomputed,
    )


def _block(
    bundle: PlanBundle,
    runs: tuple[tuple[int, int, int], ...],
    readers: Readers,
    *,
    num_blocks: int = 1,
    block_tokens: int | None = None,
    copied: int = 0,
    keys: bool | None = None,
) -> Block:
    own = sum(stop - start for _, start, stop in runs)
    return Block(
        owner=int(bundle.spans.unit[runs[0][0]]),
        runs=runs,
        readers=tuple(unit for unit, _ in readers),
        keys=any(attends for _, attends in readers) if keys is None else keys,
        num_blocks=num_blocks,
        allocated_tokens=own if block_tokens is None else num_blocks * block_tokens,
        copied_tokens=copied,
    )


def _pieces(imports: ImportLines) -> list[_Piece]:
    """The runs with equal readers, by line and position; neighbours with the same readers are one."""
    by_line: dict[int, list[int]] = {}
    for i, line in enumerate(imports.line.tolist()):
        by_line.setdefault(line, []).append(i)
    pieces: list[_Piece] = []
    for line in sorted(by_line):
        index = np.array(by_line[line])
        start, stop = imports.start[index], imports.stop[index]
        cuts = np.unique(np.concatenate([start, stop]))
        found: list[dict[int, bool]] = [{} for _ in range(len(cuts) - 1)]
        low, high = np.searchsorted(cuts, start), np.searchsorted(cuts, stop)
        for i, a, b in zip(index.tolist(), low.tolist(), high.tolist(), strict=True):
            unit, attends = int(imports.unit[i]), bool(imports.keys[i])
            for readers in found[a:b]:
                readers[unit] = attends or readers.get(unit, False)
        for i, readers in enumerate(found):
            if not readers:
                continue
            a, b, key = int(cuts[i]), int(cuts[i + 1]), tuple(sorted(readers.items()))
            last = pieces[-1] if pieces else None
            if last is not None and (last.line, last.stop, last.readers) == (line, a, key):
                pieces[-1] = _Piece(line=line, start=last.start, stop=b, readers=key)
            else:
                pieces.append(_Piece(line=line, start=a, stop=b, readers=key))
    return pieces


@dataclass(slots=True, kw_only=True)
class _Fragment:
    """The tokens of a piece in a block that it does not fill alone."""

    piece: _Piece
    start: int
    stop: int
    parent: _Fragment | None
    children: list[_Fragment] = field(default_factory=list)
    ends_here: set[int] = field(default_factory=set)

    def home(self) -> _Fragment:
        """The leaf whose block holds these tokens for readers that go no further."""
        at = self
        while at.children:
            at = at.children[0]
        return at


def _fixed_blocks(bundle: PlanBundle, pieces: list[_Piece], size: int) -> Iterator[Block]:
    """Whole blocks inside pieces at once, then those in which pieces end or meet."""
    fragments: list[_Fragment] = []
    tails: dict[tuple[int, int], _Fragment | None] = {}  # the fragment that ends there, of each piece
    for piece in pieces:  # a span's parent comes before it in the table
        at, previous = piece.start, None
        first_whole, last_whole = -(-piece.start // size) * size, piece.stop // size * size
        if first_whole > at:
            stop = min(first_whole, piece.stop)
            previous = _add_fragment(fragments, piece, at, stop, _fragment_before(bundle, piece, tails))
            at = stop
        if at < last_whole:
            yield _block(
                bundle,
                ((piece.line, at, last_whole),),
                piece.readers,
                num_blocks=(last_whole - at) // size,
                block_tokens=size,
            )
            at, previous = last_whole, None
        if at < piece.stop:
            previous = _add_fragment(fragments, piece, at, piece.stop, None)
        tails[piece.line, piece.stop] = previous
    yield from _fragment_blocks(bundle, fragments, size)


def _fragment_before(
    bundle: PlanBundle, piece: _Piece, tails: dict[tuple[int, int], _Fragment | None]
) -> _Fragment | None:
    """The fragment right before a piece on its path; None where another unit computed that token."""
    spans = bundle.spans
    line = piece.line
    if piece.start == spans.start[line]:
        if spans.parent[line] == NONE:
            return None
        line = int(bundle.span_offsets[spans.unit[line]]) + int(spans.parent[line])
        if spans.owner[line] != spans.unit[line]:
            return None
    return tails.get((line, piece.start))


def _add_fragment(
    fragments: list[_Fragment], piece: _Piece, start: int, stop: int, parent: _Fragment | None
) -> _Fragment:
    fragment = _Fragment(piece=piece, start=start, stop=stop, parent=parent)
    if parent is not None:
        parent.children.append(fragment)
    fragments.append(fragment)
    return fragment


def _fragment_blocks(bundle: PlanBundle, fragments: list[_Fragment], size: int) -> Iterator[Block]:
    """One block per leaf; its readers are those whose import ends at a fragment that has it as its home."""
    for fragment in fragments:
        further = {unit for child in fragment.children for unit, _ in child.piece.readers}
        ends = {unit for unit, _ in fragment.piece.readers} - further
        fragment.home().ends_here |= ends
    for leaf in fragments:
        if leaf.children:
            continue
        path: list[_Fragment] = []
        at: _Fragment | None = leaf
        while at is not None:
            path.append(at)
            at = at.parent
        path.reverse()
        yield _block(
            bundle,
            tuple((f.piece.line, f.start, f.stop) for f in path),
            tuple((unit, False) for unit in sorted(leaf.ends_here)),
            block_tokens=size,
            copied=path[0].start % size,
            keys=any(attends for f in path for _, attends in f.piece.readers),
        )


def _partial_tokens(bundle: PlanBundle, size: int) -> int:
    """Tokens of every unit's imports that lie after the last multiple of B before an end of the import.

    An import ends where the unit computes on, or where its layout stops.
    """
    spans, offsets = bundle.spans, bundle.span_offsets
    has_parent = spans.parent != NONE
    parent = offsets[spans.unit] + np.where(has_parent, spans.parent, 0)
    imported = spans.owner != spans.unit
    is_parent = np.bincount(parent[has_parent], minlength=len(spans)) > 0
    computed = np.bincount(parent[has_parent & ~imported], minlength=len(spans)) > 0
    low: dict[int, int] = {}  # of each line, the first token that some end leaves over
    for end in np.flatnonzero(imported & (computed | ~is_parent)).tolist():
        start = int(spans.stop[end]) // size * size
        line = end
        while spans.stop[line] > start:
            low[line] = min(low.get(line, int(spans.stop[line])), max(start, int(spans.start[line])))
            if spans.start[line] <= start or spans.parent[line] == NONE:
                break
            line = int(parent[line])
    return sum(int(spans.stop[line]) - first for line, first in low.items())
