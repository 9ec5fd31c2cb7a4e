"""Every metric of the manifest, computed anew from the tables and the tree."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.validate.failure import reject
from harts_core.trees.rollout_tree import RolloutTree

TOLERANCE = 1e-12
"""Relative, for the metrics that are not integers."""


def check_metrics(bundle: PlanBundle, tree: RolloutTree) -> None:
    """The manifest holds exactly the metrics of DESIGN §5, each equal to its definition."""
    expected = _token_metrics(bundle) | _bounds(bundle, tree) | _call_metrics(bundle)
    missing = sorted(set(expected) ^ set(bundle.metrics))
    if missing:
        raise reject("a metric is missing or unknown", f"metrics.{missing[0]}")
    for name, value in sorted(expected.items()):
        stated = bundle.metrics[name]
        if isinstance(value, int):
            equal = type(stated) is int and stated == value
        else:
            equal = isinstance(stated, float) and math.isclose(stated, value, rel_tol=TOLERANCE)
        if not equal:
            raise reject(f"{name} is {stated!r}, computed anew it is {value!r}", f"metrics.{name}")


def _token_metrics(bundle: PlanBundle) -> dict[str, int | float]:
    u, dp = bundle.units, bundle.dp
    original = int((bundle.assignments.stop - bundle.assignments.start).sum(dtype=np.int64))
    slots: dict[int, list[int]] = {}
    windows: dict[int, list[int]] = {}
    replicas = [0] * dp
    residual = producer = complete = 0
    for i in range(bundle.num_units):
        tokens = int(u.computed_tokens[i])
        replicas[u.replica[i]] += tokens
        if u.kind[i] == CONSUMER:
            slots.setdefault(int(u.slot[i]), []).append(tokens)
            residual += tokens
            complete += int(u.complete_tokens[i])
        else:
            windows.setdefault(int(u.window[i]), []).append(tokens)
            producer += tokens
    paid = dp * (sum(map(max, slots.values())) + sum(map(max, windows.values())))
    balance = (residual + producer) / paid
    decoder = original / (residual + producer)
    per_slot = sorted(sum(t) / (dp * max(t)) if max(t) else 1.0 for t in slots.values())
    at = 0.05 * (len(per_slot) - 1)  # the 5th percentile, interpolated between its neighbours
    low, high = per_slot[math.floor(at)], per_slot[math.ceil(at)]
    return {
        "original_tokens": original,
        "complete_tokens": complete,
        "residual_tokens": residual,
        "producer_tokens": producer,
        "within_compression": original / complete,
        "decoder_compression": decoder,
        "balance": balance,
        "effective_compression": decoder * balance,
        "slot_balance_p5": low + (high - low) * (at - math.floor(at)),
        "step_balance": sum(replicas) / (dp * max(replicas)),
        "num_consumers": sum(map(len, slots.values())),
        "num_slots": len(slots),
        "num_windows": len(bundle.windows),
    }


def _call_metrics(bundle: PlanBundle) -> dict[str, int | float]:
    q = bundle.sequences
    calls = np.unique(np.stack([q.unit, q.round]), axis=1).shape[1]
    head = bundle.span_offsets[q.unit] + q.spans.values[q.spans.offsets[:-1]]
    replay = bundle.spans.start[head].astype(np.int64) - q.replay_start
    return {"num_rounds": int(calls), "replay_tokens": int(replay.sum())}


def _bounds(bundle: PlanBundle, tree: RolloutTree) -> dict[str, int | float]:
    """C(all) of the kept rows and both bounds, by their definitions in harts_core.plan.bounds."""
    kept = np.zeros(tree.num_rows, np.bool_)
    kept[bundle.assignments.row] = True
    length, lcp = _keep(tree.length, tree.lcp, kept)
    original = int(length.sum())
    trie = int((length - lcp).sum())
    ranked = np.sort(lcp[1:])
    capacity, dp = int(bundle.parameters["capacity"]), bundle.dp
    whole = trie + int(ranked[: dp - 1].sum())
    if "token_wise_from_slot" in bundle.parameters:  # the capacity does not bound complete layouts
        return {"trie_tokens": trie, "bound_within": original / whole, "bound_decoder": original / whole}
    nested = int(_nested_tokens(length, lcp, capacity))
    num_consumers = dp * max(1, math.ceil(nested / (capacity * dp)))
    within = max(nested, trie + int(ranked[: num_consumers - 1].sum()))
    return {
        "trie_tokens": trie,
        "bound_within": original / within,
        "bound_decoder": original / whole,
    }


@numba.njit(cache=True)
def _keep(length: Any, lcp: Any, kept: Any) -> Any:
    """(length, lcp) of the kept rows: int64, lcp against the kept row before."""
    n = kept.sum()
    out_length = np.empty(n, np.int64)
    out_lcp = np.zeros(n, np.int64)
    m = 0
    shared = 0
    for i in range(len(length)):
        shared = min(shared, lcp[i])
        if kept[i]:
            out_length[m], out_lcp[m] = length[i], shared
            m += 1
            shared = length[i]
    return out_length, out_lcp


@numba.njit(cache=True)
def _nested_tokens(length: Any, lcp: Any, capacity: int) -> Any:
    """The least tokens within the capacity, from a stack of the open path's cuts.

    A cut at depth d carries the tokens ``below`` it and the consumers that hold the path down to it. Cuts at
    places without a fork change nothing: the longer room above is used up by the same copies.
    """
    n = len(length)
    depth = np.zeros(n + 2, np.int64)
    below = np.zeros(n + 2, np.int64)
    copies = np.ones(n + 2, np.int64)
    top = 0  # entry 0 is the root, at depth 0
    for i in range(n + 1):
        shared = lcp[i] if i < n else 0
        while depth[top] > shared:
            if below[top] > 0:
                room = capacity - depth[top]
                copies[top] = max(copies[top], -(-below[top] // room))
            cut = max(depth[top - 1], shared)
            tokens = (depth[top] - cut) * copies[top] + below[top]
            if depth[top - 1] >= shared:
                below[top - 1] += tokens
                copies[top - 1] = max(copies[top - 1], copies[top])
                top -= 1
            else:
                depth[top], below[top] = shared, tokens
        if i < n and length[i] > shared:
            top += 1
            depth[top], below[top], copies[top] = length[i], 0, 1
    return below[0]
