"""Compact runs over token trees equal the full run of every trajectory: bit for bit in float32 on CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts_core.exec.kda import kda_chunkwise, kda_naive
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
        for seed in range(12 if threads == 1 else 2):
            rng = np.random.default_rng(1000 * chunk + seed)
            tree = random_tree(rng, num_segments=10, max_tokens=3 * chunk, roots=1 + seed % 2)
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


@pytest.mark.parametrize("chunk", [3, 16])
def test_compact_gradients_are_the_sums_of_the_expanded_ones(chunk: int) -> None:
    """Every path's outputs weighted at random; a shared token's gradient is the sum over its copies."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, num_segments=9, max_tokens=2 * chunk, roots=2)
        num_rows = tree.row[-1] + tree.stop[-1] - tree.start[-1]
        inputs = random_inputs(rng, num_rows, H=2, K=4, V=3, dtype=torch.float64)
        leaves = [x.requires_grad_() for x in inputs]
        expanded = run_expanded(kda_naive, tree, leaves, chunk)
        weights = [torch.from_numpy(rng.standard_normal(o.shape)) for _, o in expanded]
        expected_loss = sum((w * o).sum() for w, (_, o) in zip(weights, expanded, strict=True))
        expected = torch.autograd.grad(expected_loss, leaves)
        for paths in (split_into_paths(tree, None), split_into_paths(tree, rng)):
            compact = run_compact(kda_chunkwise, tree, leaves, chunk, paths)
            loss = sum((w * compact[rows]).sum() for w, (rows, _) in zip(weights, expanded, strict=True))
            for x, y in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_the_random_trees_hand_states_over() -> None:
    """Guards the tests above: their trees do reuse boundary states and replay tokens."""
    states = replayed = 0

    def counting(q, k, v, g, beta, call, initial):
        nonlocal states, replayed
        states += call.num_states
        replayed += call.num_tokens
        return kda_chunkwise(q, k, v, g, beta, call, initial)

    for seed in range(12):
        rng = np.random.default_rng(1000 * 16 + seed)
        tree = random_tree(rng, num_segments=10, max_tokens=48, roots=1 + seed % 2)
        num_rows = tree.row[-1] + tree.stop[-1] - tree.start[-1]
        inputs = random_inputs(rng, num_rows, H=1, K=2, V=2, dtype=torch.float32)
        run_compact(counting, tree, inputs, 16, split_into_paths(tree, rng))
        replayed -= num_rows
    assert states >= 20
    assert replayed >= 100
