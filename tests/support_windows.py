"""Plans whose units import from each other: one producer, nested producers, chains of consumers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from harts_core.plan.build import finish_bundle
from harts_core.plan.bundle import (
    CONSUMER,
    NONE,
    PRODUCER,
    AssignmentTable,
    PlanBundle,
    SpanTable,
    WindowTable,
)
from harts_core.plan.cost_model import DEFAULT_COST_MODEL, load_cost_model
from harts_core.plan.layout import Layout
from harts_core.plan.windows_layout import ProducerLevel, layout_windows
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.segments import SegmentTree, build_segment_tree
from tests.support import naive_lcp

Piece = tuple[int, int, int, int, int, int]
"""parent, start, stop, row, owner, owner_span"""


def window_bundle(tree: RolloutTree, *, chunk: int, consumers: int, seed: int = 0) -> PlanBundle:
    """One replica, one window over all slots: unit 0 is a producer of a random upper part of the tree, the
    rows are dealt randomly to the consumers 1, 2, …"""
    rng = np.random.default_rng(seed)
    whole = build_segment_tree(tree.length, tree.lcp)
    held = np.zeros(len(whole), bool)
    for s in range(len(whole)):
        above = whole.parent[s] < 0 or held[whole.parent[s]]
        held[s] = above and (whole.parent[s] < 0 or rng.random() < 0.6)
    index = np.where(held, np.cumsum(held) - 1, NONE)
    units: list[list[Piece]] = [
        [
            (
                NONE if whole.parent[s] < 0 else index[whole.parent[s]],
                whole.start[s],
                whole.stop[s],
                whole.row[s],
                0,
                index[s],
            )
            for s in np.flatnonzero(held)
        ]
    ]
    slot = rng.permutation(np.arange(tree.num_rows) % consumers)
    lines = []
    for j in range(consumers):
        rows = np.flatnonzero(slot == j)
        pieces, last = _consumer(tree, rows, whole, held, index, unit=j + 1)
        units.append(pieces)
        lines += [(int(r), 0, j, j + 1, 0, int(tree.length[r]), last[i]) for i, r in enumerate(rows)]
    columns = np.array([(u, i, *piece) for u, pieces in enumerate(units) for i, piece in enumerate(pieces)])
    names = ("unit", "span", "parent", "start", "stop", "row", "owner", "owner_span")
    assigned = np.array(sorted(lines))
    keys = ("row", "replica", "slot", "unit", "start", "stop", "span")
    layout = Layout(
        replica=np.zeros(consumers + 1, np.int32),
        kind=np.array([PRODUCER] + [CONSUMER] * consumers, np.int32),
        window=np.zeros(consumers + 1, np.int32),
        slot=np.array([NONE, *range(consumers)], np.int32),
        order=np.arange(consumers + 1, dtype=np.int32),
        windows=WindowTable(slot_start=np.array([0]), slot_stop=np.array([consumers])),
        spans=SpanTable(**dict(zip(names, columns.T, strict=True))),
        assignments=AssignmentTable(**dict(zip(keys, assigned.T, strict=True))),
        sharing="tree",
    )
    parameters = _parameters(tree, chunk, seed)
    cost = load_cost_model(DEFAULT_COST_MODEL)
    return finish_bundle(tree, layout, planner="test", parameters=parameters, cost_model=cost)


def _consumer(
    tree: RolloutTree, rows: np.ndarray, whole: SegmentTree, held: np.ndarray, index: np.ndarray, *, unit: int
) -> tuple[list[Piece], list[int]]:
    """The consumer's own segment tree, cut where the producer's spans end; and each row's last span."""
    tokens = [tree.tokens(int(r)).tolist() for r in rows]
    lcp = [0] + [naive_lcp(a, b) for a, b in itertools.pairwise(tokens)]
    mine = build_segment_tree(tree.length[rows], np.array(lcp))
    pieces: list[Piece] = []
    of_segment: list[list[int]] = []
    for s in range(len(mine)):
        row = int(rows[mine.row[s]])
        parent = NONE if mine.parent[s] < 0 else of_segment[mine.parent[s]][-1]
        at, parts = int(mine.start[s]), []
        while at < mine.stop[s]:
            above = _holder(whole, row, at)
            if held[above]:
                owner, span, stop = 0, int(index[above]), min(int(whole.stop[above]), int(mine.stop[s]))
            else:
                owner, span, stop = unit, len(pieces), int(mine.stop[s])
            pieces.append((parent, at, stop, row, owner, span))
            parent = len(pieces) - 1
            parts.append(parent)
            at = stop
        of_segment.append(parts)
    last = []
    for i, r in enumerate(rows):
        parts = of_segment[mine.row_segment[i]]
        last.append(next(p for p in parts if pieces[p][1] < tree.length[r] <= pieces[p][2]))
    return pieces, last


def _holder(whole: SegmentTree, row: int, position: int) -> int:
    """The segment of the whole tree that holds a row's position."""
    segment = int(whole.row_segment[row])
    while whole.start[segment] > position:
        segment = int(whole.parent[segment])
    return segment


def random_windows(rng: np.random.Generator, outer: np.ndarray) -> np.ndarray:
    """Windows that refine ``outer``."""
    cuts = rng.random(len(outer)) < 0.4
    cuts[0] = False
    cuts[1:] |= outer[1:] != outer[:-1]
    return np.cumsum(cuts)


