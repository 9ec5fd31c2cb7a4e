"""harts train."""

from __future__ import annotations


def train() -> None:
    """Placeholder until the command lands."""
