"""Calls and the choice of a backend."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch

from harts_core.errors import ConfigError, ExecError, MissingBackendError
from harts_core.exec.kda import KDA_BACKENDS, KdaCall, get_kda_backend, kda_fla, kda_naive
from harts_core.exec.kda.chunk_layout import chunk_layout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": (4,), "chunk": 0}, "chunk must be at least 1"),
        ({"lengths": (4, 0), "chunk": 2}, "sequence 1 has length 0"),
        ({"lengths": (5,), "chunk": 2, "boundaries": ((0, 3),)}, "boundary (0, 3)"),
        ({"lengths": (5,), "chunk": 2, "boundaries": ((0, 0),)}, "boundary (0, 0)"),
        ({"lengths": (5,), "chunk": 2, "boundaries": ((1, 1),)}, "boundary (1, 1)"),
        ({"lengths": (5,), "chunk": 2, "finals": (-1,)}, "final state of sequence -1"),
    ],
)
def test_a_call_refuses_what_it_cannot_mean(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        KdaCall(**arguments)  # type: ignore[arg-type]


def test_layout_is_step_major_longest_first_and_built_once() -> None:
    call = KdaCall(lengths=(2, 7, 3), chunk=3, boundaries=((1, 2), (1, 1)), finals=(0,))
    layout = chunk_layout(call, torch.device("cpu"))
    assert chunk_layout(call, torch.device("cpu")) is layout
    assert (layout.width, layout.num_chunks, layout.step_sizes) == (4, 5, (3, 1, 1))
    assert layout.sequence_order.tolist() == [1, 0, 2]
    # sequence 1 owns chunks 0, 3, 4; sequence 0 chunk 1; sequence 2 chunk 2
    assert layout.token_slots.tolist() == [4, 5, 0, 1, 2, 12, 13, 14, 16, 8, 9, 10]
    # before chunk 4, before chunk 3, after the last chunk of rank 1
    assert layout.state_rows.tolist() == [4, 3, 5 + 1]


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state"])
def test_wrong_shapes_and_dtypes_are_named(name: str) -> None:
    call = KdaCall(lengths=(3,), chunk=2)
    tensors = {
        "q": torch.zeros(3, 2, 4),
        "k": torch.zeros(3, 2, 4),
        "v": torch.zeros(3, 2, 5),
        "g": torch.zeros(3, 2, 4),
        "beta": torch.zeros(3, 2),
        "initial_state": torch.zeros(1, 2, 4, 5),
    }
    for wrong in (tensors[name].double(), tensors[name][..., :1]):
        if name == "v" and wrong.dtype == torch.float32:
            continue  # V is read from v
        values = list({**tensors, name: wrong}.values())
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            kda_naive(*values[:5], call, values[5])
    with pytest.raises(ValueError, match="holds 3 tokens, but q has 2"):
        kda_naive(*(x[:2] for x in list(tensors.values())[:5]), call, None)


def test_backends_are_found_by_name() -> None:
    assert list(KDA_BACKENDS) == ["naive", "torch", "fla"]
    assert get_kda_backend("naive") is kda_naive
    with pytest.raises(ConfigError, match="Unknown KDA backend 'cuda'") as error:
        get_kda_backend("cuda")
    assert error.value.hint == "Choose one of: naive, torch, fla."


def test_fla_needs_its_packages_and_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    versions = {"flash-linear-attention": "0.6.0"}
    specs: list[str] = ["triton"]

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in specs else None)
    with pytest.raises(MissingBackendError, match="needs a CUDA device"):
        get_kda_backend("fla")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert get_kda_backend("fla") is kda_fla
    call = KdaCall(lengths=(3,), chunk=16)
    x, y = torch.zeros(3, 1, 4), torch.zeros(3, 1)
    with pytest.raises(ExecError, match="chunks of 32 or 64 tokens, got 16"):
        kda_fla(x, x, x, x, y, call, None)
    call = KdaCall(lengths=(3,), chunk=32)
    with pytest.raises(ExecError, match="got float64"):
        kda_fla(x.double(), x.double(), x.double(), x.double(), y.double(), call, None)
    versions["flash-linear-attention"] = "0.5.2"
    with pytest.raises(MissingBackendError, match=r"0\.6\.0 or newer, found 0\.5\.2"):
        get_kda_backend("fla")
    versions.clear()
    with pytest.raises(MissingBackendError, match="flash-linear-attention, which is not installed"):
        get_kda_backend("fla")
    specs.clear()
    with pytest.raises(MissingBackendError, match="triton, which is not installed"):
        get_kda_backend("fla")


def test_calls_of_one_bound_share_their_index_tensors() -> None:
    call = KdaCall(lengths=(5, 2), chunk=4, boundaries=((0, 1),))
    bounded = call.with_gate_bound(-5.0)
    assert (bounded.gate_lower_bound, bounded.lengths, bounded.boundaries) == (-5.0, (5, 2), ((0, 1),))
    assert call.with_gate_bound(-5.0) is bounded
    assert call.with_gate_bound(-4.0) is not bounded
    assert call.with_gate_bound(None) is call
    assert call.gate_lower_bound is None
