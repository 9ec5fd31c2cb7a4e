"""The minimum-call planner for linear attention (DESIGN §4): the fewest packed calls, in linear time.

A packed call runs independent sequences, and a state made inside a call can start another sequence only
after the call returns. A sequence is a chain of segments from parent to child; at most one child of a fork
continues its parent's sequence, every other child is a *side child* and starts its own one from the chunk
boundary b at or before the fork, once the state S_b is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.trees.ragged import Ragged, read_only

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundPlan:
    """The sequences of one or more forests, sorted by (forest, round, first segment).

    Attributes:
        num_rounds: int32 [forests], packed calls that each forest needs, the minimum.
        forest: int32 [Q], the forest of each sequence.
        round: int32 [Q], its call, 0 ≤ round < num_rounds[forest].
        segments: Q rows of segment indices, each a parent-to-child path.
    """

    num_rounds: Int32
    forest: Int32
    round: Int32
    segments: Ragged

    def __post_init__(self) -> None:
        for name in ("num_rounds", "forest", "round"):
            object.__setattr__(self, name, read_only(np.asarray(getattr(self, name), np.int32)))

    def __len__(self) -> int:
        return len(self.round)


def plan_rounds(
    parent: npt.NDArray[Any],
    start: npt.NDArray[Any],
    stop: npt.NDArray[Any],
    *,
    chunk: int,
    forest: npt.NDArray[Any] | None = None,
    num_forests: int = 1,
) -> RoundPlan:
    """Sequences and rounds of independent forests of segments, with the fewest rounds for each.

    A segment without parent may start anywhere: the state at its anchor a(start) is ready before the first
    call (it is zero, or another unit exported it). Within the minimum, sequences are placed between their
    earliest round (their state is ready) and their latest (others wait for theirs) so that the tokens,
    replay included, are spread evenly over the rounds. Time and memory are linear in the segments.

    Args:
        parent: int [V], −1 at a root; parents come before their children.
        start, stop: int [V], token positions [start, stop); start = the parent's stop.
        chunk: B ≥ 1, the chunk length: states exist at its multiples.
        forest: int [V], the forest of each segment, non-decreasing; None: all one.
        num_forests: how many forests there are (one may be empty: 0 rounds).
    """
    parent = np.ascontiguousarray(parent, np.int32)
    start = np.ascontiguousarray(start, np.int32)
    stop = np.ascontiguousarray(stop, np.int32)
    forest = np.zeros(len(parent), np.int32) if forest is None else np.ascontiguousarray(forest, np.int32)
    calls_ready, continuation = _count_calls(parent, start, stop, chunk)
    num_rounds = np.zeros(num_forests, np.int32)
    roots = parent < 0
    np.maximum.at(num_rounds, forest[roots], calls_ready[roots])
    head = _sequence_heads(parent, continuation)
    source = _state_sources(parent, start, stop, head, chunk)
    rounds = _place_sequences(head, source, start, stop, forest, num_rounds, chunk)
    heads = np.flatnonzero(head == np.arange(len(head)))
    heads = heads[np.lexsort((heads, rounds[heads], forest[heads]))]
    offsets, values = _chains(heads, continuation)
    return RoundPlan(
        num_rounds=num_rounds,
        forest=forest[heads],
        round=rounds[heads],
        segments=Ragged(offsets=offsets, values=values),
    )


@numba.njit(cache=True)
def _count_calls(parent: Any, start: Any, stop: Any, chunk: int) -> Any:
    """(T_pre, continuation) of every segment, children before parents.

    T_pre(v): calls for v's subtree when v starts from a ready anchor; T_in(v): when v continues a sequence
    whose latest boundary state is made in this call. Since T_pre ≤ T_in ≤ T_pre + 1, letting the child with
    the largest T_pre continue is always best, so the largest and second-largest T_pre of the children are
    all that is needed. ``continuation`` is that child, −1 at a leaf.
    """
    v = len(parent)
    t_pre = np.empty(v, np.int32)
    t_in = np.empty(v, np.int32)
    largest = np.zeros(v, np.int32)
    second = np.zeros(v, np.int32)
    continuation = np.full(v, -1, np.int32)
    for i in range(v - 1, -1, -1):
        c = continuation[i]
        t_in[i] = 1 if c < 0 else max(t_in[c], 1 + second[i])
        crossed = stop[i] // chunk != start[i] // chunk
        t_pre[i] = t_in[i] if crossed else max(1, largest[i])
        p = parent[i]
        if p >= 0:
            if t_pre[i] >= largest[p]:  # the first child wins ties
                second[p] = largest[p]
                largest[p] = t_pre[i]
                continuation[p] = i
            elif t_pre[i] > second[p]:
                second[p] = t_pre[i]
    return t_pre, continuation


@numba.njit(cache=True)
def _sequence_heads(parent: Any, continuation: Any) -> Any:
    """The first segment of each segment's sequence."""
    head = np.empty(len(parent), np.int32)
    for i in range(len(parent)):
        p = parent[i]
        head[i] = head[p] if p >= 0 and continuation[p] == i else i
    return head


