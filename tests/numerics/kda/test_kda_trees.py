"""Compact runs over token trees equal the full run of every trajectory: bit for bit in float32 on CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts_core.exec.kda import kda_chunkwise
from tests.numerics.kda.tree_runs import (
    random_inputs,
    random_tree,
    run_compact,
    run_expanded,
    split_into_paths,
)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("H", "K", "V", "chunk"),
    [(4, 64, 64, 64), (2, 32, 32, 16), (4, 16, 16, 32), (3, 8, 24, 12), (1, 64, 32, 64)],
)
def test_compact_is_bitwise_expanded(H: int, K: int, V: int, chunk: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(12):
            rng = np.random.default_rng(1000 * chunk + seed)
            tree = random_tree(rng, num_segments=8, max_tokens=2 * chunk, roots=1 + seed % 2)
            inputs = random_inputs(
                rng, tree.row[-1] + tree.stop[-1] - tree.start[-1], H=H, K=K, V=V, dtype=torch.float32
            )
            expanded = run_expanded(kda_chunkwise, tree, inputs, chunk)
            for paths in (split_into_paths(tree, None), split_into_paths(tree, rng)):
                compact = run_compact(kda_chunkwise, tree, inputs, chunk, paths)
                for rows, o in expanded:
                    assert torch.equal(compact[rows], o)
    finally:
        torch.set_num_threads(before)
