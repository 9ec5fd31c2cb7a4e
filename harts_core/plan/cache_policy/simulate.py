"""The policies: what is brought in, moved out and freed at each pass. Execution follows the same actions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from harts_core.plan.cache_policy.trace import CacheTrace

Eviction = Literal["farthest", "lru"]
NEVER = 2**62


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """What happened in a cache; execution measures the same on real tensors.

    Attributes:
        allocated_bytes: of all objects that were made, at their largest.
        peak_bytes: the most in fast memory during a pass.
        hit_bytes: read by passes that found them in fast memory.
        miss_bytes: read by passes that had to bring them in first.
        offloaded_bytes: moved out to the host.
        prefetched_bytes: brought in one pass before they are read.
        over_budget_bytes: the most by which what one pass needs at once exceeded the budget.
    """

    allocated_bytes: int = 0
    peak_bytes: int = 0
    hit_bytes: int = 0
    miss_bytes: int = 0
    offloaded_bytes: int = 0
    prefetched_bytes: int = 0
    over_budget_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the bytes read that were in fast memory."""
        read = self.hit_bytes + self.miss_bytes
        return self.hit_bytes / read if read else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassActions:
    """Object indices, in the order in which they are dealt with around one pass.

    Attributes:
        offload: moved out before the pass.
        fetch: brought in before it, because it reads them.
        prefetch: brought in before it, because the next pass reads them.
        create: made by it.
        widen: larger from it on.
        narrow: smaller after it.
        free: dropped after it.
    """

    offload: tuple[int, ...]
    fetch: tuple[int, ...]
    prefetch: tuple[int, ...]
    create: tuple[int, ...]
    widen: tuple[int, ...]
    narrow: tuple[int, ...]
    free: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRun:
    """A simulated cache.

    Attributes:
        actions, resident_bytes, host_bytes: of every pass; bytes are those during it.
        counters: sums and peaks.
    """

    actions: tuple[PassActions, ...]
    resident_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    counters: CacheCounters


@dataclass(slots=True, kw_only=True)
class _State:
    """Where everything is during the simulation, and how large."""

    trace: CacheTrace
    budget: int
    eviction: Eviction
    resident: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)
    used: int = 0
    host_bytes: int = 0
    done: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    counters: CacheCounters = field(default_factory=CacheCounters)

    def next_use(self, i: int) -> int:
        """The first pass not yet over that needs the object."""
        uses = self.trace.objects[i].uses
        return uses[self.done[i]] if self.done[i] < len(uses) else NEVER

    def next_size(self, i: int) -> int:
        """The object's size in that pass."""
        return self.trace.objects[i].sizes[self.done[i]]

    def total(self, objects: Iterable[int]) -> int:
        """Bytes of some objects."""
        return sum(self.size[i] for i in objects)

    def resize(self, i: int) -> None:
        """Give an object in fast memory its size in the next pass that needs it."""
        self.used += self.next_size(i) - self.size[i]
        self.size[i] = self.next_size(i)

    def last_use(self, i: int) -> int:
        """The last pass that used the object."""
        return self.trace.objects[i].uses[self.done[i] - 1]

    def _eviction_rank(self, i: int) -> tuple[int, int]:
        return (-self.next_use(i) if self.eviction == "farthest" else self.last_use(i)), i

    def bring_in(self, i: int) -> None:
        """Make or move the object into fast memory."""
        size = self.size[i]
        if i in self.host:
            self.host.remove(i)
            self.host_bytes -= size
        self.resident.add(i)
        self.used += size

    def make_room(self, incoming: int, keep: set[int]) -> list[int]:
        """Move objects out until the incoming bytes fit in the budget, or none may go."""
        if self.used + incoming <= self.budget:
            return []
        moved = []
        for i in sorted(self.resident - keep, key=self._eviction_rank):
            if self.used + incoming <= self.budget:
                break
            size = self.size[i]
            if not size:
                continue
            self.resident.remove(i)
            self.host.add(i)
            self.used -= size
            self.host_bytes += size
            self.counters.offloaded_bytes += size
            moved.append(i)
        return moved


def simulate(
    trace: CacheTrace,
    *,
    budget: int | None = None,
    eviction: Eviction = "farthest",
    release: bool = True,
) -> CacheRun:
    """Run a policy over the exact future.

    Args:
        trace: what is needed when.
        budget: bytes of fast memory; None: no limit. What one pass needs at once is there even if it is more.
        eviction: what goes first: ``farthest`` next use, or least recently used (``lru``).
        release: free an object after its last use; False: nothing is ever freed.
    """
    state = _State(trace=trace, budget=NEVER if budget is None else budget, eviction=eviction)
    state.done = [0] * len(trace.objects)
    state.size = [item.sizes[0] for item in trace.objects]
    needed: list[list[int]] = [[] for _ in range(len(trace.passes) + 1)]
    for i, item in enumerate(trace.objects):
        for use in item.uses:
            needed[use].append(i)
    actions, resident, host = [], [], []
    for t in range(len(trace.passes)):
        moved = _begin_pass(state, needed[t], needed[t + 1])
        resident.append(state.used)
        host.append(state.host_bytes)
        actions.append(_end_pass(state, moved, needed[t], release=release))
    return CacheRun(
        actions=tuple(actions),
        resident_bytes=tuple(resident),
        host_bytes=tuple(host),
        counters=state.counters,
    )


def _begin_pass(state: _State, now: list[int], soon: list[int]) -> PassActions:
    """Everything up to the end of a pass; what changes after it is still missing in the actions."""
    counters = state.counters
    create = [i for i in now if not state.done[i]]
    fetch = [i for i in now if i in state.host]
    read = [i for i in now if state.done[i]]
    widen = [i for i in read if state.next_size(i) > state.size[i]]
    growth = sum(state.next_size(i) - state.size[i] for i in widen)
    counters.hit_bytes += state.total(read) - state.total(fetch)
    counters.miss_bytes += state.total(fetch)
    counters.allocated_bytes += state.total(create) + growth
    offload = state.make_room(state.total(fetch) + state.total(create) + growth, set(now))
    for i in (*fetch, *create):
        state.bring_in(i)
    for i in widen:
        state.resize(i)
    prefetch = []
    for i in soon:
        if i not in state.host or i in offload:
            continue
        offload += state.make_room(state.size[i], {*now, *soon})
        if state.used + state.size[i] > state.budget:
            break
        state.bring_in(i)
        counters.prefetched_bytes += state.size[i]
        prefetch.append(i)
    counters.peak_bytes = max(counters.peak_bytes, state.used)
    counters.over_budget_bytes = max(counters.over_budget_bytes, state.used - state.budget)
    return PassActions(
        offload=tuple(offload),
        fetch=tuple(fetch),
        prefetch=tuple(prefetch),
        create=tuple(create),
        widen=tuple(widen),
        narrow=(),
        free=(),
    )


def _end_pass(state: _State, moved: PassActions, now: list[int], *, release: bool) -> PassActions:
    """Release after a pass what will not be read again, and what will be in a smaller form."""
    free, narrow = [], []
    for i in now:
        state.done[i] += 1
        if not release:
            continue
        if state.next_use(i) == NEVER:
            state.resident.remove(i)
            state.used -= state.size[i]
            free.append(i)
        elif state.next_size(i) < state.size[i]:
            state.resize(i)
            narrow.append(i)
    return replace(moved, narrow=tuple(narrow), free=tuple(free))
