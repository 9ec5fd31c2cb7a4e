"""The reference planner: first-fit decreasing by task, improved by OR-Tools' CP-SAT shard by shard.

The greedy packing is CP-SAT's hint, and stays where CP-SAT finds nothing better. The solver runs with its own
defaults, but one worker, a fixed seed and a limit in deterministic time, so that the plan does not depend on
the machine's speed.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from harts_core.errors import MissingBackendError
from harts_core.plan.layout import Layout
from harts_core.plan.planners.bins import bins_of_partition
from harts_core.plan.planners.greedy import MAX_SHARED, align_count, pack_greedily
from harts_core.plan.planners.groups import row_groups, shared_in_group
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.progress import Progress
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.segments import build_segment_tree

MOST_CONSUMERS = 32
"""Of a model, which has a variable for every trajectory and consumer of it."""
FIRST_SOLUTION_LIMIT = 10.0
"""Deterministic seconds for the first solution: presolve breaks the symmetry of consumers and may lose the
hint with it."""
SEARCH = "CP-SAT shards"


def plan_ortools_ffd(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan with OR-Tools (sharing "tree", no producers).

    1. Tasks (groups) by decreasing trie tokens, their rows by decreasing length: each row joins the consumer
       that shares most with it and has room, else the first with room, else a new one.
    2. The count is raised to a multiple of D by the cheapest splits.
    3. Consumers go to replicas in the order in which they were opened, which keeps tasks together. CP-SAT
       repacks the rows of each replica (in parts of at most ``MOST_CONSUMERS``) into as many consumers with
       fewer tokens, for ``problem.search_budget`` deterministic seconds (0: up to its first solution,
       whatever that is).
    4. Each replica runs its consumers by decreasing tokens.

    The manifest states the solver's version, the budget, and how many shards were proved optimal.

    Raises:
        MissingBackendError: OR-Tools is not installed.
        InfeasiblePlanError: the rows need more consumers than there are rows for whole slots.
    """
    cp_model, version = _import_ortools()
    length, lcp = problem.length, problem.lcp
    packed = pack_greedily(
        length,
        lcp,
        order=_by_task(problem),
        rule=MAX_SHARED,
        capacity=problem.capacity,
        dissolve=False,
    )
    natural = int(packed.max()) + 1
    count = problem.whole_slots(natural)
    if count > len(length):
        raise problem.no_plan(natural)
    partition = align_count(length, lcp, packed, count)
    num_slots = count // problem.dp
    parts = -(-num_slots // MOST_CONSUMERS)
    shards = [p for r in np.arange(count).reshape(problem.dp, -1) for p in np.array_split(r, parts)]
    optimal = 0
    for i, shard in enumerate(shards):
        progress(SEARCH, i, len(shards))
        rows = np.flatnonzero((partition >= shard[0]) & (partition <= shard[-1]))
        found, proved = _repack(problem, rows, partition[rows] - shard[0], len(shard), cp_model)
        partition[rows] = shard[0] + found
        optimal += proved
    progress(SEARCH, len(shards), len(shards))
    weight = bins_of_partition(length, lcp, partition, count).load.reshape(problem.dp, -1)
    slot = np.argsort(np.argsort(-weight, axis=1, kind="stable"), axis=1).ravel().astype(np.int32)
    parameters = {
        "solver": f"ortools {version}",
        "search_budget": problem.search_budget,
        "shards": len(shards),
        "shards_optimal": optimal,
    }
    layout = problem.layout_at(slot[partition], partition // num_slots, sharing="tree")
    return replace(layout, parameters=parameters)


def _import_ortools() -> tuple[ModuleType, str]:
    try:
        import ortools
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingBackendError(
            "planner ortools-ffd needs OR-Tools, which is not installed", hint="pip install ortools"
        ) from error
    return cp_model, ortools.__version__


def _by_task(problem: PlanProblem) -> Int64:
    """int64 [M], the rows in the order in which they are packed."""
    group = row_groups(problem)
    tokens = np.zeros(int(group.max()) + 1, np.int64)
    np.add.at(tokens, group, problem.length - shared_in_group(problem, group))
    return np.lexsort((-problem.length, group, -tokens[group]))


def _repack(
    problem: PlanProblem, rows: Int64, hint: Int32, num_bins: int, cp_model: Any
) -> tuple[Int32, bool]:
    """(the consumer of each row of a shard, whether that is optimal), from its consumers in the hint."""
    length = problem.length[rows]
    lcp = neighbour_lcp(problem.tree.lcp, problem.rows[rows], np.arange(len(rows)) == 0)
    model, placed = _model(length, lcp, hint, num_bins, problem.capacity, cp_model)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = problem.seed % 2**31
    solver.parameters.stop_after_first_solution = problem.search_budget == 0
    solver.parameters.max_deterministic_time = problem.search_budget or FIRST_SOLUTION_LIMIT
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, False
    values = np.array([[solver.boolean_value(x) for x in row] for row in placed])
    found = values.argmax(axis=1).astype(np.int32)
    before, after = (bins_of_partition(length, lcp, p, num_bins).load.sum() for p in (hint, found))
    return (found if after < before else hint), status == cp_model.OPTIMAL


def _model(length: Int64, lcp: Int32, hint: Int32, num_bins: int, capacity: int, cp_model: Any) -> Any:
    """(model, its variables "row in consumer" as a list [rows] of lists [K]).

    A consumer pays every segment of the prefix tree that a row in it ends with or passes through.
    """
    segments = build_segment_tree(length, lcp)
    tokens = (segments.stop - segments.start).tolist()
    model = cp_model.CpModel()
    bins = range(num_bins)
    placed = [[model.new_bool_var("") for _ in bins] for _ in length]
    paid = [[model.new_bool_var("") for _ in bins] for _ in tokens]
    hinted = np.zeros((len(tokens), num_bins), np.bool_)
    for x, (end, b) in enumerate(zip(segments.row_segment.tolist(), hint.tolist(), strict=True)):
        model.add_exactly_one(placed[x])
        for c in bins:
            model.add_implication(placed[x][c], paid[end][c])
            model.add_hint(placed[x][c], c == b)
        hinted[end, b] = True
    for v in range(len(tokens) - 1, -1, -1):  # children before parents
        parent = int(segments.parent[v])
        for c in bins:
            model.add_hint(paid[v][c], bool(hinted[v, c]))
            if parent >= 0:
                model.add_implication(paid[v][c], paid[parent][c])
                hinted[parent, c] |= hinted[v, c]
    for c in bins:
        load = cp_model.LinearExpr.weighted_sum([row[c] for row in paid], tokens)
        model.add(load <= capacity)
        model.add_bool_or([row[c] for row in placed])
    every = [x for row in paid for x in row]
    model.minimize(cp_model.LinearExpr.weighted_sum(every, np.repeat(tokens, num_bins).tolist()))
    return model, placed
