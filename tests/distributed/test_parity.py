"""Training steps on several processes against the same step in one: loss, metrics and every gradient."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.cases import Case, Result, run_alone
from tests.distributed.launch import run_cases

TWO = {
    "dp2": Case(parallel={"dp": 2}),
    "dp2, four replicas, no sharing": Case(parallel={"dp": 2}, replicas=4, levels=0, recompute="none"),
    "tp2, dense": Case(parallel={"tp": 2}, model="dense"),
    "tp2 sp": Case(parallel={"tp": 2, "sp": True}),
    "dp2 ep2": Case(parallel={"dp": 2, "ep": 2}),
    "dp2 ep2, four replicas": Case(parallel={"dp": 2, "ep": 2}, replicas=4, levels=1, seed=1),
    "tp2 sp ep2": Case(parallel={"tp": 2, "sp": True, "ep": 2}),
    "tp2 sp ep2, allgather": Case(
        parallel={"tp": 2, "sp": True, "ep": 2, "moe_token_dispatcher": "allgather"}
    ),
    "dp2 ep2, allgather": Case(parallel={"dp": 2, "ep": 2, "moe_token_dispatcher": "allgather"}),
    "dp2 ep2, no recomputation, allgather": Case(
        parallel={"dp": 2, "ep": 2, "moe_token_dispatcher": "allgather"}, recompute="none", seed=1
    ),
    "dp2 ep2, no recomputation": Case(parallel={"dp": 2, "ep": 2}, recompute="none", seed=1),
    "pp2": Case(parallel={"pp": 2}),
    "tp2 sp ep2, bfloat16": Case(parallel={"tp": 2, "sp": True, "ep": 2}, dtype="bfloat16"),
    "pp2, bfloat16": Case(parallel={"pp": 2}, dtype="bfloat16"),
    "dp2 ep2, bfloat16": Case(parallel={"dp": 2, "ep": 2}, dtype="bfloat16"),
    "pp2, non-overlapping": Case(parallel={"pp": 2, "schedule": "non-overlapping"}, levels=1, seed=2),
    "pp2, backward-first, no sharing": Case(parallel={"pp": 2, "schedule": "backward-first"}, levels=0),
    "pp2, six slots": Case(parallel={"pp": 2}, slots=6, replicas=1),
    "pp2, six slots, lag 3, live producers": Case(
        parallel={"pp": 2, "schedule_lag": 3, "max_live_producers": 2}, slots=6, replicas=1, seed=2
    ),
    "pp2, six slots, non-overlapping": Case(
        parallel={"pp": 2, "schedule": "non-overlapping"}, slots=6, replicas=1, seed=3
    ),
    "pp2, six slots, backward-first": Case(
        parallel={"pp": 2, "schedule": "backward-first"}, slots=6, replicas=1, seed=4
    ),
    "pp2, dense": Case(parallel={"pp": 2}, model="dense", recompute="none"),
    "dp2, chain": Case(parallel={"dp": 2}, chain=True),
    "dp2 ep2, chain": Case(parallel={"dp": 2, "ep": 2}, chain=True, seed=3),
    "tp2 sp ep2, chain": Case(parallel={"tp": 2, "sp": True, "ep": 2}, chain=True),
    "pp2, chain": Case(parallel={"pp": 2}, chain=True),
    "dp2 ep2, float32": Case(parallel={"dp": 2, "ep": 2}, dtype="float32"),
}
AGAIN = {
    "pp2, units again": Case(parallel={"pp": 2}, slots=6, replicas=1, recompute="unit"),
    "pp2, non-overlapping, units again": Case(
        parallel={"pp": 2, "schedule": "non-overlapping"}, slots=6, replicas=1, recompute="unit"
    ),
    "pp2, backward-first, units again": Case(
        parallel={"pp": 2, "schedule": "backward-first"}, slots=6, replicas=1, recompute="unit+layer"
    ),
    "pp2, chain, units again": Case(parallel={"pp": 2}, chain=True, recompute="unit"),
    "dp2 ep2, units again": Case(parallel={"dp": 2, "ep": 2}, slots=4, recompute="unit", seed=1),
    "dp2 ep2, chain, units again": Case(parallel={"dp": 2, "ep": 2}, chain=True, recompute="unit", seed=3),
}
"""Whole units are recomputed."""
TWO |= AGAIN
"""By name; all run on two processes."""

FOUR = {
    "dp4": Case(parallel={"dp": 4}, replicas=4, levels=1),
    "dp2 tp2 sp": Case(parallel={"dp": 2, "tp": 2, "sp": True}),
    "dp2 tp2 sp ep4": Case(parallel={"dp": 2, "tp": 2, "sp": True, "ep": 4}),
    "pp2 dp2 ep2": Case(parallel={"pp": 2, "dp": 2, "ep": 2}),
    "dp2 tp2 sp ep4, allgather": Case(
        parallel={"dp": 2, "tp": 2, "sp": True, "ep": 4, "moe_token_dispatcher": "allgather"}
    ),
    "pp2 dp2 ep2, allgather": Case(parallel={"pp": 2, "dp": 2, "ep": 2, "moe_token_dispatcher": "allgather"}),
    "pp2 tp2 sp ep2": Case(parallel={"pp": 2, "tp": 2, "sp": True, "ep": 2}),
    "pp4": Case(parallel={"pp": 4}),
    "pp4, eight slots": Case(parallel={"pp": 4}, slots=8, replicas=1),
    "pp4, eight slots, backward-first": Case(
        parallel={"pp": 4, "schedule": "backward-first"}, slots=8, replicas=1, seed=1
    ),
    "pp2 dp2 ep2, four slots": Case(parallel={"pp": 2, "dp": 2, "ep": 2}, slots=4, seed=2),
    "pp2 dp2 ep2, units again": Case(parallel={"pp": 2, "dp": 2, "ep": 2}, slots=4, recompute="unit"),
    "pp2 tp2, dense": Case(parallel={"pp": 2, "tp": 2}, model="dense", dtype="float32"),
}
EIGHT = {
    "dp8": Case(parallel={"dp": 8}, replicas=8, levels=0),
    "dp4 tp2 sp": Case(parallel={"dp": 4, "tp": 2, "sp": True}, replicas=4, levels=1),
    "dp2 tp2 sp pp2 ep4": Case(parallel={"dp": 2, "tp": 2, "sp": True, "pp": 2, "ep": 4}),
    "dp2 tp2 sp pp2, float32": Case(parallel={"dp": 2, "tp": 2, "sp": True, "pp": 2}, dtype="float32"),
}

TOLERANCE = {"float64": (1e-10, 0.0), "float32": (1e-5, 1e-4)}
"""Relative to the largest element of a parameter's gradient; but one below the second number's share of the
global norm is no more than the rounding of larger sums."""


@functools.cache
def alone(case_key: str) -> Result:
    return run_alone(ALL[case_key])


ALL = TWO | FOUR | EIGHT


def check(name: str, found: Result) -> None:
    expected = alone(name)
    largest_error = np.abs(found.logprobs - expected.logprobs).max()
    if ALL[name].dtype == "bfloat16":  # sums in another order are rounded at 2^-8
        assert found.loss == pytest.approx(expected.loss, rel=2e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
        assert largest_error <= 5e-2
        return
    tolerance, floor = TOLERANCE[ALL[name].dtype]
    assert largest_error <= tolerance * np.abs(expected.logprobs).max()
    assert found.loss == pytest.approx(expected.loss, rel=tolerance)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
    assert found.metrics == pytest.approx(expected.metrics, rel=tolerance, abs=tolerance)
    if expected.expert_counts is None:
        assert found.expert_counts is None
    else:
        assert found.expert_counts is not None
        assert torch.equal(found.expert_counts, expected.expert_counts)
    assert found.gradients.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        largest = float(gradient.abs().max())
        assert largest > 0, key
        error = float((found.gradients[key] - gradient).abs().max())
        assert error <= tolerance * max(largest, floor * expected.grad_norm), (key, error, largest)


def check_all(cases: dict[str, Case], folder: Path) -> None:
    for name, found in zip(cases, run_cases(list(cases.values()), folder=folder), strict=True):
        check(name, found)


def test_two_processes(tmp_path: Path) -> None:
    check_all(TWO, tmp_path)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    check_all(FOUR, tmp_path)


@pytest.mark.slow
def test_eight_processes(tmp_path: Path) -> None:
    check_all(EIGHT, tmp_path)
