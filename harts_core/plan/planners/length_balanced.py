"""Balanced by length alone, as sequence-level trainers do it: Karmarkar–Karp, no sharing.

The largest differencing method for K sets: every row starts as a state of one set; the two states with the
largest spread (heaviest less lightest of their K sets) are merged, the heaviest set of one with the lightest
of the other, until one is left.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from harts_core.plan.layout import Layout
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.progress import Progress

SEARCH = "search for the number of consumers"


def plan_length_balanced(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan by lengths (sharing "none"): the fewest slots for which Karmarkar–Karp keeps to the capacity.

    Raises:
        InfeasiblePlanError: it does for no number of whole slots.
    """
    length, dp = problem.length, problem.dp
    fewest = problem.whole_slots(-(-int(length.sum()) // problem.capacity))
    for count in range(fewest, len(length) + 1, dp):
        progress(SEARCH, count, len(length))
        consumer = karmarkar_karp(length, count)
        weight = np.zeros(count, np.int64)
        np.add.at(weight, consumer, length)
        if weight.max() <= problem.capacity:
            return problem.layout(consumer, weight, sharing="none")
    raise problem.no_plan(fewest)


class _State(NamedTuple):
    """Disjoint sets of rows, heaviest first; the K − len(weight) others are empty.

    Attributes:
        weight: int64 [m].
        root: int64 [m], a row of each set, which stands for it.
    """

    weight: Int64
    root: Int64


def karmarkar_karp(weight: Int64, count: int) -> Int32:
    """int32 [M], the set of each row; sets are numbered from the heaviest, and none is empty.

    Args:
        weight: int64 [M], positive.
        count: K, 1 ≤ K ≤ M.
    """
    states = [_State(weight[i : i + 1], np.array([i])) for i in range(len(weight))]
    heap = [(_rank(state, count), i) for i, state in enumerate(states)]
    heapq.heapify(heap)
    parent = np.arange(len(weight))  # of a row that stands for a set: the one of the set that it joined
    while len(heap) > 1:
        _, a = heapq.heappop(heap)
        _, b = heap[0]
        merged = _merge(states[a], states[b], count, parent)
        states.append(merged)
        heapq.heapreplace(heap, (_rank(merged, count), len(states) - 1))
    final = states[heap[0][1]]
    while not np.array_equal(parent, parent[parent]):
        parent = parent[parent]
    number = np.empty(len(weight), np.int32)
    number[final.root] = np.arange(len(final.root))
    return number[parent]


def _rank(state: _State, count: int) -> int:
    """The negative spread: the largest spread is first in a heap."""
    lightest = int(state.weight[-1]) if len(state.weight) == count else 0
    return lightest - int(state.weight[0])


def _merge(a: _State, b: _State, count: int, parent: Int64) -> _State:
    """Join a's sets with b's, heaviest with lightest of K; where two sets meet, b's joins a's."""
    alone_a, alone_b = min(len(a.weight), count - len(b.weight)), min(len(b.weight), count - len(a.weight))
    met_a, met_b = slice(alone_a, None), slice(len(b.weight) - 1, alone_b - 1 if alone_b else None, -1)
    parent[b.root[met_b]] = a.root[met_a]
    weight = np.concatenate([a.weight[:alone_a], a.weight[met_a] + b.weight[met_b], b.weight[:alone_b]])
    root = np.concatenate([a.root[:alone_a], a.root[met_a], b.root[:alone_b]])
    order = np.argsort(-weight, kind="stable")
    return _State(weight[order], root[order])
