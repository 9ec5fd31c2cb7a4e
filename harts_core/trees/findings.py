"""What ingest dropped and what it warns about: counts by reason, with the first place each was seen."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Finding:
    """One reason: how often, and where first."""

    count: int = 0
    first: str = ""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Counts by reason, in order of first appearance.

    Attributes:
        dropped: rows (or positions, where the reason says so) left out of the tree.
        warnings: things kept as they are that the user should know.
    """

    dropped: dict[str, Finding] = field(default_factory=dict)
    warnings: dict[str, Finding] = field(default_factory=dict)

    def drop(self, reason: str, where: str, count: int = 1) -> None:
        """Count something left out."""
        _count(self.dropped, reason, where, count)

    def warn(self, reason: str, where: str, count: int = 1) -> None:
        """Count something kept but doubtful."""
        _count(self.warnings, reason, where, count)


def _count(table: dict[str, Finding], reason: str, where: str, count: int) -> None:
    finding = table.setdefault(reason, Finding(first=where))
    finding.count += count
