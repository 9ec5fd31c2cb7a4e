"""One packed linear-attention call: which sequences it holds and which states it returns.

Shape legend of this package: N sequences, T packed tokens, H heads, K and V head dimensions,
M returned states, C chunks, B chunk length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Cached = TypeVar("Cached")


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaCall:
    """One packed call: N independent sequences laid end to end, each starting on the trajectory's chunk grid.

    A sequence is a path of the token tree. Its first token sits at a multiple of ``chunk`` in its trajectory
    (the tokens before the path's first computed token are replayed), so that chunk c of the sequence is a
    chunk of every trajectory that runs through it.

    Args:
        lengths: tokens of each sequence, at least 1 (replayed and computed ones).
        chunk: chunk length B, at least 1.
        boundaries: pairs (n, c): return the state after c full chunks of sequence n, 1 ≤ c ≤ lengths[n] // B.
        finals: sequences whose state after their last token is returned too, behind the boundary states.
            Only the no-replay comparison needs them: a state inside a chunk starts another chunk grid.
        gate_lower_bound: a bound that the caller promises for every log gate (the model's safe gate), or
            None. It only lets a backend choose a faster kernel; every backend is exact without it.

    Raises:
        ValueError: a length, boundary or index is out of range.
    """

    lengths: tuple[int, ...]
    chunk: int
    boundaries: tuple[tuple[int, int], ...] = ()
    finals: tuple[int, ...] = ()
    gate_lower_bound: float | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")
        for n, length in enumerate(self.lengths):
            if length < 1:
                raise ValueError(f"sequence {n} has length {length}; every sequence needs at least one token")
        for n, c in self.boundaries:
            if not (0 <= n < self.num_sequences and 1 <= c <= self.lengths[n] // self.chunk):
                raise ValueError(
                    f"boundary ({n}, {c}): the call has no such full chunk of {self.chunk} tokens"
                )
        for n in self.finals:
            if not 0 <= n < self.num_sequences:
                raise ValueError(
                    f"final state of sequence {n}, but the call has {self.num_sequences} sequences"
                )

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T, tokens of all sequences together."""
        return sum(self.lengths)

    @property
    def num_states(self) -> int:
        """M, states that the call returns."""
        return len(self.boundaries) + len(self.finals)

    def with_gate_bound(self, bound: float | None) -> KdaCall:
        """This call with a bound on its gates; made once, so that all layers share its index tensors."""
        if bound == self.gate_lower_bound:
            return self
        entry = ("gate_lower_bound", bound)
        if entry not in self._cache:
            self._cache[entry] = replace(self, gate_lower_bound=bound)
        return cast(KdaCall, self._cache[entry])

    def cached(self, key: str, device: torch.device, build: Callable[[], Cached]) -> Cached:
        """What ``build`` returns, built once per call and device: all layers of a unit reuse it."""
        entry = (key, device)
        if entry not in self._cache:
            self._cache[entry] = build()
        return cast(Cached, self._cache[entry])


class KdaBackend(Protocol):
    """One implementation of the packed gated delta rule.

    Per head, with the state S ∈ R^{K×V} of a sequence (MODEL.md):
    S ← diag(exp g_t) S; S ← S + β_t k_t (v_t − Sᵀ k_t)ᵀ; o_t = Sᵀ q_t.
    """

    def __call__(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        g_THK: Tensor,
        beta_TH: Tensor,
        call: KdaCall,
        initial_state_NHKV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence over every sequence of ``call``.

        Args:
            q_THK: queries, normalised and scaled by K^-½; float64, float32 or bfloat16.
            k_THK: normalised keys, dtype of q.
            v_THV: values, dtype of q.
            g_THK: log gate, ≤ 0, in the state dtype.
            beta_TH: update strength in (0, 1], in the state dtype.
            call: the sequences and the states to return.
            initial_state_NHKV: state of each sequence before its first token; None means zeros.

        Returns:
            o_THV in the dtype of v, and states_MHKV in the state dtype: the boundaries in their order, then
            the finals. Both differentiable with respect to every tensor argument.

        The state dtype is float64 for float64 inputs and float32 for all others.
        """
        ...


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, gates and β for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def prepare_state(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    call: KdaCall,
    initial_state_NHKV: Tensor | None,
) -> Tensor:
    """Check a backend's arguments and return the initial states, zeros where None was given.

    Raises:
        ValueError: a shape or dtype does not fit the call.
    """
    T, H, K = q_THK.shape
    V = v_THV.shape[-1]
    dtype = state_dtype(q_THK.dtype)
    if initial_state_NHKV is None:
        initial_state_NHKV = q_THK.new_zeros(call.num_sequences, H, K, V, dtype=dtype)
    if call.num_tokens != T:
        raise ValueError(f"the call holds {call.num_tokens} tokens, but q has {T}")
    expected = {
        "k": (k_THK, (T, H, K), q_THK.dtype),
        "v": (v_THV, (T, H, V), q_THK.dtype),
        "g": (g_THK, (T, H, K), dtype),
        "beta": (beta_TH, (T, H), dtype),
        "initial_state": (initial_state_NHKV, (call.num_sequences, H, K, V), dtype),
    }
    for name, (tensor, shape, kind) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != kind:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}, expected {shape} and {kind}"
            )
    return initial_state_NHKV
