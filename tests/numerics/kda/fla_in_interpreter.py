"""A process of its own: the fla backend in Triton's interpreter against the reference; prints JSON."""

from __future__ import annotations

import json
import sys

from tests.triton_interpreter import enable

enable()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from harts_core.exec.kda import KdaCall, get_kda_backend  # noqa: E402
from tests.numerics.kda.comparison import call_inputs, relative_errors  # noqa: E402
from tests.numerics.kda.tree_runs import (  # noqa: E402
    random_inputs,
    random_tree,
    run_compact,
    run_expanded,
    split_into_paths,
)


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


if __name__ == "__main__":
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[sys.argv[2]]
    result: dict[str, float] | dict[str, bool]
    if sys.argv[1] == "bitwise":
        result = bitwise(dtype)
    else:
        result = accuracy(dtype, -5.0 if sys.argv[1] == "bounded" else None)
    print(json.dumps(result))
