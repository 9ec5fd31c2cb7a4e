"""KDA backends on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts_core.exec.kda import KdaBackend, KdaCall, kda_chunkwise, kda_fla
from tests.numerics.kda.comparison import call_inputs, relative_errors
from tests.numerics.kda.tree_runs import (
    random_inputs,
    random_tree,
    run_compact,
    run_expanded,
    split_into_paths,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # fla and triton warn about versions and devices in ways that are not ours to fix
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize(
    ("backend", "dtype", "bound"),
    [
        (kda_chunkwise, torch.float64, 1e-12),
        (kda_fla, torch.bfloat16, 2e-2),
        (kda_fla, torch.float32, 5e-3),  # flash-linear-attention multiplies float32 in TF32
    ],
)
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("gate_lower_bound", [-5.0, None])
def test_values_states_and_gradients(
    backend: KdaBackend, dtype: torch.dtype, bound: float, head: int, gate_lower_bound: float | None
) -> None:
    call = KdaCall(
        lengths=(70, 1, 33, 64, 200, 63),
        chunk=64,
        boundaries=((0, 1), (4, 3), (3, 1), (4, 1), (4, 3)),
        finals=(1, 4),
        gate_lower_bound=gate_lower_bound,
    )
    rng = np.random.default_rng(0)
    inputs = [x.cuda() for x in call_inputs(rng, call, H=3, K=head, V=head, dtype=dtype, gate=2.0)]
    errors = relative_errors(backend, inputs, call)
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compact_is_bitwise_expanded(dtype: torch.dtype) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, num_segments=10, max_tokens=200, roots=1 + seed % 2)
        num_rows = tree.row[-1] + tree.stop[-1] - tree.start[-1]
        inputs = [x.cuda() for x in random_inputs(rng, num_rows, H=2, K=128, V=128, dtype=torch.float32)]
        inputs[:3] = [x.to(dtype) for x in inputs[:3]]
        expanded = run_expanded(kda_fla, tree, inputs, 64, gate_lower_bound=-5.0)
        paths = split_into_paths(tree, rng)
        compact = run_compact(kda_fla, tree, inputs, 64, paths, gate_lower_bound=-5.0)
        for rows, o in expanded:
            assert torch.equal(compact[rows], o)


def test_large_heads_fit_shared_memory() -> None:
    call = KdaCall(lengths=(130,), chunk=64, boundaries=((0, 2),))
    rng = np.random.default_rng(0)
    inputs = [x.cuda() for x in call_inputs(rng, call, H=1, K=256, V=256, dtype=torch.bfloat16)]
    errors = relative_errors(kda_fla, inputs, call)
    assert max(errors.values()) < 2e-2, errors
