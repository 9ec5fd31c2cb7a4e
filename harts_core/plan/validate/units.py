"""Rules of units, slots, orders and windows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, NONE, PRODUCER, PlanBundle
from harts_core.plan.validate.failure import reject, require


def check_units(bundle: PlanBundle) -> None:
    """K is a multiple of D, slots are dense and the same on all replicas, orders and windows are sound."""
    u, dp = bundle.units, bundle.dp
    if not len(u):
        raise reject("the plan has no units", "units")
    require((u.replica >= 0) & (u.replica < dp), f"replica is not in [0, {dp})", lambda i: f"unit {i}")
    require(np.isin(u.kind, (PRODUCER, CONSUMER)), "kind is unknown", lambda i: f"unit {i}")
    consumer = u.kind == CONSUMER
    slot_fits = np.where(consumer, u.slot >= 0, u.slot == NONE)
    require(slot_fits, "consumers have a slot, producers have none", lambda i: f"unit {i}")
    require((u.window >= NONE) & (u.window < len(bundle.windows)), "no such window", lambda i: f"unit {i}")
    require(consumer | (u.window != NONE), "a producer has no window", lambda i: f"unit {i}")
    _check_slots(bundle)
    _check_orders(bundle)
    _check_windows(bundle)


def _check_slots(bundle: PlanBundle) -> None:
    u, dp = bundle.units, bundle.dp
    consumers = np.flatnonzero(u.kind == CONSUMER)
    if len(consumers) == 0 or len(consumers) % dp:
        raise reject(f"{len(consumers)} consumers are not a positive multiple of {dp} replicas", "units")
    num_slots = len(consumers) // dp
    require(
        u.slot[consumers] < num_slots,
        f"slots are not dense: {len(consumers)} consumers on {dp} replicas fill slots [0, {num_slots})",
        lambda i: f"unit {consumers[i]}, slot {u.slot[consumers[i]]}",
    )
    place = u.slot[consumers].astype(np.int64) * dp + u.replica[consumers]
    count = np.bincount(place, minlength=num_slots * dp)
    require(
        count == 1,
        "not exactly one consumer",
        lambda i: f"slot {i // dp}, replica {i % dp}",
    )


def _check_orders(bundle: PlanBundle) -> None:
    u = bundle.units
    for d in range(bundle.dp):
        mine = np.flatnonzero(u.replica == d)
        if not np.array_equal(np.sort(u.order[mine]), np.arange(len(mine))):
            raise reject(f"orders are not 0 … {len(mine) - 1}", f"replica {d}")
        in_order = mine[np.argsort(u.order[mine])]
        slots = u.slot[in_order][u.kind[in_order] == CONSUMER]
        if not np.array_equal(slots, np.arange(len(slots))):
            raise reject("consumers do not run in the order of their slots", f"replica {d}")


def _check_windows(bundle: PlanBundle) -> None:
    u, w = bundle.units, bundle.windows
    num_slots = int(u.slot.max()) + 1
    require(
        (w.slot_start >= 0) & (w.slot_start < w.slot_stop) & (w.slot_stop <= num_slots),
        f"not a run of the slots [0, {num_slots})",
        lambda i: f"window {i}",
    )
    for i in range(len(w)):
        a, b = w.slot_start, w.slot_stop
        crossing = ((a < a[i]) & (b > a[i]) & (b < b[i])) | ((a > a[i]) & (a < b[i]) & (b > b[i]))
        if crossing.any():
            raise reject("windows neither nest nor keep apart", f"windows {i}, {np.flatnonzero(crossing)[0]}")
    _check_innermost(bundle, num_slots)
    producers = np.flatnonzero(u.kind == PRODUCER)
    place = u.window[producers].astype(np.int64) * bundle.dp + u.replica[producers]
    count = np.bincount(place, minlength=len(w) * bundle.dp)
    require(
        count <= 1,
        "more than one producer",
        lambda i: f"window {i // bundle.dp}, replica {i % bundle.dp}",
    )
    _check_alive(bundle, producers, num_slots)


def _check_innermost(bundle: PlanBundle, num_slots: int) -> None:
    """A consumer names the innermost window that has its slot, or none where no window has it."""
    u, w = bundle.units, bundle.windows
    consumers = np.flatnonzero(u.kind == CONSUMER)
    slot, window = u.slot[consumers], u.window[consumers]
    narrowest = np.full(num_slots, num_slots + 1)
    for start, stop in zip(w.slot_start.tolist(), w.slot_stop.tolist(), strict=True):
        narrowest[start:stop] = np.minimum(narrowest[start:stop], stop - start)
    named = np.flatnonzero(window != NONE)
    ok = narrowest[slot] > num_slots  # no window has the slot, and none is named
    start, stop = w.slot_start[window[named]], w.slot_stop[window[named]]
    inside = (start <= slot[named]) & (slot[named] < stop)
    ok[named] = inside & (stop - start == narrowest[slot[named]])
    require(ok, "the window is not the innermost one that has the slot", lambda i: f"unit {consumers[i]}")


def _check_alive(bundle: PlanBundle, producers: npt.NDArray[np.int64], num_slots: int) -> None:
    u, w = bundle.units, bundle.windows
    limit = bundle.parameters.get("max_live_producers")
    if limit is None:
        return
    live = np.zeros((num_slots + 1, bundle.dp), np.int64)
    np.add.at(live, (w.slot_start[u.window[producers]], u.replica[producers]), 1)
    np.add.at(live, (w.slot_stop[u.window[producers]], u.replica[producers]), -1)
    live = np.cumsum(live, axis=0)
    if (live > limit).any():
        slot, replica = np.argwhere(live > limit)[0]
        raise reject(
            f"{live[slot, replica]} producers are alive, the limit is {limit}",
            f"slot {slot}, replica {replica}",
        )
