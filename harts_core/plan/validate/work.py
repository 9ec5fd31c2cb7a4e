"""Rules of token counts, capacities and costs: computed anew from the spans."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.validate.failure import require

COST_TOLERANCE = 1e-12
"""Relative: costs are sums of exact integers times a coefficient, in any order of the additions."""


def check_work(bundle: PlanBundle) -> None:
    """Complete, computed and padded tokens and both costs of every unit; limits of tokens.

    C ≤ T for consumers; from slot ``token_wise_from_slot`` on (plans that split trajectories) their computed
    tokens ≤ T instead; producers compute at most theirs.
    """
    u, s, p = bundle.units, bundle.spans, bundle.parameters
    n = bundle.num_units
    stop = s.stop.astype(np.int64)
    tokens = stop - s.start
    own = s.owner == s.unit
    # Sums of integers as differences of running totals: exact.
    total = np.concatenate([[0], np.cumsum(tokens)])
    complete = total[bundle.span_offsets[1:]] - total[bundle.span_offsets[:-1]]
    total = np.concatenate([[0], np.cumsum(tokens * own)])
    computed = total[bundle.span_offsets[1:]] - total[bundle.span_offsets[:-1]]

    def check(name: str, expected: npt.NDArray[np.int64]) -> None:
        value = getattr(u, name)
        require(
            value == expected,
            f"{name} is wrong",
            lambda i: f"unit {i}: {value[i]}, its spans hold {expected[i]}",
        )

    check("complete_tokens", complete)
    check("computed_tokens", computed)
    pad = p["pad"]
    padded = computed + (-computed) % pad
    check("padded_tokens", padded)
    capacity = p["capacity"]
    consumer = u.kind == CONSUMER
    token_wise = consumer & (u.slot >= p.get("token_wise_from_slot", np.inf))
    bounded = np.where(token_wise, computed, complete)
    require(
        ~consumer | (bounded <= capacity),
        f"more than the capacity of {capacity} tokens",
        lambda i: f"unit {i}: {bounded[i]} tokens",
    )
    limit = p.get("producer_capacity", capacity)
    require(
        consumer | (computed <= limit),
        f"more than the producer capacity of {limit} tokens",
        lambda i: f"unit {i}: {computed[i]} tokens",
    )
    # Causal pairs of positions [start, stop): Σ (t + 1); pairs of a block-wise backward: each new token
    # against every key up to the span's end.
    causal = (stop * (stop + 1) - s.start.astype(np.int64) * (s.start + np.int64(1))) // 2
    pairs = np.bincount(s.unit[own], causal[own].astype(np.float64), n)
    blocks = np.bincount(s.unit[own], (tokens * stop)[own].astype(np.float64), n)
    c = bundle.cost_model
    forward = c["alpha_forward"] * padded + c["beta_forward"] * pairs
    backward = c["alpha_backward"] * padded + c["beta_backward"] * blocks
    _check_cost("cost_forward", u.cost_forward, forward)
    _check_cost("cost_backward", u.cost_backward, backward)


def _check_cost(name: str, value: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> None:
    require(
        np.isclose(value, expected, rtol=COST_TOLERANCE, atol=0),
        f"{name} does not follow from the cost model",
        lambda i: f"unit {i}: {value[i]}, computed {expected[i]}",
    )
