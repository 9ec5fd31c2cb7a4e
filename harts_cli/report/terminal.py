"""Drawing a report on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harts_cli.report.sections import Drawing, Facts, Histogram, Report, Section, Table

BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_report(console: Console, report: Report) -> None:
    """Print a report; texts are never read as markup."""
    console.print(Text(report.title, style="bold"))
    for section in report.sections:
        console.print()
        console.print(Text(section.title, style="bold cyan"))
        console.print(_drawing(section))
        if isinstance(section, Table | Drawing) and section.note:
            console.print(Text(section.note, style="dim"))


def bar(count: int, largest: int) -> str:
    """A horizontal bar of up to BAR_WIDTH cells, exact to an eighth; any positive count shows."""
    eighths = round(8 * BAR_WIDTH * count / largest) if largest else 0
    if count:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _drawing(section: Section) -> RichTable | Text:
    if isinstance(section, Drawing):
        return Text("\n".join(section.lines), no_wrap=True)
    table = RichTable(box=None, pad_edge=False, show_header=isinstance(section, Table))
    if isinstance(section, Facts):
        table.add_column()
        table.add_column(justify="right", overflow="fold")
        rows: list[tuple[str, ...]] = list(section.items)
    elif isinstance(section, Histogram):
        table.add_column(justify="right")
        table.add_column(justify="right")
        table.add_column()
        largest = max(section.counts, default=0)
        rows = [
            (label, f"{count:,}", bar(count, largest))
            for label, count in zip(section.labels, section.counts, strict=True)
        ]
    else:
        for i, name in enumerate(section.columns):
            table.add_column(
                Text(name), justify="left" if i < section.text_columns else "right", overflow="fold"
            )
        rows = list(section.rows)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
