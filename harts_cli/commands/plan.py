"""harts plan."""

from __future__ import annotations


def plan() -> None:
    """Placeholder until the command lands."""
