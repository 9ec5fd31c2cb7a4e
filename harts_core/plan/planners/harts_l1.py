"""Harts L1: the partition into consumers with the fewest compact tokens (DESIGN §3).

Only rows that are not a prefix of the next one (leaves) are placed; the others join a consumer that holds
them already, at no cost. Candidates are exact contiguous partitions for every count K, greedy packings,
and partitions annealed from contiguous ones for a few K; all are compared by J.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harts_core.plan.bounds import least_tokens_within_capacity
from harts_core.plan.layout import Layout
from harts_core.plan.planners.anneal import anneal_partition
from harts_core.plan.planners.bins import bins_of_partition
from harts_core.plan.planners.contiguous import contiguous_partitions, natural_runs
from harts_core.plan.planners.greedy import BEST_FIT, MAX_SHARED, align_count, pack_greedily
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem, partition_score
from harts_core.progress import Progress
from harts_core.trees.neighbours import neighbour_lcp

PROBE_MOVES, FINAL_MOVES = 150, 1000
"""Annealing moves per row: to find the best count K, and around it."""
MOST_MOVES = 10_000_000
PROBED_COUNTS = 4
SEARCH = "search for consumers"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """The rows that are placed, in lexicographic order.

    Attributes:
        length: int64 [L].
        lcp: int32 [L], tokens shared with the item before.
        of_row: int64 [M], the item that each row of the problem joins.
    """

    length: Int64
    lcp: Int32
    of_row: Int64

    def last_row(self) -> Int64:
        """int64 [L], the longest row of each item: the others are prefixes of it."""
        rows = np.zeros(len(self.length), np.int64)
        rows[self.of_row] = np.arange(len(self.of_row))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A feasible partition of the items into K consumers, K a multiple of D."""

    partition: Int32
    weight: Int64


