"""Reports on the terminal and as HTML."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from harts_cli.report.gates import missed_gates, parse_gates
from harts_cli.report.html import render_html, write_html
from harts_cli.report.sections import Drawing, Facts, Report, Table, histogram, number
from harts_cli.report.terminal import BAR_WIDTH, bar, print_report
from harts_core.distribution import describe
from harts_core.errors import ConfigError, DataError

REPORT = Report(
    title="Tree [bold]a<b>[/bold]",
    sections=(
        Facts(title="Facts", items=(("rows & all", "12"),)),
        Table(title="Groups", columns=("group", "rows"), rows=(("<script>x</script>", "3"),), note="2 more"),
        histogram("Length", describe(np.array([1, 1, 2, 9]))),
        histogram("Forks", describe(np.empty(0))),
        Drawing(title="Chart", lines=("a<b", "[bold]c"), note="letters"),
    ),
)


def on_terminal(report: Report) -> str:
    stream = io.StringIO()
    print_report(Console(file=stream, width=100), report)
    return stream.getvalue()


def test_the_terminal_shows_every_section_and_reads_no_markup() -> None:
    text = on_terminal(REPORT)
    for part in (
        "[bold]a<b>[/bold]",
        "rows & all",
        "<script>x</script>",
        "2 more",
        "Forks: none",
        "a<b\n[bold]c",
        "letters",
    ):
        assert part in text
    assert "Length: min 1 · median 1.5 · mean 3.25" in text


def test_bars_are_proportional_and_never_vanish() -> None:
    assert bar(10, 10) == "█" * BAR_WIDTH
    assert bar(5, 10) == "█" * (BAR_WIDTH // 2)
    assert len(bar(1, 10**6)) == 1
    assert bar(0, 10) == bar(0, 0) == ""


class _Page(HTMLParser):
    """Open tags, and anything that would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_escaped_and_self_contained() -> None:
    text = render_html(REPORT)
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.links == []
    assert "script" not in page.seen
    assert "&lt;script&gt;x&lt;/script&gt;" in text
    assert "url(" not in text
    assert "http" not in text
    assert text.count('<td class="bar"><div') == 3
    assert "<pre>a&lt;b\n[bold]c</pre>" in text
    assert render_html(REPORT) == text


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_html(tmp_path / "page.html", REPORT)
    assert (tmp_path / "page.html").read_text() == render_html(REPORT)
    with pytest.raises(DataError, match="folder does not exist"):
        write_html(tmp_path / "no" / "page.html", REPORT)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (0.123456, "0.1235"),
        (1234.6, "1,235"),
        (2000.0, "2,000"),
        (-3, "-3"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_gates() -> None:
    gates = parse_gates(["balance=0.95", "slots=4"])
    assert gates == [("balance", 0.95), ("slots", 4.0)]
    assert missed_gates(gates, {"balance": 0.95, "slots": 5}) == []
    assert missed_gates(gates, {"balance": 0.9, "slots": 3}) == [
        "balance is 0.9, under 0.95",
        "slots is 3, under 4",
    ]


@pytest.mark.parametrize("text", ["balance", "balance=", "=1", "balance=high", "balance=nan", "a=inf", ""])
def test_bad_gates(text: str) -> None:
    with pytest.raises(ConfigError, match="METRIC=VALUE"):
        parse_gates([text])


def test_unknown_metrics_list_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        missed_gates([("speed", 1.0)], {"slots": 1, "balance": 1})
    assert caught.value.hint == "one of balance, slots"
