from __future__ import annotations

import tracemalloc

import numpy as np

from harts_core.trees.build import Trajectory, TreeBuilder


def test_memory_follows_the_trie_not_the_input(rng: np.random.Generator) -> None:
    """40 MB of tokens that are one 200 kB prefix with short tails, through a buffer of 400 kB."""
    prefix = rng.integers(0, 1000, 50_000).astype(np.int32)
    builder = TreeBuilder(buffer_tokens=100_000)
    tracemalloc.start()
    try:
        for i in range(200):
            tokens = np.append(prefix, np.int32(i))
            span = np.array([[50_000, 50_001]], np.int32)
            builder.add(Trajectory(trajectory_id=f"t{i}", group_id="g", tokens=tokens, loss_spans=span))
        tree = builder.finish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tree.original_tokens == 200 * 50_001
    assert tree.trie_tokens == 50_200
    assert peak < 4_000_000
