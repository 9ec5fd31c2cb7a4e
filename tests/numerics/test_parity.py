"""A unit's compact forward and backward against trajectory-by-trajectory training, value by value.

The reference (tests/support_model.py) runs every trajectory alone: token-by-token recurrence, dense softmax,
plain loops. Loss and every parameter gradient must agree to 1e-10 in float64 and 1e-5 in float32, for shared
and repeated layouts, wherever the tree forks.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from harts_core.exec.config import LinearCalls
from harts_core.exec.head import unit_logprobs
from harts_core.exec.layout import build_unit_layout
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.unit import unit_hidden
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences
from tests.support_model import lively_model, model_weights, reference_logprobs, simple_bundle

VOCAB = 40

DENSE = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    layer_group_size=2,
    num_attention_heads=2,
    head_dim=8,
    q_lora_rank=None,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    rope_theta=10_000.0,
    first_k_dense_replace=4,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
)
CONFIGS = {
    "dense": DENSE,
    "dense-open-gate": replace(DENSE, kda_safe_gate=False, q_lora_rank=10),
    "moe": replace(DENSE, first_k_dense_replace=1, q_lora_rank=10),
    "moe-open-gate-kkk": replace(DENSE, first_k_dense_replace=1, layer_group_size=4, kda_safe_gate=False),
}


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def branches(trunk: list[int], *forks: tuple[int, int]) -> list[list[int]]:
    """The trunk, and one row per (fork position, new tokens) off it; new tokens differ from the trunk's."""
    rows = [trunk]
    for i, (at, count) in enumerate(forks):
        new = tokens(1000 + i, count)
        if at < len(trunk):
            new[0] = (
                (trunk[at] + 1 + i) % VOCAB
                if (trunk[at] + 1 + i) % VOCAB != trunk[at]
                else (trunk[at] - 1) % VOCAB
            )
        rows.append(trunk[:at] + new)
    return rows


def chain(depth: int, step: int) -> list[list[int]]:
    """Each row forks off the one before it after ``step`` more tokens: depth forks on the last row's path."""
    rows = [tokens(7, step + 2)]
    for i in range(depth):
        cut = step * (i + 1)
        rows.append([*rows[-1][:cut], (rows[-1][cut] + 1) % VOCAB, *tokens(70 + i, step)])
    return rows


TREES: dict[str, list[list[int]]] = {
    "one-row": [tokens(1, 37)],
    "chunk-bounds": branches(tokens(2, 40), (16, 9), (16, 3), (32, 5), (4, 20), (15, 2), (17, 1)),
    "inside-chunks": branches(tokens(3, 50), (5, 11), (9, 30), (22, 1), (23, 2), (24, 3), (41, 7)),
    "tiny-pieces": branches(tokens(4, 12), (1, 1), (2, 1), (3, 2), (4, 3), (5, 1), (6, 2), (7, 3), (8, 1)),
    "depth-9": chain(9, 5),
    "depth-12-single-tokens": chain(12, 1),
    "duplicates-and-prefixes": [tokens(5, 30)] * 3 + [tokens(5, 30)[:n] for n in (1, 4, 17, 17, 29)],
    "several-roots": [
        *branches(tokens(6, 20), (7, 5)),
        *branches(tokens(8, 19), (16, 4)),
        [3],
        [39],
        [39, 2],
    ],
    "chunk-64": branches(tokens(9, 150), (64, 70), (63, 3), (65, 2), (128, 5)),
    **{
        f"random-{s}": random_sequences(np.random.default_rng(s), num_rows=8, max_extend=18, vocab=VOCAB)
        for s in range(4)
    },
}


def tree_of(name: str) -> RolloutTree:
    return tree_from_sequences(TREES[name], vocab=VOCAB)