def plan_harts_l1(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan by prefix compression alone (sharing "tree", no producers).

    Raises:
        InfeasiblePlanError: no partition into a multiple of D non-empty consumers was found.
    """
    best = best_partition(problem, progress)
    if best is None:
        raise problem.no_plan(natural_runs(problem.length, problem.lcp, problem.capacity))
    items, candidate = best
    return problem.layout(candidate.partition[items.of_row], candidate.weight, sharing="tree")


def best_partition(problem: PlanProblem, progress: Progress) -> tuple[Items, Candidate] | None:
    """The items and the best partition of them by J; None: no feasible one was found."""
    items = place_leaves(problem)
    best = quick_partition(problem, items)
    for candidate in _annealed(problem, items, best, progress):
        best = _better(problem, best, candidate)
    return None if best is None else (items, best)


def quick_partition(problem: PlanProblem, items: Items) -> Candidate | None:
    """The best contiguous or greedy partition by J, without annealing; None: no feasible one was found."""
    best: Candidate | None = None
    for candidate in (*_contiguous(problem, items), *_greedy(problem, items)):
        best = _better(problem, best, candidate)
    return best


def _better(problem: PlanProblem, best: Candidate | None, candidate: Candidate) -> Candidate:
    if best is None:
        return candidate
    if partition_score(candidate.weight, problem.dp) < partition_score(best.weight, problem.dp):
        return candidate
    return best


def place_leaves(problem: PlanProblem) -> Items:
    """The leaves, unless there are too few of them to keep every consumer non-empty."""
    leaf = np.append(problem.lcp[1:] < problem.length[:-1], True)
    rows = np.flatnonzero(leaf)
    first = np.arange(len(rows)) == 0
    lcp = neighbour_lcp(problem.lcp, rows.astype(np.int32), first)
    needed = _round_up(natural_runs(problem.length[rows], lcp, problem.capacity), problem.dp) + problem.dp
    if len(rows) < needed:
        return Items(length=problem.length, lcp=problem.lcp, of_row=np.arange(len(problem.rows)))
    return Items(length=problem.length[rows], lcp=lcp, of_row=np.cumsum(leaf) - leaf)


def _round_up(count: int, dp: int) -> int:
    return -(-count // dp) * dp


def _candidate(items: Items, partition: Int32, count: int) -> Candidate:
    weight = bins_of_partition(items.length, items.lcp, partition, count).load
    return Candidate(partition=partition, weight=weight)


def _contiguous(problem: PlanProblem, items: Items) -> Iterator[Candidate]:
    """The exact contiguous optimum for every K from the fewest to the natural count and one slot more."""
    dp, capacity = problem.dp, problem.capacity
    most = _round_up(natural_runs(items.length, items.lcp, capacity), dp) + dp
    counts = range(_fewest(problem, items), min(most, len(items.length)) + 1, dp)
    for count, (_, partition) in contiguous_partitions(
        items.length, items.lcp, capacity=capacity, counts=list(counts)
    ).items():
        yield _candidate(items, partition, count)


def _fewest(problem: PlanProblem, items: Items) -> int:
    """No plan has fewer consumers: the least tokens within the capacity, in whole slots."""
    tokens = least_tokens_within_capacity(items.length, items.lcp, capacity=problem.capacity, dp=problem.dp)
    return _round_up(max(1, -(-tokens // problem.capacity)), problem.dp)


def _greedy(problem: PlanProblem, items: Items) -> Iterator[Candidate]:
    """Greedy packings in several orders by both rules, their counts aligned to D by the cheapest splits."""
    lexicographic = np.arange(len(items.length))
    for order in (lexicographic, lexicographic[::-1], np.argsort(-items.length, kind="stable")):
        for rule in (BEST_FIT, MAX_SHARED):
            packed = pack_greedily(items.length, items.lcp, order=order, rule=rule, capacity=problem.capacity)
            count = _round_up(int(packed.max()) + 1, problem.dp)
            if count <= len(items.length):
                aligned = align_count(items.length, items.lcp, packed, count)
                yield _candidate(items, aligned, count)


def _annealed(
    problem: PlanProblem, items: Items, best: Candidate | None, progress: Progress
) -> Iterator[Candidate]:
    """Annealed partitions: short searches for some counts K, longer ones around the best of them (a lower
    count may come to fit)."""
    n, dp = len(items.length), problem.dp
    fewest, most = _fewest(problem, items), n // dp * dp if best is None else len(best.weight)
    if fewest > most:
        return
    starts = _starts(problem, items)
    probes = np.linspace(fewest // dp, most // dp, PROBED_COUNTS).round().astype(int) * dp
    jobs = [(count, start, PROBE_MOVES) for count in np.unique(probes).tolist() for start in starts]
    num_probes, total = len(jobs), len(jobs) + 3 * len(starts)
    found: list[tuple[int, int]] = []  # (tokens, count)
    done = 0
    while done < len(jobs):
        progress(SEARCH, done, total)
        count, start, moves = jobs[done]
        candidate = _search(problem, items, start, count, moves=moves, seed=problem.seed + done)
        done += 1
        if candidate is not None:
            found.append((int(candidate.weight.sum()), count))
            yield candidate
        if done == num_probes and found:
            closest = min(found)[1]
            finals = [c for c in (closest - dp, closest, closest + dp) if fewest <= c <= n]
            jobs += [(count, start, FINAL_MOVES) for count in finals for start in starts]
    progress(SEARCH, total, total)


def _starts(problem: PlanProblem, items: Items) -> tuple[Int32, Int32]:
    """The partitions to anneal from: the natural contiguous one, and a greedy one, which packs tighter."""
    length, lcp, capacity = items.length, items.lcp, problem.capacity
    natural = natural_runs(length, lcp, capacity)
    runs = contiguous_partitions(length, lcp, capacity=capacity, counts=[natural])[natural][1]
    order = np.arange(len(length))
    return runs, pack_greedily(length, lcp, order=order, rule=MAX_SHARED, capacity=capacity)


def _search(
    problem: PlanProblem, items: Items, start: Int32, count: int, *, moves: int, seed: int
) -> Candidate | None:
    """Anneal a start, split or merged to ``count`` consumers; None: no feasible partition was met."""
    partition = anneal_partition(
        items.length,
        items.lcp,
        align_count(items.length, items.lcp, start, count),
        num_bins=count,
        capacity=problem.capacity,
        moves=min(MOST_MOVES, moves * len(items.length)),
        seed=seed,
    )
    candidate = _candidate(items, partition, count)
    return candidate if candidate.weight.max() <= problem.capacity else None
