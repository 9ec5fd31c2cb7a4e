"""harts ingest."""

from __future__ import annotations


def ingest() -> None:
    """Placeholder until the command lands."""