@numba.njit(cache=True)
def _state_sources(parent: Any, start: Any, stop: Any, head: Any, chunk: int) -> Any:
    """For each sequence (at its head): the head of the sequence that makes its initial state, or −1.

    The state at a segment's end anchor b = a(stop) is made by the sequence that computes position b − 1:
    the segment's own when it crosses a boundary, else the one that made its parent's.
    """
    v = len(parent)
    maker = np.empty(v, np.int32)  # of the state at a(stop)
    source = np.full(v, -1, np.int32)
    for i in range(v):
        p = parent[i]
        before = maker[p] if p >= 0 else -1
        maker[i] = head[i] if stop[i] // chunk != start[i] // chunk else before
        if head[i] == i:
            source[i] = before
    return source


@numba.njit(cache=True)
def _place_sequences(
    head: Any, source: Any, start: Any, stop: Any, forest: Any, num_rounds: Any, chunk: int
) -> Any:
    """The round of every sequence (at its head).

    First each as early as its state allows, which keeps to the minimum number of rounds. Then, the last
    sequence first (so that those waiting for a sequence have their final round), each moves to the least
    loaded round between its earliest and the one before the first that waits for it.
    """
    v = len(head)
    rounds = np.zeros(v, np.int32)
    tokens = np.zeros(v, np.int64)
    base = np.zeros(len(num_rounds) + 1, np.int64)
    base[1:] = np.cumsum(num_rounds)
    load = np.zeros(base[-1], np.int64)
    latest = np.empty(v, np.int32)
    for i in range(v):
        tokens[head[i]] += stop[i] - start[i]
        if head[i] == i:
            tokens[i] += start[i] % chunk  # replay
            latest[i] = num_rounds[forest[i]] - 1
            if source[i] >= 0:
                rounds[i] = rounds[source[i]] + 1
    for i in range(v):
        if head[i] == i:
            load[base[forest[i]] + rounds[i]] += tokens[i]
    for i in range(v - 1, -1, -1):
        if head[i] != i:
            continue
        b = base[forest[i]]
        load[b + rounds[i]] -= tokens[i]
        best = rounds[i]
        for r in range(rounds[i] + 1, latest[i] + 1):
            if load[b + r] < load[b + best]:
                best = r
        rounds[i] = best
        load[b + best] += tokens[i]
        if source[i] >= 0:
            latest[source[i]] = min(latest[source[i]], best - 1)
    return rounds


@numba.njit(cache=True)
def _chains(heads: Any, continuation: Any) -> Any:
    """(offsets, segments) of the sequences, following continuations from each head."""
    offsets = np.zeros(len(heads) + 1, np.int64)
    values = np.empty(len(continuation), np.int32)
    m = 0
    for q in range(len(heads)):
        i = heads[q]
        while i >= 0:
            values[m] = i
            m += 1
            i = continuation[i]
        offsets[q + 1] = m
    return offsets, values
