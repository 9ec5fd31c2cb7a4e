"""The report of a comparison of planners."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable

from harts_cli.report.memory_view import amount
from harts_cli.report.sections import Report, Section, Table, number, percent
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
WORK_COLUMNS = (
    "D",
    "planner",
    "blocks",
    "workers",
    "spread",
    "alive",
    "peak cache",
    "allocated",
    "released",
    "hit rate",
    "copied",
    "computed",
    "decoder",
)
WIDTH = 124
"""Characters that the tables take."""
NONE = "–"


def compare_report(name: str, comparison: Comparison) -> Report:
    """Tables of medians over the seeds, and what found no plan; ``name`` is the rollout tree."""
    rows: list[tuple[str, ...]] = []
    work_rows: list[tuple[str, ...]] = []
    for _, of_dp in itertools.groupby(comparison.results, key=lambda r: r.dp):
        results = list(of_dp)
        planners = [list(mine) for _, mine in itertools.groupby(results, key=lambda r: r.planner)]
        rows += [_bounds(results), *map(_line, planners)]
        for mine in planners:
            work_rows += _work_lines(mine, comparison.cache_unit)
    seeds = len({r.seed for r in comparison.results})
    over = f"medians over {seeds} seeds; " if seeds > 1 else ""
    sections: list[Section] = [
        Table(
            title=f"{comparison.rows:,} trajectories, capacity {comparison.capacity:,}",
            columns=COLUMNS,
            rows=tuple(rows),
            note="effective: decoder × balance; gap: of that to its bound; K: microbatches; "
            f"{over}--json has all metrics and gaps",
            text_columns=2,
        )
    ]
    if work_rows:
        sections.append(
            Table(
                title=f"Estimated work, and the cache between microbatches in {comparison.cache_unit}",
                columns=WORK_COLUMNS,
                rows=tuple(work_rows),
                note="workers: mean over max of their work; spread: coefficient of variation of a worker's "
                "microbatches; alive: tokens with a graph; released: peak saved by freeing after the last "
                "use; copied: tokens kept twice; computed, decoder: tokens and compression if none is copied",
                text_columns=3,
            )
        )
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


def _work_lines(results: list[PlannerResult], unit: str) -> list[tuple[str, ...]]:
    """One line for adaptive blocks, with the planner's work, and one for each fixed size."""
    work = [r.work for r in results if r.work]
    caches = [r.cache for r in results if r.cache]
    if not work or not caches:
        return []
    first = (
        f"{_median(w.replica_balance for w in work):.4f}",
        f"{_median(w.microbatch_spread for w in work):.3f}",
        number(round(_median(w.peak_alive_tokens for w in work))),
    )
    released = percent(_median(c.release_saving for c in caches))
    lines: list[tuple[str, ...]] = []
    for i, block in enumerate(caches[0].blocks):
        same = [c.blocks[i] for c in caches]
        fixed = block.block_tokens is not None
        size = "adaptive" if block.block_tokens is None else str(block.block_tokens)
        lines.append(
            (
                str(results[0].dp),
                results[0].planner,
                size,
                *(("", "", "") if fixed else first),
                amount(_median(b.peak for b in same), unit),
                amount(_median(b.allocated for b in same), unit),
                "" if fixed else released,
                percent(_median(b.hit_rate for b in same)),
                number(round(_median(b.copied_tokens for b in same))),
                number(round(_median(b.computed_tokens for b in same))),
                f"{_median(b.decoder_compression for b in same):.3f}",
            )
        )
    return lines


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
