"""The report of pipeline schedules: a comparison, and a Gantt chart in letters for each."""

from __future__ import annotations

from harts_cli.report.sections import Drawing, Facts, Report, Section, Table, number, percent
from harts_core.plan.schedule.report import PipelineReport, ScheduleReport

WIDTH = 96
"""Cells of the longest schedule's chart."""
IDLE = "·"
LEGEND = "F f: consumers forward, B b: backward (even, odd slots); P: producer forward, Q: backward; ·: idle"


def schedule_report(name: str, report: PipelineReport) -> Report:
    """Sections of a plan's pipeline schedules; ``name`` is the bundle."""
    longest = max((p.stop for s in report.schedules for p in s.passes), default=0.0)
    sections: list[Section] = [
        Facts(
            title="Pipeline",
            items=(
                ("stages", number(report.stages)),
                ("lag", number(report.lag)),
                ("slots", number(report.slots)),
                ("windows", number(report.windows)),
                ("cost model", report.cost_model),
                ("work of the busiest replica / stages", number(report.work)),
            ),
        ),
        _comparison(report),
    ]
    sections += [_chart(report, schedule, longest) for schedule in report.schedules]
    return Report(title=f"Pipeline schedules of {name}", sections=tuple(sections))


def _comparison(report: PipelineReport) -> Table:
    return Table(
        title="Simulated makespan of the slowest replica",
        columns=("schedule", "makespan", "of harts", "bubbles", "producers", "interface", "activation"),
        rows=tuple(
            (
                schedule.kind,
                number(schedule.makespan),
                f"{schedule.slowdown:.3f}×",
                percent(schedule.bubble_share),
                *(number(max(max(peak) for peak in peaks)) for peaks in _peaks(schedule)),
            )
            for schedule in report.schedules
        ),
        note="producers, interface and activation tokens: the most alive on any stage of any replica; "
        f"a stage holds 1/{report.stages} of the layers",
    )


def _peaks(schedule: ScheduleReport) -> tuple[list[tuple[int, ...]], ...]:
    """Three peaks, for every replica and stage."""
    return (
        [r.peak_producers for r in schedule.replicas],
        [r.peak_interface_tokens for r in schedule.replicas],
        [r.peak_activation_tokens for r in schedule.replicas],
    )


def _chart(report: PipelineReport, schedule: ScheduleReport, longest: float) -> Drawing:
    return Drawing(
        title=f"{schedule.kind}, replica {report.replica}",
        lines=chart_lines(report, schedule, longest),
        note=LEGEND,
    )


def chart_lines(report: PipelineReport, schedule: ScheduleReport, longest: float) -> tuple[str, ...]:
    """One line per stage: in each cell the letter of what takes most of its time.

    Args:
        report: of the plan.
        schedule: the one to draw.
        longest: the time that fills the width.
    """
    width = longest / WIDTH or 1.0
    used = min(WIDTH, round(max((p.stop for p in schedule.passes), default=0.0) / width))
    cells: list[list[dict[str, float]]] = [[{IDLE: width} for _ in range(used)] for _ in range(report.stages)]
    slot = {unit: i for i, unit in enumerate(report.consumers)}
    for p in schedule.passes:
        letters = "PQ" if p.unit not in slot else ("FB", "fb")[slot[p.unit] % 2]
        letter = letters[p.kind == "backward"]
        for c in range(int(p.start / width), min(used, int(p.stop / width) + 1)):
            time = min(p.stop, (c + 1) * width) - max(p.start, c * width)
            taken = cells[p.stage][c]
            taken[letter] = taken.get(letter, 0.0) + time
            taken[IDLE] -= time
    digits = len(str(report.stages - 1))
    return tuple(
        f"stage {s:>{digits}} " + "".join(max(taken, key=taken.__getitem__) for taken in line)
        for s, line in enumerate(cells)
    )
