"""Random calls: every backend that runs in float64 agrees with the recurrence."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harts_core.exec.kda import KdaCall, kda_chunkwise, kda_naive
from tests.numerics.kda.comparison import call_inputs, relative_errors


@st.composite
def calls(draw: st.DrawFn) -> KdaCall:
    chunk = draw(st.integers(1, 9))
    lengths = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=6)))
    full = [(n, c) for n, length in enumerate(lengths) for c in range(1, length // chunk + 1)]
    boundaries = draw(st.lists(st.sampled_from(full), max_size=5)) if full else []
    finals = draw(st.lists(st.sampled_from(range(len(lengths))), max_size=3))
    return KdaCall(lengths=lengths, chunk=chunk, boundaries=tuple(boundaries), finals=tuple(finals))


@settings(max_examples=60, deadline=None)
@example(call=KdaCall(lengths=(1,), chunk=2, finals=(0,)), seed=1, gate=200.0)  # dg cancels to 1e-11
@given(call=calls(), seed=st.integers(0, 2**16), gate=st.sampled_from([0.0, 0.5, 8.0, 200.0]))
def test_values_states_and_gradients(call: KdaCall, seed: int, gate: float) -> None:
    inputs = call_inputs(np.random.default_rng(seed), call, H=2, K=3, V=4, dtype=torch.float64, gate=gate)
    errors = relative_errors(kda_chunkwise, inputs, call)
    assert max(errors.values()) < 1e-11, errors


def test_gradients_that_arrive_at_states_only() -> None:
    """What a producer sees: its outputs may be unused, its states and earlier states are not."""
    call = KdaCall(lengths=(20, 9), chunk=4, boundaries=((0, 5), (0, 2), (1, 1)))
    inputs = call_inputs(np.random.default_rng(0), call, H=2, K=3, V=4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    gradients = []
    for backend in (kda_naive, kda_chunkwise):
        _, states = backend(*leaves[:5], call, leaves[5])
        weight = torch.linspace(-1, 1, states.numel(), dtype=torch.float64).view(states.shape)
        gradients.append(torch.autograd.grad(states, leaves, weight, materialize_grads=True))
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    assert not gradients[1][0].any()  # queries do not reach states
    assert not gradients[1][1][24:].any()  # nor do tokens after the last returned state
