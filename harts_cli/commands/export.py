"""harts export."""

from __future__ import annotations


def export() -> None:
    """Placeholder until the command lands."""
