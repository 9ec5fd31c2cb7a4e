"""Policies by hand, and their actions replayed independently on random futures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.plan.cache_policy.simulate import CacheRun, simulate
from harts_core.plan.cache_policy.trace import CacheObject, CacheTrace
from harts_core.plan.schedule.units import Event


def trace_of(*objects: tuple[int, tuple[int, ...]]) -> CacheTrace:
    passes = max(uses[-1] for _, uses in objects) + 1
    return CacheTrace(
        passes=tuple(Event(kind="forward", unit=t) for t in range(passes)),
        objects=tuple(
            CacheObject(block=i, gradient=False, uses=uses, sizes=(size,) * len(uses))
            for i, (size, uses) in enumerate(objects)
        ),
    )


def test_just_in_time_and_no_release() -> None:
    trace = trace_of((4, (0, 1)), (2, (1, 3)), (3, (2, 3)))
    run = simulate(trace)
    assert run.resident_bytes == (4, 6, 5, 5)
    assert [a.free for a in run.actions] == [(), (0,), (), (1, 2)]
    assert simulate(trace, release=False).resident_bytes == (4, 6, 9, 9)
    assert run.counters.hit_bytes == 4 + 2 + 3
    assert run.counters.allocated_bytes == 9


def test_sizes_change_with_the_passes() -> None:
    """A sum is wide while it is added to; without release it stays as wide as it has been."""
    uses = (0, 2, 4, 6)
    item = CacheObject(block=0, gradient=True, uses=uses, sizes=(2, 4, 4, 2))
    trace = CacheTrace(passes=trace_of((1, (0, 6))).passes, objects=(item,))
    run = simulate(trace)
    assert run.resident_bytes == (2, 2, 4, 4, 4, 2, 2)
    assert [t for t, a in enumerate(run.actions) if a.widen] == [2]
    assert [t for t, a in enumerate(run.actions) if a.narrow] == [4]
    assert (run.counters.allocated_bytes, run.counters.hit_bytes) == (4, 2 + 4 + 2)
    assert simulate(trace, release=False).resident_bytes == (2, 2, 4, 4, 4, 4, 4)
    assert item.num_bytes == trace.total_bytes == 4


def test_farthest_next_use_goes_first_and_comes_back_early() -> None:
    """Object 0 is read at 5, object 1 at 2 and 4: LRU moves 0 too, then 1 for 0's sake; farthest only 0."""
    trace = trace_of((2, (0, 5)), (2, (1, 2, 4)), (2, (2, 3)))
    run = simulate(trace, budget=4)
    assert run.actions[2].offload == (0,)
    assert run.actions[4].prefetch == (0,)
    assert run.resident_bytes == (2, 4, 4, 4, 4, 2)
    assert run.host_bytes == (0, 0, 2, 2, 0, 0)
    c = run.counters
    assert (c.offloaded_bytes, c.prefetched_bytes, c.miss_bytes, c.over_budget_bytes) == (2, 2, 0, 0)


def test_lru_moves_what_is_needed_next() -> None:
    trace = trace_of((2, (0, 3)), (2, (1, 5)), (2, (2, 4)))
    lru, farthest = simulate(trace, budget=4, eviction="lru"), simulate(trace, budget=4)
    assert lru.actions[2].offload[0] == 0
    assert farthest.actions[2].offload == (1,)
    assert farthest.counters.offloaded_bytes < lru.counters.offloaded_bytes


def test_one_pass_may_need_more_than_the_budget() -> None:
    run = simulate(trace_of((3, (0, 2)), (3, (1, 2))), budget=4)
    assert run.resident_bytes[2] == 6
    assert run.counters.over_budget_bytes == 2
    assert run.counters.miss_bytes == 3


FUTURES = st.lists(
    st.dictionaries(st.integers(0, 12), st.integers(0, 9), min_size=1, max_size=5),  # pass to size in it
    min_size=1,
    max_size=10,
)


@settings(max_examples=200, deadline=None)
@given(FUTURES, st.integers(0, 40), st.sampled_from(["farthest", "lru"]))
def test_actions_replayed(future: list[dict[int, int]], budget: int, eviction: str) -> None:
    objects = [
        CacheObject(block=i, gradient=False, uses=tuple(sorted(f)), sizes=tuple(f[t] for t in sorted(f)))
        for i, f in enumerate(future)
    ]
    passes = trace_of(*((0, item.uses) for item in objects)).passes
    trace = CacheTrace(passes=passes, objects=tuple(objects))
    run = simulate(trace, budget=budget, eviction=eviction)  # type: ignore[arg-type]
    check_replay(trace, run, budget)
    free = simulate(trace)
    assert free.counters.offloaded_bytes == free.counters.miss_bytes == 0
    assert run.counters.peak_bytes <= free.counters.peak_bytes
    assert simulate(trace, budget=free.counters.peak_bytes).counters == free.counters


def check_replay(trace: CacheTrace, run: CacheRun, budget: int) -> None:
    size = [o.sizes[0] for o in trace.objects]
    fast: set[int] = set()
    host: set[int] = set()
    offloaded = missed = 0
    for t, act in enumerate(run.actions):
        need = {i for i, o in enumerate(trace.objects) if t in o.uses}
        offloaded += sum(size[i] for i in act.offload)
        missed += sum(size[i] for i in act.fetch)
        assert set(act.offload) <= fast - need
        fast, host = fast - set(act.offload), host | set(act.offload)
        arriving = {*act.fetch, *act.prefetch}
        assert arriving <= host
        fast, host = fast | arriving | set(act.create), host - arriving
        assert need <= fast
        in_pass = {i: o.sizes[o.uses.index(t)] for i, o in enumerate(trace.objects) if t in o.uses}
        assert set(act.widen) == {i for i in need if in_pass[i] > size[i]}
        for i in act.widen:
            size[i] = in_pass[i]
        assert all(trace.objects[i].uses[0] == t for i in act.create)
        used = sum(size[i] for i in fast)
        assert run.resident_bytes[t] == used
        assert run.host_bytes[t] == sum(size[i] for i in host)
        assert used <= max(budget, sum(size[i] for i in need))
        assert all(t + 1 in trace.objects[i].uses for i in act.prefetch)
        assert set(act.free) == {i for i in fast if trace.objects[i].uses[-1] == t}
        fast -= set(act.free)
        for i in act.narrow:
            assert i in need - set(act.free)
            size[i] = trace.objects[i].sizes[trace.objects[i].uses.index(t) + 1]
        for i in need - set(act.free):
            assert size[i] <= trace.objects[i].sizes[trace.objects[i].uses.index(t) + 1]
    assert not fast | host
    assert run.counters.offloaded_bytes == offloaded
    assert run.counters.miss_bytes == missed
    assert run.counters.peak_bytes == max(run.resident_bytes)


@pytest.mark.parametrize("seed", range(3))
def test_farthest_moves_no_more_than_lru_for_equal_sizes(seed: int) -> None:
    """Belady's rule, on futures where bringing in early does not disturb it."""
    rng = np.random.default_rng(seed)
    objects = [(1, tuple(sorted(rng.choice(40, 4, replace=False).tolist()))) for _ in range(12)]
    trace = trace_of(*objects)
    farthest, lru = simulate(trace, budget=5), simulate(trace, budget=5, eviction="lru")
    assert farthest.counters.offloaded_bytes <= lru.counters.offloaded_bytes
