"""A process of its own: the fla backend in Triton's interpreter against the reference; prints JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from tests.triton_interpreter import enable

enable()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from harts_core.exec.kda import KdaBackend, KdaCall, get_kda_backend  # noqa: E402
from harts_core.exec.layout import build_unit_layout  # noqa: E402
from harts_core.exec.model.config import PRESETS  # noqa: E402
from harts_core.exec.unit import unit_hidden  # noqa: E402
from tests.numerics.kda.comparison import call_inputs, relative_errors  # noqa: E402
from tests.numerics.kda.tree_runs import (  # noqa: E402
    random_inputs,
    random_tree,
    run_compact,
    run_expanded,
    split_into_paths,
)
from tests.support import random_sequences, tree_from_sequences  # noqa: E402
from tests.support_model import lively_model, simple_bundle  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "num_attention_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
}


def accuracy(dtype: torch.dtype, gate_lower_bound: float | None) -> dict[str, float]:
    call = KdaCall(
        lengths=(70, 1, 33, 64, 31) if gate_lower_bound is not None else (33, 5),
        chunk=32,
        boundaries=((0, 2), (3, 1), (0, 1), (3, 2)) if gate_lower_bound is not None else ((0, 1),),
        finals=(0, 1),
        gate_lower_bound=gate_lower_bound,
    )
    inputs = call_inputs(np.random.default_rng(0), call, H=2, K=32, V=32, dtype=dtype, gate=2.0)
    return relative_errors(get_kda_backend("fla"), inputs, call)


def bitwise(dtype: torch.dtype) -> dict[str, bool]:
    rng = np.random.default_rng(1)
    tree = random_tree(rng, num_segments=7, max_tokens=40)
    inputs = random_inputs(
        rng, tree.row[-1] + tree.stop[-1] - tree.start[-1], H=2, K=32, V=32, dtype=torch.float32
    )
    inputs = [x.to(dtype) for x in inputs[:3]] + inputs[3:]
    backend = get_kda_backend("fla")
    expanded = run_expanded(backend, tree, inputs, 32, gate_lower_bound=-5.0)
    compact = run_compact(backend, tree, inputs, 32, split_into_paths(tree, rng), gate_lower_bound=-5.0)
    return {f"path{i}": torch.equal(compact[rows], o) for i, (rows, o) in enumerate(expanded)}


def model(gates: str) -> dict[str, float]:
    """A unit of a model: its backend's errors against ``naive``, relative to each tensor's largest value."""
    config = replace(PRESETS["cpu-dense"], **SMALL, kda_safe_gate=gates == "model-bounded")
    rows = random_sequences(np.random.default_rng(2), num_rows=4, max_extend=24, vocab=60)
    tree = tree_from_sequences(rows, vocab=64)
    bundle = simple_bundle(tree, chunk=32, units=1)
    bounds = []
    found = {}
    for backend in ("naive", "fla"):
        network = lively_model(config, torch.float32, backend=backend)
        attention = network.model.layers[0].attention
        kernels = attention.backend

        def record(*arguments: Any, kernels: KdaBackend = kernels) -> tuple[torch.Tensor, torch.Tensor]:
            bounds.append(arguments[5].gate_lower_bound)
            return kernels(*arguments)

        attention.backend = record
        hidden = unit_hidden(network, build_unit_layout(bundle, tree, 0))
        hidden.square().sum().backward()
        gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        found[backend] = {"hidden": hidden.detach(), **gradients}
    assert set(bounds) == {-5.0 if gates == "model-bounded" else None}
    return {
        name: float((found["fla"][name] - value).abs().max() / value.abs().max())
        for name, value in found["naive"].items()
    }


if __name__ == "__main__":
    if sys.argv[1].startswith("model"):
        print(json.dumps(model(sys.argv[1])))
        sys.exit()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[sys.argv[2]]
    result: dict[str, float] | dict[str, bool]
    if sys.argv[1] == "bitwise":
        result = bitwise(dtype)
    else:
        result = accuracy(dtype, -5.0 if sys.argv[1] == "bounded" else None)
    print(json.dumps(result))