def linear_loss(logprobs: list[Tensor]) -> Tensor:
    weights = np.random.default_rng(0)
    terms = [(p * torch.tensor(weights.standard_normal(len(p)), dtype=p.dtype)).sum() for p in logprobs]
    return torch.stack(terms).sum()


def nonlinear_loss(logprobs: list[Tensor]) -> Tensor:
    """Couples the positions of a row, as sequence-level objectives do."""
    rows = [(0.3 * p).exp().mean().square() + p.tanh().sum() for p in logprobs if len(p)]
    return torch.stack(rows).sum()


LOSSES = {"linear": linear_loss, "nonlinear": nonlinear_loss}


def compact_logprobs(
    model: HybridModel,
    bundle: PlanBundle,
    tree: RolloutTree,
    linear_calls: LinearCalls = "rounds",
    **options: object,
) -> list[Tensor]:
    """Per row, from all units; units stay separate graphs, so the loss can couple them."""
    result = [torch.zeros(0, dtype=model.dtype)] * tree.num_rows
    for unit in range(bundle.num_units):
        layout = build_unit_layout(bundle, tree, unit, linear_calls=linear_calls)
        values = unit_logprobs(model, unit_hidden(model, layout, **options), layout, block_rows=16)  # type: ignore[arg-type]
        rows, counts = np.unique(layout.trained_row, return_counts=True)
        assert np.array_equal(layout.trained_row, np.repeat(rows, counts))
        assert np.array_equal(layout.trained_index, np.concatenate([[], *map(np.arange, counts)]))
        for row, part in zip(rows, values.split(counts.tolist()), strict=True):
            result[row] = part
    assert [len(p) for p in result] == tree.trained_counts.tolist()
    return result


def gradients(model: HybridModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)
    }


def make_model(config: str, dtype: torch.dtype, *, fresh: bool, backend: str = "torch") -> HybridModel:
    """A lively model, or a freshly initialised one: float32 is compared on the latter, because the lively one
    amplifies rounding (the plain loops themselves lose 1e-4 there in float32)."""
    if fresh:
        return HybridModel(CONFIGS[config], dtype=dtype, kda_backend=backend, seed=5)
    return lively_model(CONFIGS[config], dtype, backend=backend)


