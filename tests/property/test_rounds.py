"""The minimum-call planner against brute force over all continuation choices."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from harts_core.plan.rounds import RoundPlan, plan_rounds

Forest = tuple[list[int], list[int], list[int]]  # parent, start, stop


def random_forest(rng: np.random.Generator, *, max_segments: int, chunk: int, root_start: bool) -> Forest:
    n = int(rng.integers(1, max_segments + 1))
    parent, start, stop = [], [], []
    for v in range(n):
        p = int(rng.integers(-1, v)) if v and rng.random() < 0.95 else -1
        a = stop[p] if p >= 0 else (int(rng.integers(0, 2 * chunk)) if root_start else 0)
        parent.append(p)
        start.append(a)
        stop.append(a + int(rng.integers(1, 2 * chunk + 2)))
    return parent, start, stop


def brute_force_rounds(forest: Forest, chunk: int) -> int:
    """Fewest calls over every choice of at most one continuing child per segment.

    With fixed choices each sequence runs as soon as its state is ready, which is one call after the sequence
    that computes the position before its anchor.
    """
    parent, start, stop = forest
    children: list[list[int]] = [[] for _ in parent]
    roots = []
    for v, p in enumerate(parent):
        (children[p] if p >= 0 else roots).append(v)

    def calls(v: int, call: int, ready: int) -> int:
        """Last call (exclusive) of v's subtree; v computed in ``call``, S_{a(start)} ready from ``ready``."""
        after = call + 1 if stop[v] // chunk != start[v] // chunk else ready
        best = None
        for o in [None, *children[v]]:
            value = call + 1
            for u in children[v]:
                value = max(value, calls(u, call if u == o else after, after))
            best = value if best is None else min(best, value)
        assert best is not None
        return best

    cached = functools.cache(calls)
    calls = cached
    return max(calls(r, 0, 0) for r in roots)


def check_plan(plan: RoundPlan, forest: Forest, chunk: int) -> None:
    """Every segment once, chains go from parent to child, states come from earlier rounds."""
    parent, start, _ = forest
    of_segment = {}
    for q in range(len(plan)):
        chain = plan.segments[q].tolist()
        for a, b in itertools.pairwise(chain):
            assert parent[b] == a
        for v in chain:
            assert v not in of_segment
            of_segment[v] = q
    assert len(of_segment) == len(parent)
    for q in range(len(plan)):
        assert 0 <= plan.round[q] < plan.num_rounds[0]
        head = int(plan.segments[q][0])
        anchor = start[head] // chunk * chunk
        v = parent[head]
        while v >= 0 and start[v] >= anchor:
            v = parent[v]
        if anchor and v >= 0:
            assert plan.round[of_segment[v]] < plan.round[q]


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 64])
def test_equals_brute_force(chunk: int) -> None:
    rng = np.random.default_rng(chunk)
    for trial in range(500):
        forest = random_forest(rng, max_segments=9, chunk=chunk, root_start=trial % 2 == 0)
        plan = plan_rounds(*map(np.array, forest), chunk=chunk)
        check_plan(plan, forest, chunk)
        assert plan.num_rounds[0] == brute_force_rounds(forest, chunk), forest
        replay = sum(forest[1][int(plan.segments[q][0])] % chunk for q in range(len(plan)))
        parent, start, _ = forest
        first_children = {p: v for v, p in reversed(list(enumerate(parent))) if p >= 0}
        side = [v for v, p in enumerate(parent) if p < 0 or first_children[p] != v]
        assert replay == sum(start[v] % chunk for v in side)  # independent of the choice


def test_forests_together_equal_each_alone() -> None:
    rng = np.random.default_rng(5)
    forests = [random_forest(rng, max_segments=30, chunk=4, root_start=True) for _ in range(20)]
    sizes = [len(f[0]) for f in forests]
    base = np.cumsum([0, *sizes])
    parent = np.concatenate(
        [[p + b if p >= 0 else -1 for p in f[0]] for f, b in zip(forests, base, strict=False)]
    )
    together = plan_rounds(
        parent,
        np.concatenate([f[1] for f in forests]),
        np.concatenate([f[2] for f in forests]),
        chunk=4,
        forest=np.repeat(np.arange(20), sizes),
        num_forests=21,
    )
    assert together.num_rounds[20] == 0
    for i, f in enumerate(forests):
        alone = plan_rounds(*map(np.array, f), chunk=4)
        mine = np.flatnonzero(together.forest == i)
        assert together.num_rounds[i] == alone.num_rounds[0]
        assert together.round[mine].tolist() == alone.round.tolist()
        assert [(together.segments[q] - base[i]).tolist() for q in mine] == [
            alone.segments[q].tolist() for q in range(len(alone))
        ]


def test_rounds_are_evened_out() -> None:
    # A long path (two rounds) and eight light roots: the light ones fill the round that has room.
    parent = [-1, 0, 0] + [-1] * 8
    start = [0, 64, 64] + [0] * 8
    stop = [64, 128, 128] + [40] * 8
    plan = plan_rounds(np.array(parent), np.array(start), np.array(stop), chunk=64)
    tokens = np.zeros(2, int)
    for q in range(len(plan)):
        for v in plan.segments[q]:
            tokens[plan.round[q]] += stop[v] - start[v]
    assert plan.num_rounds.tolist() == [2]
    assert abs(tokens[0] - tokens[1]) <= 40
