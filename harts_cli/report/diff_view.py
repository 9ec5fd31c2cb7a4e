"""The report of the difference of two plans."""

from __future__ import annotations

from harts_cli.report.sections import Facts, Report, Section, Table, number
from harts_core.plan.diff import Move, Place, PlanDiff

NUM_UNITS = 10


def diff_report(a: str, b: str, diff: PlanDiff) -> Report:
    """Sections of a difference; ``a`` and ``b`` are the bundles."""
    sections: list[Section] = [Facts(title="Summary", items=_summary(diff))]
    rows: tuple[tuple[str, ...], ...]
    if diff.manifest:
        rows = tuple((c.name, _text(c.a), _text(c.b)) for c in diff.manifest)
        sections.append(Table(title="plan.json", columns=("entry", "a", "b"), rows=rows, text_columns=3))
    if diff.metrics:
        rows = tuple((m.name, _text(m.a), _text(m.b), _delta(m.delta)) for m in diff.metrics)
        sections.append(Table(title="Metrics", columns=("metric", "a", "b", "b − a"), rows=rows))
    changed = [t for t in diff.tables if not t.same]
    if changed:
        rows = tuple((t.table, number(t.lines_a), number(t.lines_b)) for t in changed)
        sections.append(Table(title="Tables that differ", columns=("table", "lines a", "lines b"), rows=rows))
    if diff.moved:
        sections.append(_moves(diff))
    units = [("only in b", u) for u in diff.units_added] + [("only in a", u) for u in diff.units_removed]
    if units:
        rows = tuple(
            (side, u.kind, number(u.replica), _text(u.slot), _text(u.window)) for side, u in units[:NUM_UNITS]
        )
        rest = len(units) - len(rows)
        note = f"{rest:,} more; --json has all" if rest else ""
        columns = ("side", "kind", "replica", "slot", "window")
        sections.append(Table(title="Units", columns=columns, rows=rows, note=note, text_columns=2))
    return Report(title=f"{a} → {b}", sections=tuple(sections))


def _summary(diff: PlanDiff) -> tuple[tuple[str, str], ...]:
    moved = "not comparable (other trees)" if diff.num_moved is None else number(diff.num_moved)
    return (
        ("plans", "equal" if diff.same else "differ"),
        ("rollout tree", "the same" if diff.same_tree else "another"),
        ("trajectories moved", moved),
        ("units only in b", number(len(diff.units_added))),
        ("units only in a", number(len(diff.units_removed))),
        ("units with other token counts", number(diff.units_changed)),
    )


def _moves(diff: PlanDiff) -> Table:
    rest = (diff.num_moved or 0) - len(diff.moved)
    return Table(
        title="Trajectories that moved (replica.slot, positions if split)",
        columns=("row", "a", "b"),
        rows=tuple((number(m.row), _places(m, m.a), _places(m, m.b)) for m in diff.moved),
        note=f"{rest:,} more" if rest else "",
        text_columns=3,
    )


def _places(move: Move, places: tuple[Place, ...]) -> str:
    split = max(len(move.a), len(move.b)) > 1
    texts = [f"{p.replica}.{p.slot}" + (f" [{p.start}, {p.stop})" if split else "") for p in places]
    return ", ".join(texts) or "dropped"


def _text(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value)


def _delta(delta: float | None) -> str:
    return "–" if delta is None else f"{'+' if delta > 0 else ''}{number(delta)}"
