"""The parts of a report, independent of where it is shown. All texts are final: numbers are formatted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from harts_core.distribution import Distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Named values, one a line."""

    title: str
    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table; all columns but the first ``text_columns`` are numbers and right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    text_columns: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """A histogram: half-open bins by their bounds, and how many values each has."""

    title: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Lines of characters of one width."""

    title: str
    lines: tuple[str, ...]
    note: str = ""


Section = Facts | Table | Histogram | Drawing


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A titled list of sections."""

    title: str
    sections: tuple[Section, ...] = field(default_factory=tuple)


def number(value: float) -> str:
    """A number as text: integers with thousands separators, others with four significant digits."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f} %"


def histogram(title: str, values: Distribution) -> Histogram:
    """The histogram of a distribution, with its quantiles in the title."""
    if values.count == 0:
        return Histogram(title=f"{title}: none", labels=(), counts=())
    spread = " · ".join(
        f"{name} {number(value)}"
        for name, value in (
            ("min", values.minimum),
            ("median", values.median),
            ("mean", values.mean),
            ("p90", values.p90),
            ("max", values.maximum),
        )
    )
    edges = [number(e) for e in values.edges]
    single = all(b - a == 1 and a.is_integer() for a, b in itertools.pairwise(values.edges))
    labels = tuple(a if single else f"{a} – {b}" for a, b in itertools.pairwise(edges))
    return Histogram(title=f"{title}: {spread}", labels=labels, counts=values.counts)
