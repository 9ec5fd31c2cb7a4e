"""The time that numba spends compiling: seconds of silence on the first use of a machine, nothing after.

Kernels are cached on disk, so that a later run loads them; only real compilations are seen here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event


class CompileClock(event.Listener):  # type: ignore[misc]
    """Seconds spent compiling since it was started.

    Args:
        on_first: called when the first compilation begins.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._on_first: Callable[[], None] | None = on_first
        self._depth = 0  # a kernel that calls others compiles them within its own compilation
        self._start = 0.0

    def on_start(self, event: Any) -> None:
        """A compilation begins."""
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """A compilation ended."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._start


@contextmanager
def compile_clock(on_first: Callable[[], None]) -> Iterator[CompileClock]:
    """Watch numba within the block.

    Args:
        on_first: called when the first compilation begins.
    """
    clock = CompileClock(on_first)
    with event.install_listener("numba:compile", clock):
        yield clock
