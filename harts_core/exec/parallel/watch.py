"""Which event every process of a job is in, and an end for jobs that lost one.

Each process writes its event to the job's store once a second. When a collective operation fails, the process
that notices reads what the others were doing and names the one that is furthest behind. A process that stays
in one event beyond the time limit ends itself, so that a hang outside of a collective ends the job too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from harts_core.errors import ExecError

GRACE_S = 15
"""The processes that wait for a hanging one give up first, and say which it is."""


class Watch:
    """Watches this process.

    Args:
        store: of the job, a connection of its own.
        rank, world_size: of this process.
        timeout_s: the limit on one event.
        end: called with a message when this process has exceeded it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s = timeout_s
        self._end = _exit if end is None else end
        self._number, self._event, self._since = 0, "the start", time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="harts-watch", daemon=True)

    def at(self, event: str) -> None:
        """This process goes on to another event."""
        self._number, self._event, self._since = self._number + 1, event, time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Watch during the block; a failed collective operation becomes an ExecError.

        Raises:
            ExecError: another process has died or hangs; the event of every process is named.
        """
        self._thread.start()
        try:
            yield self
        except RuntimeError as error:
            if not _is_lost_process(error):
                raise
            raise ExecError(
                f"another process died or did not answer within {self._timeout_s:g} s",
                where=f"rank {self._rank}, in {self._event}",
                hint=self._others(),
            ) from error
        finally:
            self._stop.set()

    def _run(self) -> None:
        written = -1
        while not self._stop.wait(1.0):
            if self._number != written:
                written = self._number
                self._write()
            waited = time.monotonic() - self._since
            if waited > self._timeout_s + GRACE_S:
                self._end(f"rank {self._rank} has been in {self._event} for {waited:.0f} s")

    def _write(self) -> None:
        try:
            self._store.set(f"event/{self._rank}", json.dumps([self._number, self._event]))
        except RuntimeError:  # the process that holds the store is gone: the collectives will tell
            self._stop.set()

    def _others(self) -> str:
        """What the other processes were doing, the one that is furthest behind first."""
        found: list[tuple[int, int, str]] = []
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            try:
                key = f"event/{rank}"
                known = self._store.check([key])
                number, event = json.loads(self._store.get(key)) if known else (0, "the start")
            except RuntimeError:
                return "rank 0, which holds the job's store, is gone; look at its output"
            found.append((number, rank, event))
        behind = "; ".join(f"rank {rank} was last in {event}" for _, rank, event in sorted(found)[:4])
        return f"{behind}; look at its output"


def _is_lost_process(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "connection"))


def _exit(message: str) -> None:
    """End at once: the main thread may hang in a call that cannot be interrupted."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(ExecError.exit_code)
