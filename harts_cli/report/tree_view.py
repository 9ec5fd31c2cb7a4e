"""The report of a rollout tree."""

from __future__ import annotations

from harts_cli.report.sections import Facts, Report, Section, Table, histogram, number, percent
from harts_core.trees.statistics import TreeStatistics

NUM_GROUPS = 10


def tree_report(name: str, tree: TreeStatistics) -> Report:
    """Sections of a rollout tree's statistics; ``name`` is the file."""
    sections: list[Section] = [
        Facts(title="Rows", items=_row_facts(tree)),
        Facts(title="Sharing", items=_sharing_facts(tree)),
        Facts(title="Segments", items=_segment_facts(tree)),
        Table(
            title="Sharing by chunk length (states handed over at chunk boundaries only)",
            columns=("chunk", "forks on a boundary", "share", "trie tokens", "compression"),
            rows=tuple(
                (
                    number(c.chunk),
                    number(c.forks_on_boundary),
                    percent(c.fraction),
                    number(c.trie_tokens),
                    f"{c.compression:.3f}×",
                )
                for c in tree.chunks
            ),
        ),
        histogram("Length (tokens)", tree.length),
        histogram("Shared with the row before (tokens)", tree.lcp),
        histogram("Fork position (tokens)", tree.fork_position),
        _group_table(tree),
    ]
    return Report(title=f"Rollout tree {name}", sections=tuple(sections))


def _row_facts(tree: TreeStatistics) -> tuple[tuple[str, str], ...]:
    return (
        ("rows", number(tree.rows)),
        ("sampling", tree.sampling or "not stated"),
        ("distinct trajectories", number(tree.distinct_trajectories)),
        ("groups", number(tree.groups)),
        ("exact duplicates", number(tree.duplicates)),
        ("prefixes of another row", number(tree.prefix_rows)),
        ("trained positions", number(tree.trained_positions)),
        ("content", tree.content_sha256[:16]),
    )


def _sharing_facts(tree: TreeStatistics) -> tuple[tuple[str, str], ...]:
    return (
        ("tokens", number(tree.tokens)),
        ("trie tokens", number(tree.trie_tokens)),
        ("compression", f"{tree.compression:.3f}×"),
        ("trie tokens, groups apart", number(tree.group_trie_tokens)),
        ("compression, groups apart", f"{tree.group_compression:.3f}×"),
        ("prefix match rate", percent(tree.prefix_match_rate)),
        ("prefix match rate, groups apart", percent(tree.group_prefix_match_rate)),
    )


def _segment_facts(tree: TreeStatistics) -> tuple[tuple[str, str], ...]:
    return (
        ("segments", number(tree.segments)),
        ("roots", number(tree.roots)),
        ("forks", number(tree.forks)),
        ("largest fan-out", number(tree.max_fanout)),
        ("deepest path (segments)", number(tree.max_depth)),
    )


def _group_table(tree: TreeStatistics) -> Table:
    shown = tree.per_group[:NUM_GROUPS]
    rest = len(tree.per_group) - len(shown)
    return Table(
        title="Groups with most tokens",
        columns=("group", "rows", "tokens", "trie tokens", "compression"),
        rows=tuple(
            (g.group_id, number(g.rows), number(g.tokens), number(g.trie_tokens), f"{g.compression:.3f}×")
            for g in shown
        ),
        note=f"{rest:,} more groups; --json has all" if rest else "",
    )
