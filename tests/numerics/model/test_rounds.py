"""Compact linear attention over a unit's rounds equals the full run of every trajectory, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harts_core.exec.kda import KdaCall, get_kda_backend
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.kda_layer import KdaAttention
from harts_core.exec.model.kda_rounds import KdaInputs, run_rounds
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences
from tests.support_model import lively_model, simple_bundle


def forest(seed: int) -> RolloutTree:
    rng = np.random.default_rng(seed)
    rows = random_sequences(rng, num_rows=10, max_extend=60, vocab=500, num_roots=int(rng.integers(1, 4)))
    return tree_from_sequences(rows, vocab=512)


def path_rows(layout: UnitLayout, tree: RolloutTree, row: int) -> list[int]:
    """Compact rows of a trajectory, found by matching token prefixes (not by the layout's own tables)."""
    tokens = tree.tokens(row)
    following = [a.tolist() for a in layout.conv_ancestors]
    rows: list[int] = []
    for position, token in enumerate(tokens):
        parent = rows[-1] if rows else None
        found = [
            r
            for r in np.flatnonzero((layout.positions == position) & (layout.tokens == token))
            if parent is None or following[r][2] == parent
        ]
        assert len(found) == 1
        rows.append(int(found[0]))
    return rows


def layer_inputs(layer: KdaAttention, layout: UnitLayout, seed: int) -> KdaInputs:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layout.num_rows, 64, generator=generator)
    projected = (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
    return layer.recurrence_inputs(x, projected, layout.to("cpu"))


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("seed", range(15))
def test_outputs_equal_the_expanded_run_bit_for_bit(seed: int, chunk: int) -> None:
    tree = forest(seed)
    layout = build_unit_layout(simple_bundle(tree, chunk=chunk, units=1), tree, 0)
    layer = lively_model(PRESETS["cpu-moe"], torch.float32).model.layers[0].attention
    backend = get_kda_backend("torch")
    with torch.no_grad():
        inputs = layer_inputs(layer, layout, seed)
        compact, _ = run_rounds(backend, inputs, layout.to("cpu"))
        for row in range(tree.num_rows):
            index = torch.tensor(path_rows(layout, tree, row))
            tensors = [getattr(inputs, name)[index] for name in ("q", "k", "v", "g", "beta")]
            full, _ = backend(*tensors, KdaCall(lengths=(len(index),), chunk=chunk))
            assert torch.equal(compact[index], full)


@pytest.mark.parametrize("seed", range(5))
def test_convolved_inputs_equal_the_expanded_run_bit_for_bit(seed: int) -> None:
    tree = forest(seed)
    shared = build_unit_layout(simple_bundle(tree, chunk=16, units=1), tree, 0)
    repeated = build_unit_layout(simple_bundle(tree, sharing="none", chunk=16, units=1), tree, 0)
    layer = lively_model(PRESETS["cpu-moe"], torch.float32).model.layers[0].attention
    rows = [path_rows(shared, tree, row) for row in range(tree.num_rows)]
    starts = [(s.start, s.stop) for s in repeated.attention]
    with torch.no_grad():
        x = torch.randn(shared.num_rows, 64, generator=torch.Generator().manual_seed(seed))
        projected = (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
        compact = layer.recurrence_inputs(x, projected, shared.to("cpu"))
        gather = torch.empty(repeated.num_rows, dtype=torch.int64)
        for start, stop in starts:  # one sequence per trajectory, in any order
            tokens = repeated.tokens[start:stop].tolist()
            row = next(
                r for r in np.flatnonzero(tree.length == len(tokens)) if tree.tokens(r).tolist() == tokens
            )
            gather[start:stop] = torch.tensor(rows[row])
        q, k, v = (p[gather] for p in projected)
        full = layer.recurrence_inputs(x[gather], (q, k, v), repeated.to("cpu"))
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(compact, name)[gather], getattr(full, name))


def test_no_replay_takes_another_numerical_path() -> None:
    """The comparison is only worth something if it differs in rounding, and only in rounding."""
    tree = forest(3)
    bundle = simple_bundle(tree, chunk=16, units=1)
    layer = lively_model(PRESETS["cpu-moe"], torch.float32).model.layers[0].attention
    outputs: list[Tensor] = []
    with torch.no_grad():
        for calls in ("rounds", "no-replay"):
            layout = build_unit_layout(bundle, tree, 0, linear_calls=calls)
            x = torch.randn(512, 500, 64, generator=torch.Generator().manual_seed(0))
            x_CD = x[layout.tokens, layout.positions]
            order = np.lexsort((layout.tokens, layout.positions))
            out, _ = layer(x_CD, layout.to("cpu"))
            outputs.append(out[torch.tensor(order)])
    assert outputs[0].shape == outputs[1].shape
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_calls_by_level_and_by_node_give_the_bits_of_the_rounds(seed: int, chunk: int) -> None:
    tree = forest(seed)
    bundle = simple_bundle(tree, chunk=chunk, units=1)
    layer = lively_model(PRESETS["cpu-moe"], torch.float32).model.layers[0].attention
    planned = build_unit_layout(bundle, tree, 0)
    rows = np.concatenate([path_rows(planned, tree, row) for row in range(tree.num_rows)])
    with torch.no_grad():
        inputs = layer_inputs(layer, planned, seed)
        expected = run_rounds(layer.backend, inputs, planned.to("cpu"))[0][rows]
        for calls in ("levels", "nodes"):
            layout = build_unit_layout(bundle, tree, 0, linear_calls=calls)
            other = np.concatenate([path_rows(layout, tree, row) for row in range(tree.num_rows)])
            source = np.empty(layout.num_rows, np.int64)
            source[other] = rows
            moved = KdaInputs(
                **{name: getattr(inputs, name)[source] for name in ("q", "k", "v", "g", "beta")}
            )
            out, _ = run_rounds(layer.backend, moved, layout.to("cpu"))
            assert torch.equal(out[other], expected)
