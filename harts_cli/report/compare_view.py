"""The report of a comparison of planners."""

from __future__ import annotations

import itertools

from harts_cli.report.sections import Report, Section, Table, percent
from harts_core.plan.compare import Comparison, PlannerResult, medians

COLUMNS = (
    "D",
    "planner",
    "within",
    "decoder",
    "balance",
    "effective",
    "gap",
    "P5",
    "step",
    "K",
    "windows",
    "calls",
    "replay",
    "seconds",
)
WIDTH = 124
"""Characters that the table takes."""
NONE = "–"


def compare_report(name: str, comparison: Comparison) -> Report:
    """One table of medians over the seeds, and what found no plan; ``name`` is the rollout tree."""
    rows: list[tuple[str, ...]] = []
    for _, of_dp in itertools.groupby(comparison.results, key=lambda r: r.dp):
        results = list(of_dp)
        lines = [_line(list(mine)) for _, mine in itertools.groupby(results, key=lambda r: (r.dp, r.planner))]
        rows += [_bounds(results), *lines]
    seeds = len({r.seed for r in comparison.results})
    sections: list[Section] = [
        Table(
            title=f"{comparison.rows:,} trajectories, capacity {comparison.capacity:,}",
            columns=COLUMNS,
            rows=tuple(rows),
            note="effective: decoder × balance; gap: of that to its bound; K: microbatches; "
            + (f"medians over {seeds} seeds; " if seeds > 1 else "")
            + "--json has all metrics and gaps",
            text_columns=2,
        )
    ]
    failed = [r for r in comparison.results if r.failure is not None]
    if failed:
        reasons = tuple((str(r.dp), r.planner, str(r.seed), r.failure or "") for r in failed)
        columns = ("D", "planner", "seed", "reason")
        sections.append(Table(title="No plan", columns=columns, rows=reasons, text_columns=4))
    return Report(title=f"Planners on {name}", sections=tuple(sections))


def _bounds(results: list[PlannerResult]) -> tuple[str, ...]:
    """The bounds of one D; those of the tree and D, so any plan has them."""
    middle = medians(results)
    if middle is None:
        return (str(results[0].dp), "bound", *(NONE for _ in COLUMNS[2:]))
    m = middle[0]
    within, decoder = f"{m['bound_within']:.3f}", f"{m['bound_decoder']:.3f}"
    values = (within, decoder, "1", decoder, "", "1", "1")
    return (str(results[0].dp), "bound", *values, *("" for _ in COLUMNS[2 + len(values) :]))


def _line(results: list[PlannerResult]) -> tuple[str, ...]:
    head = (str(results[0].dp), results[0].planner)
    middle = medians(results)
    if middle is None:
        return (*head, "no plan", *(NONE for _ in COLUMNS[3:]))
    m, seconds = middle
    return (
        *head,
        f"{m['within_compression']:.3f}",
        f"{m['decoder_compression']:.3f}",
        f"{m['balance']:.4f}",
        f"{m['effective_compression']:.3f}",
        percent(m["gap_effective_compression"]),
        f"{m['slot_balance_p5']:.3f}",
        f"{m['step_balance']:.3f}",
        f"{m['num_consumers']:,.0f}",
        f"{m['num_windows']:,.0f}",
        f"{m['num_rounds']:,.0f}",
        f"{m['replay_tokens']:,.0f}",
        f"{seconds:.3f}",
    )
