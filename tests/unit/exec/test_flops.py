"""Operation counts against parameter counts of real modules and token-by-token loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts_core.exec.flops import UnitFlops, causal_pairs, step_flops, unit_flops
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.plan.schedule.second_forwards import with_second_forwards
from harts_core.plan.schedule.units import Event
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences
from tests.support_model import simple_bundle


def layouts(sharing: str, chunk: int = 16) -> tuple[RolloutTree, UnitLayout]:
    rows = random_sequences(np.random.default_rng(3), num_rows=9, max_extend=40, vocab=500)
    tree = tree_from_sequences(rows, vocab=512)
    return tree, build_unit_layout(simple_bundle(tree, sharing=sharing, chunk=chunk, units=1), tree, 0)


@pytest.mark.parametrize("preset", ["cpu-dense", "cpu-moe", "cpu-bench"])
def test_projections_ffn_and_head_count_every_matrix_once_per_row(preset: str) -> None:
    config = PRESETS[preset]
    _, layout = layouts("tree")
    flops = unit_flops(config, layout)
    attention = ffn = 0.0
    for name, parameter in HybridModel(config, dtype=torch.float32, seed=0).named_parameters():
        if ".attention." in name and parameter.dim() == 2:
            attention += parameter.numel()
        elif ".mlp.experts." in name:
            ffn += parameter.numel() * config.num_experts_per_tok / config.num_experts
        elif ".mlp." in name:
            ffn += parameter.numel()
    assert flops.projection == 2 * attention * layout.num_rows
    assert flops.ffn == 2 * ffn * layout.num_rows
    assert flops.head == 2 * len(layout.head.rows) * config.hidden_size * config.vocab_size


def test_pairs_are_those_of_every_distinct_prefix() -> None:
    tree, layout = layouts("tree")
    prefixes = {tuple(tree.tokens(row)[:n].tolist()) for row in range(tree.num_rows) for n in range(1, 2000)}
    assert causal_pairs(layout) == sum(len(prefix) for prefix in prefixes)
    tree, layout = layouts("none")
    assert causal_pairs(layout) == sum(n * (n + 1) // 2 for n in tree.length.tolist())


@pytest.mark.parametrize("chunk", [3, 16])
def test_chunks_count_their_own_tokens(chunk: int) -> None:
    config = PRESETS["cpu-dense"]
    tree, layout = layouts("none", chunk)
    K, expected = config.head_dim, 0
    for length in tree.length.tolist():
        for first in range(0, length, chunk):
            n = min(chunk, length - first)
            for t in range(n):
                expected += 2 * K * (t + 1)  # decayed products of q with the keys so far
                expected += 2 * K * t  # and of the key with those before it
                expected += 2 * 2 * K * (t + 1)  # a row of the inverse times values and weighted keys
                expected += 2 * K * (t + 1)  # the triangle times the new values
                expected += 3 * 2 * K * K  # in and out of the state: w S, q S, kᵀ v'
            expected += n**3 // 3
    heads, layers = config.num_attention_heads, 3
    assert unit_flops(config, layout).linear_attention == heads * layers * expected


def test_a_step_counts_what_runs() -> None:
    """Unit 0 waits for unit 1: a chain of two."""
    units = {
        0: UnitFlops(projection=10.0, head=1.0),
        1: UnitFlops(projection=100.0, attention=1000.0, head=7.0),
    }
    order = [("forward", 0), ("forward", 1), ("backward", 1), ("free", 1), ("backward", 0), ("free", 0)]
    chain = [Event(kind=kind, unit=unit) for kind, unit in order]  # type: ignore[arg-type]
    assert step_flops(units, chain).total == 3 * (11 + 1107)
    assert step_flops(units, chain, "layer").total == 3 * (11 + 1107) + 10 + 1100
    again = with_second_forwards(chain, "unit")
    assert step_flops(units, again, "unit").total == 3 * (11 + 1107) + 10
    assert step_flops(units, again, "unit+layer").total == 3 * (11 + 1107) + 10 + 10 + 1100
    assert step_flops(units, again, "unit").head == 3 * 8


def test_parts_add_up() -> None:
    one = UnitFlops(projection=1.0, linear_attention=2.0, attention=3.0, ffn=4.0, head=5.0)
    assert one.total == 15
    assert (one + one).total == 30
    assert (one + one).attention == 6
