"""The chunkwise backend against the token-by-token reference: outputs, states, every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts_core.exec.kda import KdaCall, kda_chunkwise, kda_fla, kda_naive
from tests.numerics.kda.comparison import call_inputs, relative_errors, values_and_gradients

LENGTHS = (1, 2, 3, 63, 64, 65, 200)


def states_of(lengths: tuple[int, ...], chunk: int) -> tuple[tuple[int, int], ...]:
    """First, last and a repeated boundary of every sequence that has one, in a mixed order."""
    full = [(n, length // chunk) for n, length in enumerate(lengths) if length >= chunk]
    return tuple((n, 1) for n, _ in reversed(full)) + tuple(full) + tuple(full[:1])


@pytest.mark.parametrize("gate", [0.1, 5.0])
@pytest.mark.parametrize("chunk", [1, 3, 16, 32, 64])
def test_float64_equals_the_recurrence(chunk: int, gate: float) -> None:
    call = KdaCall(lengths=LENGTHS, chunk=chunk, boundaries=states_of(LENGTHS, chunk), finals=(0, 5))
    inputs = call_inputs(np.random.default_rng(chunk), call, H=2, K=6, V=5, dtype=torch.float64, gate=gate)
    errors = relative_errors(kda_chunkwise, inputs, call)
    assert max(errors.values()) < 1e-13, errors


@pytest.mark.parametrize("chunk", [3, 64])
def test_float32_is_close_to_the_recurrence_in_float64(chunk: int) -> None:
    lengths = (1000, 65)
    call = KdaCall(lengths=lengths, chunk=chunk, boundaries=states_of(lengths, chunk), finals=(1,))
    inputs = call_inputs(np.random.default_rng(0), call, H=2, K=16, V=16, dtype=torch.float32, gate=0.5)
    errors = relative_errors(kda_chunkwise, inputs, call)
    assert max(errors.values()) < 3e-6, errors


def test_bfloat16_keeps_float32_states() -> None:
    call = KdaCall(lengths=(70, 130), chunk=64, boundaries=((1, 2), (0, 1)))
    inputs = call_inputs(np.random.default_rng(0), call, H=2, K=16, V=16, dtype=torch.bfloat16)
    values = values_and_gradients(kda_chunkwise, inputs, call)
    assert values["o"].dtype == values["dq"].dtype == torch.bfloat16
    assert values["states"].dtype == values["dg"].dtype == torch.float32
    errors = relative_errors(kda_chunkwise, inputs, call)
    # states are computed in float32 from the rounded inputs; the weighting of o and the results are bfloat16
    assert errors["states"] < 1e-6
    assert max(errors.values()) < 1e-2, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("floor", [-50.0, -1e4, -1e30, -torch.inf])
def test_unbounded_gates_neither_overflow_nor_lose_digits(floor: float, dtype: torch.dtype) -> None:
    """Channels that are wiped out beside channels, and tokens, that keep everything."""
    rng = np.random.default_rng(0)
    call = KdaCall(lengths=(130, 20), chunk=64, boundaries=((0, 1), (0, 2)), finals=(1,))
    inputs = call_inputs(rng, call, H=2, K=8, V=8, dtype=dtype, gate=0.2)
    wiped = torch.from_numpy(rng.random(inputs[3].shape) < 0.2)
    inputs[3] = torch.where(wiped, torch.tensor(floor, dtype=dtype), inputs[3])
    for name, value in values_and_gradients(kda_chunkwise, inputs, call).items():
        assert value.isfinite().all(), name
    errors = relative_errors(kda_chunkwise, inputs, call)
    assert max(errors.values()) < (1e-13 if dtype == torch.float64 else 3e-6), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_keys_with_full_update_strength(dtype: torch.dtype) -> None:
    """No decay, β = 1, one key: the system's Neumann series has binomial-sized terms."""
    call = KdaCall(lengths=(192,), chunk=64, boundaries=((0, 2),), finals=(0,))
    inputs = call_inputs(np.random.default_rng(0), call, H=1, K=8, V=4, dtype=dtype)
    inputs[1] = inputs[1][:1].expand_as(inputs[1])
    inputs[3], inputs[4] = torch.zeros_like(inputs[3]), torch.ones_like(inputs[4])
    errors = relative_errors(kda_chunkwise, inputs, call)
    assert max(errors.values()) < (1e-12 if dtype == torch.float64 else 1e-5), errors


