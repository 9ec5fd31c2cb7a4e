"""Writing a report as one self-contained HTML page: no scripts, no external files, no clock."""

from __future__ import annotations

from html import escape
from pathlib import Path

from harts_cli.report.sections import Drawing, Facts, Histogram, Report, Section
from harts_core.errors import DataError
from harts_core.files import atomic_file

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #3b82c4; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
table { border-collapse: collapse; } .scroll { overflow-x: auto; }
th, td { padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th.text, td.text { text-align: left; } td { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.bar { width: 24rem; } td.bar div { background: var(--bar); height: .8rem; min-width: 1px; }
p.note { opacity: .7; margin: .3rem 0; }
"""


def render_html(report: Report) -> str:
    """The page as text; the same report gives the same text."""
    title = escape(report.title)
    body = "\n".join(_section(s) for s in report.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
        "</body>\n</html>\n"
    )


def write_html(path: Path, report: Report) -> None:
    """Write the page, atomically.

    Raises:
        DataError: the output's folder does not exist, ``path`` is a folder, or an existing file that is no
            HTML page.
    """
    if path.is_file() and path.stat().st_size and not _is_page(path):
        raise DataError(
            "the output exists and is not an HTML page; it is left alone",
            where=str(path),
            hint="name another file",
        )
    with atomic_file(path) as temporary:
        temporary.write_text(render_html(report), encoding="utf-8")


def _is_page(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(256).lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _section(section: Section) -> str:
    head = f"<h2>{escape(section.title)}</h2>\n"
    if isinstance(section, Facts):
        rows = [_row([name, value], text_columns=1) for name, value in section.items]
        return head + _table(rows)
    if isinstance(section, Histogram):
        return head + _table(_histogram_rows(section))
    note = f'\n<p class="note">{escape(section.note)}</p>' if section.note else ""
    if isinstance(section, Drawing):
        return f'{head}<div class="scroll"><pre>{escape(chr(10).join(section.lines))}</pre></div>{note}'
    header = _row(section.columns, text_columns=section.text_columns, tag="th")
    rows = [_row(row, text_columns=section.text_columns) for row in section.rows]
    return head + _table([header, *rows]) + note


def _histogram_rows(section: Histogram) -> list[str]:
    largest = max(section.counts, default=0)
    rows = []
    for label, count in zip(section.labels, section.counts, strict=True):
        width = f"{100 * count / largest:.1f}%" if largest else "0"
        bar = f'<td class="bar"><div style="width:{width}"></div></td>' if count else '<td class="bar"></td>'
        rows.append(f"<tr><td>{escape(label)}</td><td>{count:,}</td>{bar}</tr>")
    return rows


def _row(cells: list[str] | tuple[str, ...], *, text_columns: int, tag: str = "td") -> str:
    parts = [
        f'<{tag} class="text">{escape(cell)}</{tag}>'
        if i < text_columns
        else f"<{tag}>{escape(cell)}</{tag}>"
        for i, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(parts)}</tr>"


def _table(rows: list[str]) -> str:
    return '<div class="scroll"><table>\n' + "\n".join(rows) + "\n</table></div>"
