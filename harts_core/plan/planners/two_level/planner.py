"""Harts L1 + L2: replicas, windows, slots and producers decided together (DESIGN §3)."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from harts_core.plan.bounds import least_shared_tokens, least_tokens_within_capacity
from harts_core.plan.layout import Layout
from harts_core.plan.planners.harts_l1 import Items, place_leaves, plan_harts_l1, quick_partition
from harts_core.plan.planners.problem import PlanProblem
from harts_core.plan.planners.two_level.empty_slots import fill_empty_slots
from harts_core.plan.planners.two_level.placement import Placement, place_items
from harts_core.plan.planners.two_level.score import Score, score_layout
from harts_core.plan.planners.two_level.sharing import ProducerLimits, share_prefixes
from harts_core.plan.windows_layout import ProducerLevel, layout_windows
from harts_core.progress import Progress

SLOTS_PER_WINDOW, LEAST_SLOTS_PER_WINDOW = 7, 4
"""About as many slots share an inner producer: fewer leave the outer one too much, more the inner one."""
FILLED = 2
"""Inner producers have room for so many times the tokens that some microbatches share in every plan."""
L1_MARGIN = 0.9
SEARCH = "search for windows and producers"


def plan_harts(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan by prefix compression and reuse across consumers (sharing "tree", with producers).

    The search runs in rounds, ``problem.effort`` of them and more while ``problem.time_budget_s`` lasts; the
    best plan by Φ is kept, and the rounds that ran are stated as ``effort`` in the manifest: planning again
    with that effort gives the same plan. harts-l1's plan competes too where it could win.

    Raises:
        InfeasiblePlanError: no partition into a multiple of D non-empty consumers was found.
    """
    items = place_leaves(problem)
    best: tuple[Score, Layout] | None = None
    started = time.perf_counter()
    rounds = 0
    while rounds < problem.effort or time.perf_counter() - started < problem.time_budget_s:
        progress(SEARCH, rounds, max(problem.effort, rounds + 1))
        best = _better(problem, best, _round(problem, items, rounds))
        rounds += 1
    progress(SEARCH, rounds, rounds)
    if best is None or _may_lose_to_l1(problem, items, best[0]):
        best = _with_l1(problem, items, best, progress)
    return replace(best[1], parameters={"effort": rounds})


def _better(
    problem: PlanProblem, best: tuple[Score, Layout] | None, layout: Layout | None
) -> tuple[Score, Layout] | None:
    if layout is None:
        return best
    score = _score(problem, layout)
    return (score, layout) if best is None or score < best[0] else best


def _score(problem: PlanProblem, layout: Layout) -> Score:
    return score_layout(layout, dp=problem.dp, pad=problem.pad, cost_model=problem.cost_model)


def _may_lose_to_l1(problem: PlanProblem, items: Items, score: Score) -> bool:
    """Whether harts-l1 could compute fewer tokens (by the bound on its compression) or cost less.

    Its cost is estimated as that of its quick candidates, scaled down to the bound on tokens, less a margin
    for what its search may gain in balance: the whole search takes longer than ours.
    """
    quick = quick_partition(problem, items)
    least = least_tokens_within_capacity(items.length, items.lcp, capacity=problem.capacity, dp=problem.dp)
    if quick is None or score.padded_tokens > least:
        return True
    layout = problem.layout(quick.partition[items.of_row], quick.weight, sharing="tree")
    return score.cost > L1_MARGIN * _score(problem, layout).cost * least / int(quick.weight.sum())


def _round(problem: PlanProblem, items: Items, index: int) -> Layout | None:
    """One search: another seed, another number of windows (the next one that fits), longer ones later."""
    counts = window_counts(problem, items)
    for i in range(len(counts)):
        placed = _place(problem, items, counts[(index + i) % len(counts)], index)
        if placed is not None:
            return _with_producers(problem, *placed)
    return None


def _place(problem: PlanProblem, items: Items, windows: int, index: int) -> tuple[Items, Placement] | None:
    """A placement in so many windows, or in more until none has too many slots, and its items."""
    limit = problem.max_window_slots
    while windows * problem.dp <= len(items.length):
        placement = place_items(
            items.length,
            items.lcp,
            dp=problem.dp,
            windows=windows,
            capacity=problem.capacity,
            moves=1 + index // 4,
            seed=problem.seed + index,
        )
        if limit is None or np.bincount(placement.window_of_slot).max() <= limit:
            return fill_empty_slots(problem, items, placement)
        windows = max(windows + 1, -(-len(placement.window_of_slot) // limit))
    return None


def window_counts(problem: PlanProblem, items: Items) -> list[int]:
    """Numbers of windows to try, the likeliest first; each cell has two items, each window a few slots."""
    length, lcp, capacity, dp = items.length, items.lcp, problem.capacity, problem.dp
    slots = least_tokens_within_capacity(length, lcp, capacity=capacity, dp=dp) / (dp * capacity)
    inner = max(1, problem.max_live_producers - 1) * problem.producer_capacity
    shared = FILLED * least_shared_tokens(length, lcp, capacity=capacity) / (dp * inner)
    limit = problem.max_window_slots or SLOTS_PER_WINDOW
    fewest_slots = min(limit, LEAST_SLOTS_PER_WINDOW)
    likely = round(max(slots / min(limit, SLOTS_PER_WINDOW), shared))
    most = max(1, min(len(length) // (2 * dp), max(int(slots / fewest_slots), likely)))
    counts = [min(most, max(1, n)) for n in (likely, likely + 1, likely - 1, likely * 2)]
    return list(dict.fromkeys(counts))


def _with_producers(problem: PlanProblem, items: Items, placement: Placement) -> Layout:
    limits = ProducerLimits(
        capacity=problem.producer_capacity, live=problem.max_live_producers, pad=problem.pad
    )
    sharing = share_prefixes(items.length, items.lcp, placement, limits)
    rows, n = problem.rows, problem.tree.num_rows
    slot, replica = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    slot[rows] = sharing.placement.slot[items.of_row]
    replica[rows] = placement.replica[items.of_row]
    levels = []
    for window, held in zip(sharing.windows, sharing.depth, strict=True):
        depth = np.zeros(n, np.int32)
        depth[rows] = np.minimum(held[items.of_row], problem.length)
        levels.append(ProducerLevel(window_of_slot=window.astype(np.int32), depth=depth))
    return layout_windows(problem.tree, dp=problem.dp, replica=replica, slot=slot, levels=levels)


def _with_l1(
    problem: PlanProblem, items: Items, best: tuple[Score, Layout] | None, progress: Progress
) -> tuple[Score, Layout]:
    """The best of what was found, harts-l1's plan, and that plan with producers; none may compute more
    padded tokens than harts-l1's."""
    layout = plan_harts_l1(problem, progress)
    l1 = _score(problem, layout)
    if best is not None and best[0].padded_tokens > l1.padded_tokens:
        best = None
    best = (l1, layout) if best is None or l1 < best[0] else best
    slot = np.empty(len(problem.rows), np.int64)
    replica = np.empty(len(problem.rows), np.int64)
    a = layout.assignments
    index = np.searchsorted(problem.rows, a.row)
    slot[index], replica[index] = a.slot, a.replica
    last = items.last_row()
    num_slots = int(slot.max()) + 1
    placement = Placement(
        dp=problem.dp,
        replica=replica[last],
        slot=slot[last],
        window_of_slot=np.arange(num_slots) // (problem.max_window_slots or num_slots),
    )
    found = _better(problem, best, _with_producers(problem, items, placement))
    return best if found is None else found
