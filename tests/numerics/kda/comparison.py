"""Compares a backend with the token-by-token reference: outputs, states and every gradient, by name."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from harts_core.exec.kda import KdaBackend, KdaCall, kda_naive
from harts_core.exec.kda.call import state_dtype
from tests.numerics.kda.tree_runs import random_inputs

INPUT_NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def call_inputs(
    rng: np.random.Generator, call: KdaCall, *, H: int, K: int, V: int, dtype: torch.dtype, gate: float = 1.0
) -> list[Tensor]:
    """Random q, k, v, g, beta and initial states for a call; gates uniform in (-gate, 0]."""
    inputs = random_inputs(rng, call.num_tokens, H=H, K=K, V=V, dtype=torch.float64, gate=gate)
    inputs.append(torch.from_numpy(rng.standard_normal((call.num_sequences, H, K, V))))
    return [x.to(dtype) for x in inputs[:3]] + [x.to(state_dtype(dtype)) for x in inputs[3:]]


def values_and_gradients(backend: KdaBackend, inputs: list[Tensor], call: KdaCall) -> dict[str, Tensor]:
    """o, states and the gradient of every input, of a random weighting of all outputs and states."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, states = backend(*leaves[:5], call, leaves[5])
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in (o, states)]
    gradients = torch.autograd.grad((o, states), leaves, weights, materialize_grads=True)
    names = ["o", "states", *(f"d{name}" for name in INPUT_NAMES)]
    return dict(zip(names, (o.detach(), states.detach(), *gradients), strict=True))


def relative_errors(backend: KdaBackend, inputs: list[Tensor], call: KdaCall) -> dict[str, float]:
    """max |x − reference| / max |reference| of every value, the reference in float64 from the same inputs.

    The gate's gradient is compared relative to the terms that it is the difference of.
    """
    actual = values_and_gradients(backend, inputs, call)
    expected = values_and_gradients(kda_naive, [x.double() for x in inputs], call)
    errors = {}
    for name, reference in expected.items():
        if actual[name].shape != reference.shape:
            raise AssertionError(
                f"{name}: shape {tuple(actual[name].shape)}, expected {tuple(reference.shape)}"
            )
        difference = (
            (actual[name].double() - reference).abs().amax() if reference.numel() else torch.zeros(())
        )
        scale = reference.abs().amax() if reference.numel() else torch.ones(())
        if name == "dg" and reference.numel():
            # The gate's gradient is a difference of q·dq and k·dk, which cancel where the state hardly
            # survives: its rounding is relative to those terms, not to what is left of them.
            terms = (inputs[i].double() * expected[f"d{x}"] for i, x in enumerate("qk"))
            scale = torch.stack([scale, *(term.abs().amax() for term in terms)]).amax()
        errors[name] = float(difference / scale.clamp_min(1e-30))  # NaN stays NaN and fails every bound
    return errors
