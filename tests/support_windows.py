"""A hand-made plan with a producer, for the tests of interfaces between units."""

from __future__ import annotations

import itertools

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
    parameters = {"dp": 1, "capacity": tree.original_tokens, "pad": 1, "chunk": chunk, "seed": seed}
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
