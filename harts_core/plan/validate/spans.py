"""Rules of the span table: forests, token paths, owners, and no prefix twice."""

from __future__ import annotations

import numpy as np

from harts_core.plan.bundle import CONSUMER, NONE, PRODUCER, PlanBundle
from harts_core.plan.validate.failure import reject, require
from harts_core.plan.validate.paths import TokenPaths
from harts_core.trees.rollout_tree import RolloutTree


def check_spans(bundle: PlanBundle, tree: RolloutTree, paths: TokenPaths) -> None:
    """Spans are forests of token runs on the tree's paths; imports come from earlier units that own them."""
    s = bundle.spans

    def where(i: int) -> str:
        return f"unit {s.unit[i]}, span {s.span[i]}"

    check_span_units(bundle)
    _check_numbering(bundle)
    require((s.start >= 0) & (s.start < s.stop), "the span is empty or starts below 0", where)
    require((s.row >= 0) & (s.row < tree.num_rows), "the row is not in the tree", where)
    require(s.stop <= tree.length[s.row], "the span runs past the end of its row", where)
    child = np.flatnonzero(s.parent != NONE)
    require(
        (s.parent == NONE) | ((s.parent >= 0) & (s.parent < s.span)), "parent is not an earlier span", where
    )
    parent = bundle.span_offsets[s.unit[child]] + s.parent[child]
    require((s.parent != NONE) | (s.start == 0), "a root must start at position 0", where)
    require(s.start[child] == s.stop[parent], "start is not the parent's stop", lambda i: where(child[i]))
    require(
        paths.name(s.row[child], s.start[child]) == paths.name(s.row[parent], s.start[child]),
        "the row does not pass through the parent span",
        lambda i: where(child[i]),
    )
    _check_owners(bundle, paths)
    imported = s.owner != s.unit
    require(
        ~imported[child] | imported[parent],
        "an imported span hangs under an owned one",
        lambda i: where(child[i]),
    )
    sharing = bundle.parameters["sharing"]
    if sharing == "tree":
        _check_no_repeats(bundle, paths)
    elif sharing == "none":
        require(s.parent == NONE, "sharing is none, but the span has a parent", where)
    else:
        _check_groups(bundle, tree, paths)


def check_span_units(bundle: PlanBundle) -> None:
    """The units and owners of spans are units of the plan."""
    s = bundle.spans
    require((s.unit >= 0) & (s.unit < bundle.num_units), "no such unit", lambda i: f"spans, line {i}")
    require(
        (s.owner >= 0) & (s.owner < bundle.num_units),
        "no such owner",
        lambda i: f"unit {s.unit[i]}, span {s.span[i]}",
    )


def _check_numbering(bundle: PlanBundle) -> None:
    s = bundle.spans
    rises = np.ones(len(s), np.bool_)
    rises[1:] = s.unit[1:] >= s.unit[:-1]
    require(rises, "lines are not sorted by unit", lambda i: f"spans, line {i}")
    expected = np.arange(len(s)) - bundle.span_offsets[s.unit]
    require(s.span == expected, "spans are not numbered 0, 1, …", lambda i: f"unit {s.unit[i]}, line {i}")


def _check_owners(bundle: PlanBundle, paths: TokenPaths) -> None:
    s, u, w = bundle.spans, bundle.units, bundle.windows

    def where(i: int) -> str:
        return f"unit {s.unit[i]}, span {s.span[i]}"

    own = s.owner == s.unit
    require(~own | (s.owner_span == s.span), "an owned span must name itself as owner_span", where)
    counts = np.diff(bundle.span_offsets)
    require((s.owner_span >= 0) & (s.owner_span < counts[s.owner]), "the owner has no such span", where)
    imported = np.flatnonzero(~own)
    unit, owner = s.unit[imported], s.owner[imported]
    source = bundle.span_offsets[owner] + s.owner_span[imported]

    def where_imported(i: int) -> str:
        return where(int(imported[i]))

    require(u.replica[unit] == u.replica[owner], "imported from another replica", where_imported)
    require(u.order[owner] < u.order[unit], "imported from a unit that runs later", where_imported)
    require(s.owner[source] == owner, "the named owner itself imports that span", where_imported)
    require(
        (s.start[source] <= s.start[imported]) & (s.stop[imported] <= s.stop[source]),
        "the owner's span does not contain the imported one",
        where_imported,
    )
    require(
        paths.name(s.row[imported], s.stop[imported]) == paths.name(s.row[source], s.stop[imported]),
        "the owner's span lies on another token path",
        where_imported,
    )
    if len(w):
        from_producer = np.flatnonzero(u.kind[owner] == PRODUCER)
        unit, window = unit[from_producer], u.window[owner[from_producer]]
        consumer = u.kind[unit] == CONSUMER
        start = np.where(consumer, u.slot[unit], w.slot_start[u.window[unit]])
        stop = np.where(consumer, u.slot[unit] + 1, w.slot_stop[u.window[unit]])
        require(
            (w.slot_start[window] <= start) & (stop <= w.slot_stop[window]),
            "imported from a producer of another window",
            lambda i: where_imported(int(from_producer[i])),
        )


def _check_no_repeats(bundle: PlanBundle, paths: TokenPaths) -> None:
    """No token prefix twice in a unit: two spans that begin with the same prefix would repeat it.

    That suffices: where the paths of two spans with a common prefix part, two spans begin alike.
    """
    s = bundle.spans
    name = paths.name(s.row, s.start + 1)
    order = np.lexsort((name, s.start, s.unit))
    key = np.stack([s.unit[order], s.start[order], name[order]])
    repeated = (key[:, 1:] == key[:, :-1]).all(axis=0)
    if repeated.any():
        i = int(np.flatnonzero(repeated)[0])
        a, b = s.span[order[i]], s.span[order[i + 1]]
        raise reject(
            f"spans {a} and {b} hold the same token prefix, of length {s.start[order[i]] + 1}",
            f"unit {s.unit[order[i]]}",
        )


def _check_groups(bundle: PlanBundle, tree: RolloutTree, paths: TokenPaths) -> None:
    """Sharing "group": one root for each group of a unit, at most one level below it, one group each.

    Several roots only where the group's rows begin with different tokens; then nothing lies below them.
    """
    s = bundle.spans
    _, group = np.unique(np.array(tree.group_id), return_inverse=True)
    mine = group[s.row]

    def where(i: int) -> str:
        return f"unit {s.unit[i]}, span {s.span[i]}"

    root = s.parent == NONE
    lines = np.flatnonzero(root)
    part = s.unit.astype(np.int64) * (int(group.max()) + 1) + mine
    _, first, number = np.unique(part[lines], return_index=True, return_inverse=True)
    begins = paths.name(s.row[lines], np.ones(len(lines), np.int64))
    differs = np.zeros(len(first), np.bool_)
    np.logical_or.at(differs, number, begins != begins[first][number])
    differs |= np.bincount(number) == 1
    require(differs[number], "a second root of one group", lambda i: where(lines[i]))
    child = np.flatnonzero(~root)
    parent = bundle.span_offsets[s.unit[child]] + s.parent[child]
    require(root[parent], "sharing is by group, but the span lies two levels deep", lambda i: where(child[i]))
    several = np.unique(part[lines])[np.bincount(number) > 1]
    require(
        ~np.isin(part[child], several),
        "a span below one of several roots of its group",
        lambda i: where(child[i]),
    )
    require(
        mine[child] == mine[parent], "parent and child are of different groups", lambda i: where(child[i])
    )
