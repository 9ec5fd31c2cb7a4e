"""Rules of the assignments: every position of every kept trajectory is evaluated exactly once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, NONE, PlanBundle
from harts_core.plan.validate.failure import require
from harts_core.plan.validate.paths import TokenPaths
from harts_core.trees.rollout_tree import RolloutTree


def check_assignments(bundle: PlanBundle, tree: RolloutTree, paths: TokenPaths) -> None:
    """Rows are covered once, each line lies on its span, and consumers hold nothing that no row needs."""
    a, s, u = bundle.assignments, bundle.spans, bundle.units

    def where(i: int) -> str:
        return f"row {a.row[i]}, unit {a.unit[i]}"

    require((a.row >= 0) & (a.row < tree.num_rows), "no such row", lambda i: f"assignments, line {i}")
    _check_cover(bundle, tree)
    require((a.unit >= 0) & (a.unit < bundle.num_units), "no such unit", where)
    require(u.kind[a.unit] == CONSUMER, "evaluated in a producer", where)
    require(a.replica == u.replica[a.unit], "replica is not the unit's", where)
    require(a.slot == u.slot[a.unit], "slot is not the unit's", where)
    counts = np.diff(bundle.span_offsets)
    require((a.span >= 0) & (a.span < counts[a.unit]), "the unit has no such span", where)
    line = bundle.span_offsets[a.unit] + a.span
    require(
        (s.start[line] < a.stop) & (a.stop <= s.stop[line]),
        "the span does not hold the last evaluated position",
        where,
    )
    require(
        paths.name(a.row, a.stop) == paths.name(s.row[line], a.stop),
        "the trajectory does not lie on the span",
        where,
    )
    _check_needed(bundle, line)
    if bundle.parameters["sharing"] == "none":
        uses = np.bincount(line, minlength=len(s))
        require(uses[line] == 1, "sharing is none, but another row has the same span", where)
    elif bundle.parameters["sharing"] == "group":
        _, group = np.unique(np.array(tree.group_id), return_inverse=True)
        require(group[a.row] == group[s.row[line]], "the span is of another group", where)


def _check_cover(bundle: PlanBundle, tree: RolloutTree) -> None:
    """Lines are sorted; a row's pieces follow each other from 0 to its length; others were dropped."""
    a = bundle.assignments
    dropped = np.zeros(tree.num_rows, np.bool_)
    dropped[bundle.parameters.get("dropped_rows", [])] = True
    require(~dropped[a.row], "a dropped row is evaluated", lambda i: f"row {a.row[i]}")
    missing = ~dropped
    missing[a.row] = False
    require(~missing, "the trajectory is not evaluated in any consumer", lambda i: f"row {i}")
    first = np.ones(len(a), np.bool_)
    first[1:] = a.row[1:] != a.row[:-1]
    last = np.roll(first, -1)
    rises = np.ones(len(a), np.bool_)
    rises[1:] = a.row[1:] >= a.row[:-1]
    require(rises, "lines are not sorted by row", lambda i: f"assignments, line {i}")
    before = np.where(first, 0, np.roll(a.stop, 1))
    require(
        (a.start == before) & (a.start < a.stop),
        "positions are not evaluated exactly once, in order",
        lambda i: f"row {a.row[i]}, positions [{a.start[i]}, {a.stop[i]})",
    )
    require(
        ~last | (a.stop == tree.length[a.row]),
        "the trajectory's last positions are not evaluated, or it is too short for them",
        lambda i: f"row {a.row[i]}",
    )


def _check_needed(bundle: PlanBundle, line: npt.NDArray[np.int64]) -> None:
    """Every consumer evaluates something, and each of its leaves ends where an evaluated piece ends."""
    a, s, u = bundle.assignments, bundle.spans, bundle.units
    evaluates = np.zeros(bundle.num_units, np.bool_)
    evaluates[a.unit] = True
    require(evaluates | (u.kind != CONSUMER), "the consumer is empty", lambda i: f"unit {i}")
    needed = np.zeros(len(s), np.int64)
    np.maximum.at(needed, line, a.stop)
    has_child = np.zeros(len(s), np.bool_)
    child = s.parent != NONE
    has_child[bundle.span_offsets[s.unit[child]] + s.parent[child]] = True
    leaf = ~has_child & (u.kind[s.unit] == CONSUMER)
    require(
        ~leaf | (needed == s.stop),
        "the span holds tokens that no trajectory of the consumer needs",
        lambda i: f"unit {s.unit[i]}, span {s.span[i]}",
    )
