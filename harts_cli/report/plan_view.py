"""The report of a plan."""

from __future__ import annotations

from harts_cli.report.sections import Facts, Report, Section, Table, histogram, number, percent
from harts_core.plan.report import PlanReport

NUM_SLOTS = 24


def plan_sections(name: str, plan: PlanReport) -> Report:
    """Sections of a plan's report; ``name`` is the bundle."""
    checked = "valid for its rollout tree" if plan.validated else "not checked (give --tree to check it)"
    sections: list[Section] = [
        Facts(
            title="Plan",
            items=(
                ("planner", plan.planner),
                *((key, _text(value)) for key, value in sorted(plan.parameters.items())),
                ("rollout tree", plan.tree_sha256[:16]),
                ("rules", checked),
            ),
        ),
        Facts(title="Metrics", items=tuple((key, number(v)) for key, v in sorted(plan.metrics.items()))),
        _replica_table(plan),
        _slot_table(plan),
    ]
    if plan.windows:
        sections.append(_window_table(plan))
    sections += [
        histogram("Fill of the consumers (share of the capacity)", plan.consumer_fill),
        histogram("Rows of a consumer", plan.consumer_rows),
        histogram("Rounds of a unit", plan.unit_rounds),
        histogram("New tokens of a round", plan.round_tokens),
    ]
    return Report(title=f"Plan {name}", sections=tuple(sections))


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        return text if len(text) <= 60 else f"{text[:57]}…"
    return number(value)


def _replica_table(plan: PlanReport) -> Table:
    return Table(
        title="Replicas",
        columns=(
            "replica",
            "units",
            "rows",
            "complete",
            "computed",
            "padded",
            "forward cost",
            "backward cost",
        ),
        rows=tuple(
            (
                number(r.replica),
                number(r.units),
                number(r.rows),
                number(r.complete_tokens),
                number(r.computed_tokens),
                number(r.padded_tokens),
                number(r.cost_forward),
                number(r.cost_backward),
            )
            for r in plan.replicas
        ),
    )


def _slot_table(plan: PlanReport) -> Table:
    shown = sorted(plan.slots, key=lambda s: (s.balance, s.slot))[:NUM_SLOTS]
    rest = len(plan.slots) - len(shown)
    return Table(
        title="Slots",
        columns=("slot", "rows", "complete", "computed", "padded", "largest", "balance", "fill", "rounds"),
        rows=tuple(
            (
                number(s.slot),
                number(s.rows),
                number(s.complete_tokens),
                number(s.computed_tokens),
                number(s.padded_tokens),
                number(s.largest_computed),
                f"{s.balance:.3f}",
                percent(s.fill),
                number(s.rounds),
            )
            for s in sorted(shown, key=lambda s: s.slot)
        ),
        note=f"the {len(shown)} least balanced; {rest:,} more in --json" if rest else "",
    )


def _window_table(plan: PlanReport) -> Table:
    return Table(
        title="Windows",
        columns=("window", "first slot", "slots", "producers", "producer tokens"),
        rows=tuple(
            (
                number(w.window),
                number(w.slot_start),
                number(w.slot_stop - w.slot_start),
                number(w.producers),
                number(w.producer_tokens),
            )
            for w in plan.windows
        ),
    )