def random_depth(
    rng: np.random.Generator, rows: list[list[int]], unit: list[tuple[int, int]], outer: np.ndarray
) -> np.ndarray:
    """A prefix-closed choice for every unit: the union of random prefixes of its rows."""
    want = [int(rng.integers(0, len(r) + 1)) if rng.random() < 0.5 else 0 for r in rows]
    return np.array(
        [
            max(
                int(outer[i]),
                *(min(want[j], naive_lcp(rows[i], rows[j])) for j in range(len(rows)) if unit[i] == unit[j]),
            )
            for i in range(len(rows))
        ]
    )


def nested_bundle(
    tree: RolloutTree,
    *,
    dp: int,
    slots: int,
    levels: int,
    chunk: int,
    seed: int = 0,
    outer: Sequence[int] | None = None,
) -> PlanBundle:
    """Rows dealt randomly to replicas and slots; levels of random windows with random depths. The outermost
    level's windows of the slots are ``outer``: one over all slots if not given."""
    rng = np.random.default_rng(seed)
    place = np.arange(tree.num_rows) % (dp * slots)
    rng.shuffle(place)
    replica, slot = (place % dp).astype(np.int32), (place // dp).astype(np.int32)
    rows = [tree.tokens(i).tolist() for i in range(tree.num_rows)]
    windows = np.zeros(slots, int) if outer is None else np.array(outer)
    depth = np.zeros(tree.num_rows, int)
    found: list[ProducerLevel] = []
    for level in range(levels):
        windows = random_windows(rng, windows) if level else windows
        unit = [(int(windows[slot[i]]), int(replica[i])) for i in range(tree.num_rows)]
        depth = random_depth(rng, rows, unit, depth)
        found.append(ProducerLevel(window_of_slot=windows, depth=depth))
    layout = layout_windows(tree, dp=dp, replica=replica, slot=slot, levels=found)
    parameters = _parameters(tree, chunk, seed) | {"dp": dp, "max_live_producers": 8}
    cost = load_cost_model(DEFAULT_COST_MODEL)
    return finish_bundle(tree, layout, planner="test", parameters=parameters, cost_model=cost)


def chain_bundle(tree: RolloutTree, *, units: int, chunk: int) -> PlanBundle:
    """The tree's tokens in depth-first order, cut into equal runs: each run is a consumer that evaluates its
    own tokens and imports their ancestors from the consumers before it (psRL's chain)."""
    whole = build_segment_tree(tree.length, tree.lcp)
    cuts = [whole.num_tokens * u // units for u in range(units + 1)]
    pieces: list[tuple[int, int, int, int, int]] = []  # parent piece, start, stop, row, owner
    last_piece: list[int] = []  # of each segment
    seen = 0
    for s in range(len(whole)):
        parent = NONE if whole.parent[s] < 0 else last_piece[whole.parent[s]]
        at, stop = int(whole.start[s]), int(whole.stop[s])
        while at < stop:
            unit = next(u for u in range(units) if cuts[u] <= seen < cuts[u + 1])
            length = min(stop - at, cuts[unit + 1] - seen)
            pieces.append((parent, at, at + length, int(whole.row[s]), unit))
            parent = len(pieces) - 1
            at, seen = at + length, seen + length
        last_piece.append(parent)
    spans: list[tuple[int, ...]] = []
    index: list[dict[int, int]] = []
    for unit in range(units):
        wanted: set[int] = set()
        for i, piece in enumerate(pieces):
            at = i if piece[4] == unit else NONE
            while at != NONE and at not in wanted:
                wanted.add(at)
                at = pieces[at][0]
        index.append({piece: i for i, piece in enumerate(sorted(wanted))})
        for piece, i in index[unit].items():
            parent, start, stop, row, owner = pieces[piece]
            above = NONE if parent == NONE else index[unit][parent]
            spans.append((unit, i, above, start, stop, row, owner, index[owner][piece]))
    lines = []
    for row in range(tree.num_rows):
        at = last_piece[whole.row_segment[row]]
        while pieces[at][1] >= tree.length[row]:
            at = pieces[at][0]
        path = []
        while at != NONE:
            path.append(at)
            at = pieces[at][0]
        for unit, group in itertools.groupby(reversed(path), key=lambda i: pieces[i][4]):
            mine = list(group)
            stop = min(int(tree.length[row]), pieces[mine[-1]][2])
            lines.append((row, 0, unit, unit, pieces[mine[0]][1], stop, index[unit][mine[-1]]))
    columns, assigned = np.array(spans).T, np.array(lines).T
    layout = Layout(
        replica=np.zeros(units, np.int32),
        kind=np.full(units, CONSUMER, np.int32),
        window=np.full(units, NONE, np.int32),
        slot=np.arange(units, dtype=np.int32),
        order=np.arange(units, dtype=np.int32),
        windows=WindowTable(slot_start=np.empty(0), slot_stop=np.empty(0)),
        spans=SpanTable(**dict(zip(SpanTable.__slots__, columns, strict=True))),
        assignments=AssignmentTable(**dict(zip(AssignmentTable.__slots__, assigned, strict=True))),
        sharing="tree",
    )
    cost = load_cost_model(DEFAULT_COST_MODEL)
    parameters = _parameters(tree, chunk, 0)
    return finish_bundle(tree, layout, planner="test", parameters=parameters, cost_model=cost)


def _parameters(tree: RolloutTree, chunk: int, seed: int) -> dict[str, int]:
    return {"dp": 1, "capacity": tree.original_tokens, "pad": 1, "chunk": chunk, "seed": seed}
