"""harts synth."""

from __future__ import annotations


def synth() -> None:
    """Placeholder until the command lands."""
