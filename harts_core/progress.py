"""How long work reports its progress: one callable, given by the caller, ignored by default."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then by long work, from the working thread."""

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        """Report ``done`` of ``total`` units (None: unknown) in the named phase."""


def no_progress(phase: str, done: int, total: int | None) -> None:
    """Report nothing."""