def test_many_tiny_sequences() -> None:
    lengths = tuple(np.random.default_rng(3).integers(1, 6, 120).tolist())
    call = KdaCall(lengths=lengths, chunk=4, boundaries=states_of(lengths, 4), finals=tuple(range(0, 120, 7)))
    inputs = call_inputs(np.random.default_rng(4), call, H=2, K=4, V=3, dtype=torch.float64)
    errors = relative_errors(kda_chunkwise, inputs, call)
    assert max(errors.values()) < 1e-13, errors


def test_packed_sequences_do_not_see_each_other() -> None:
    """Values and gradients of each sequence are the bits of its own call, whatever the others hold (NaN)."""
    call = KdaCall(lengths=(65, 30, 64, 3), chunk=32, boundaries=((0, 2), (2, 1)), finals=(3,))
    inputs = call_inputs(np.random.default_rng(0), call, H=2, K=16, V=16, dtype=torch.float32)
    clean = values_and_gradients(kda_chunkwise, inputs, call)
    poisoned = [x.clone() for x in inputs]
    for x in poisoned[:5]:
        x[65:95] = torch.nan
    poisoned[5][1] = torch.nan
    seen = values_and_gradients(kda_chunkwise, poisoned, call)
    keep = torch.ones(call.num_tokens, dtype=torch.bool)
    keep[65:95] = False
    assert seen["o"][65:95].isnan().all()
    for name, value in clean.items():
        if name == "dinitial_state":
            assert torch.equal(seen[name][[0, 2, 3]], value[[0, 2, 3]]), name
        elif name == "states":
            assert torch.equal(seen[name], value)
        else:
            assert torch.equal(seen[name][keep], value[keep]), name


@pytest.mark.parametrize("backend", [kda_chunkwise, kda_naive, kda_fla])
def test_an_empty_call_runs_forward_and_backward(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harts_core.exec.kda.fla.require_fla", lambda: None)  # launches nothing
    call = KdaCall(lengths=(), chunk=64)
    inputs = call_inputs(np.random.default_rng(0), call, H=2, K=4, V=3, dtype=torch.float32)
    values = values_and_gradients(backend, inputs, call)
    assert values["o"].shape == (0, 2, 3)
    assert values["states"].shape == (0, 2, 4, 3)
    assert [values[f"d{name}"].shape for name in ("q", "v", "initial_state")] == [
        (0, 2, 4),
        (0, 2, 3),
        (0, 2, 4, 3),
    ]
    leaves = [x.requires_grad_() for x in inputs]
    o, states = backend(*leaves[:5], call, leaves[5])
    (o.sum() + states.sum()).backward()
    assert all(x.grad is not None for x in leaves)


@pytest.mark.parametrize("backend", [kda_chunkwise, kda_naive])
def test_no_initial_state_means_zeros(backend) -> None:
    call = KdaCall(lengths=(40, 7), chunk=16, boundaries=((0, 2),))
    inputs = call_inputs(np.random.default_rng(0), call, H=2, K=4, V=3, dtype=torch.float64)
    o, states = backend(*inputs[:5], call, None)
    o_zeros, states_zeros = backend(*inputs[:5], call, torch.zeros_like(inputs[5]))
    assert torch.equal(o, o_zeros)
    assert torch.equal(states, states_zeros)


def test_a_sequence_cut_at_a_boundary_continues_exactly() -> None:
    """Two calls joined by a boundary state: the bits of one call, gradients flow through the state."""
    whole = KdaCall(lengths=(100,), chunk=16)
    inputs = call_inputs(np.random.default_rng(0), whole, H=2, K=8, V=8, dtype=torch.float32)
    expected = values_and_gradients(kda_chunkwise, inputs, whole)

    def in_two_calls(q, k, v, g, beta, call, initial):
        head = KdaCall(lengths=(48,), chunk=16, boundaries=((0, 3),))
        tail = KdaCall(lengths=(52,), chunk=16)
        parts = [x.split([48, 52]) for x in (q, k, v, g, beta)]
        o_head, states = kda_chunkwise(*(p[0] for p in parts), head, initial)
        o_tail, _ = kda_chunkwise(*(p[1] for p in parts), tail, states)
        return torch.cat([o_head, o_tail]), states[:0]

    actual = values_and_gradients(in_two_calls, inputs, whole)
    assert torch.equal(actual["o"], expected["o"])
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5, msg=name)