@functools.cache
def reference(
    config: str, tree: str, loss: str = "linear", *, fresh: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    model = make_model(config, torch.float64, fresh=fresh)
    value = LOSSES[loss](reference_logprobs(CONFIGS[config], model_weights(model), tree_of(tree)))
    return value.detach(), gradients(model, value)


def check(
    config: str,
    tree_name: str,
    bundle: PlanBundle,
    tree: RolloutTree,
    *,
    loss: str = "linear",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    backend: str = "torch",
    **options: object,
) -> None:
    fresh = dtype == torch.float32
    expected, expected_grads = reference(config, tree_name, loss, fresh=fresh)
    model = make_model(config, dtype, fresh=fresh, backend=backend)
    value = LOSSES[loss](compact_logprobs(model, bundle, tree, **options))
    found = gradients(model, value)
    assert abs(value.item() - expected.item()) <= tolerance * abs(expected.item())
    for name, want in expected_grads.items():
        error = (found[name].to(torch.float64) - want).abs().max().item()
        assert error <= tolerance * want.abs().max().item(), name


EVERY_TREE = [(config, tree) for config in ("dense", "moe") for tree in TREES]
OTHER_GATES = [
    (config, tree)
    for config in ("dense-open-gate", "moe-open-gate-kkk")
    for tree in ("random-0", "depth-9", "tiny-pieces")
]


@pytest.mark.parametrize(("config", "tree_name"), EVERY_TREE + OTHER_GATES)
def test_shared_layout_equals_trajectory_by_trajectory(config: str, tree_name: str) -> None:
    tree = tree_of(tree_name)
    chunk = 64 if tree_name == "chunk-64" else 16
    check(config, tree_name, simple_bundle(tree, chunk=chunk, units=1), tree)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("sharing", ["tree", "none"])
def test_every_chunk_length_and_sharing(chunk: int, sharing: str) -> None:
    for name in ("inside-chunks", "chunk-bounds"):
        tree = tree_of(name)
        check("moe", name, simple_bundle(tree, sharing=sharing, chunk=chunk, units=2), tree)


@pytest.mark.parametrize("planner", ["expanded", "harts-l1"])
def test_every_planner(planner: str) -> None:
    for name in ("random-0", "chunk-bounds", "several-roots"):
        tree = tree_of(name)
        capacity = int(tree.length.max()) + 30
        bundle = plan_tree(tree, PlanOptions(dp=2, capacity=capacity, planner=planner, chunk=16))
        check("moe", name, bundle, tree)


@pytest.mark.parametrize("tree_name", ["random-1", "duplicates-and-prefixes", "several-roots"])
@pytest.mark.parametrize("sharing", ["tree", "none"])
def test_a_loss_that_couples_positions(tree_name: str, sharing: str) -> None:
    tree = tree_of(tree_name)
    bundle = simple_bundle(tree, sharing=sharing, chunk=4, units=3)
    check("moe", tree_name, bundle, tree, loss="nonlinear")


@pytest.mark.parametrize("sharing", ["tree", "none"])
@pytest.mark.parametrize("config", CONFIGS)
def test_float32(config: str, sharing: str) -> None:
    for name in ("random-2", "tiny-pieces"):
        tree = tree_of(name)
        bundle = simple_bundle(tree, sharing=sharing, chunk=16, units=2)
        check(config, name, bundle, tree, dtype=torch.float32, tolerance=1e-5)


def test_the_naive_backend_and_layer_recomputation() -> None:
    tree = tree_of("random-3")
    bundle = simple_bundle(tree, chunk=4, units=2)
    check("moe", "random-3", bundle, tree, backend="naive")
    check("moe", "random-3", bundle, tree, recompute="layer")


@pytest.mark.parametrize("calls", ["levels", "nodes"])
@pytest.mark.parametrize("chunk", [3, 16])
def test_linear_attention_by_level_and_by_node(calls: str, chunk: int) -> None:
    for name in ("depth-9", "chunk-bounds", "several-roots"):
        tree = tree_of(name)
        check("moe", name, simple_bundle(tree, chunk=chunk, units=2), tree, linear_calls=calls)


def test_no_replay_is_the_same_function() -> None:
    tree = tree_of("inside-chunks")
    expected, _ = reference("dense", "inside-chunks")
    model = lively_model(CONFIGS["dense"], torch.float64)
    layout = build_unit_layout(simple_bundle(tree, chunk=16, units=1), tree, 0, linear_calls="no-replay")
    values = unit_logprobs(model, unit_hidden(model, layout), layout)
    rows = list(values.split(tree.trained_counts.tolist()))
    assert linear_loss(rows).item() == pytest.approx(expected.item(), rel=1e-10)


def test_only_some_positions_are_trained() -> None:
    spans = [[(1, 2), (5, 9)] if len(row) > 9 else [] for row in TREES["random-1"]]
    tree = tree_from_sequences(TREES["random-1"], loss_spans=spans, vocab=VOCAB)
    model = lively_model(CONFIGS["dense"], torch.float64)
    expected = linear_loss(reference_logprobs(CONFIGS["dense"], model_weights(model), tree))
    bundle = simple_bundle(tree, chunk=4, units=2)
    layouts = [build_unit_layout(bundle, tree, unit) for unit in range(2)]
    assert all(len(layout.head.rows) < layout.num_rows for layout in layouts)
    value = linear_loss(compact_logprobs(model, bundle, tree))
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    want, found = gradients(model, expected), gradients(model, value)
    for name in want:
        torch.testing.assert_close(
            found[name], want[name], rtol=0, atol=1e-10 * want[name].abs().max().item()
        )
