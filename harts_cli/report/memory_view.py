"""The report of a plan's cache: policies side by side, and each one's use of memory over the passes."""

from __future__ import annotations

import itertools

from harts_cli.report.sections import Drawing, Facts, Report, Section, Table, number, percent
from harts_core.plan.cache_policy.report import MemoryReport, PolicyReport

WIDTH = 78
HEIGHT = 4
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def memory_sections(name: str, report: MemoryReport) -> Report:
    """Sections of a plan's cache; ``name`` is the bundle."""
    most = max((max(p.timeline, default=0) for p in report.policies), default=0)
    sections: list[Section] = [
        Facts(
            title="Cache",
            items=(
                ("planner", report.planner),
                ("sizes in", report.unit),
                ("passes", "forward only" if report.forward_only else "forward and backward"),
                ("computed again", report.recompute),
                ("most tokens with activations", number(report.activation_tokens)),
                ("tokens imported", number(report.imported_tokens)),
                ("different tokens", number(report.cached_tokens)),
                ("peak saved by release after the last use", percent(report.release_saving)),
            ),
        ),
        _sizes(report),
        _budgets(report),
    ]
    sections += [_plot(report, policy, most) for policy in report.policies]
    return Report(title=f"Memory of {name}", sections=tuple(sections))


def policy_name(policy: PolicyReport) -> str:
    """For example "adaptive", "adaptive, no-release" or "16 tokens"."""
    size = "adaptive"
    if policy.block_tokens is not None:
        size = "1 token" if policy.block_tokens == 1 else f"{policy.block_tokens} tokens"
    return size if policy.policy == "just-in-time" else f"{size}, {policy.policy}"


def amount(value: float, unit: str) -> str:
    """A size as text: tokens in full, bytes with a binary prefix."""
    if unit == "tokens":
        return number(round(value))
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {prefix}"
        value /= 1024
    return f"{value:.4g} TiB"


def _sizes(report: MemoryReport) -> Table:
    return Table(
        title="Blocks, freed after their last use",
        columns=("blocks", "peak", "allocated", "hit rate", "wasted", "copied", "recomputed"),
        rows=tuple(
            (
                policy_name(p),
                amount(p.peak, report.unit),
                amount(p.allocated, report.unit),
                percent(p.hit_rate),
                percent(p.fragmentation),
                number(p.copied_tokens),
                number(p.recomputed_tokens),
            )
            for p in report.policies
            if p.budget is None
        ),
        note="peak: of the worst replica; copied, recomputed: tokens, either of them",
    )


def _budgets(report: MemoryReport) -> Table:
    limited = [p for p in report.policies if p.budget is not None]
    return Table(
        title="Adaptive blocks under a budget",
        columns=("first to the host", "budget", "peak", "over it", "offloaded", "in time"),
        rows=tuple(
            (
                p.policy,
                amount(p.budget or 0, report.unit),
                amount(p.peak, report.unit),
                amount(p.over_budget, report.unit),
                amount(p.offloaded, report.unit),
                percent(p.in_time_rate),
            )
            for p in limited
        ),
        note="over it: the most that one pass needs at once beyond the budget",
    )


def _plot(report: MemoryReport, policy: PolicyReport, most: int) -> Drawing:
    return Drawing(
        title=f"{policy_name(policy)}: peak {amount(max(policy.timeline, default=0), report.unit)}, "
        f"mean {amount(policy.mean, report.unit)}",
        lines=plot_lines(policy.timeline, most),
        note=f"replica {report.replica}, passes {report.passes[0]} to {report.passes[-1]}, "
        f"full height {amount(most, report.unit)}"
        if report.passes
        else "",
    )


def plot_lines(
    values: tuple[int, ...], most: int, *, width: int = WIDTH, height: int = HEIGHT
) -> tuple[str, ...]:
    """An area chart in block characters, the top line first.

    Args:
        values: one per pass; where there are more than ``width``, a column shows the largest of its passes.
        most: the value that fills the height; any positive value shows.
        width, height: columns and lines at most.
    """
    columns = min(width, len(values))
    bounds = [len(values) * c // columns for c in range(columns + 1)] if columns else [0]
    tops = [max(values[a:b]) for a, b in itertools.pairwise(bounds)]
    full = 8 * height
    eighths = [max(round(full * top / most), 1) if top else 0 for top in tops]
    return tuple(
        "".join(_EIGHTHS[min(8, max(0, e - 8 * line))] for e in eighths) for line in reversed(range(height))
    )
