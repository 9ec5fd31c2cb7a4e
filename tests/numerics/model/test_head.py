"""Label log-probabilities against log_softmax over the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harts_core.exec.head import unit_head, unit_logprobs
from harts_core.exec.layout import build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.unit import unit_hidden
from tests.support import tree_from_sequences
from tests.support_model import simple_bundle
from tests.support_train import random_tree

ROWS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 8], [6], [6, 6]]


def build(dtype: torch.dtype = torch.float64):
    tree = tree_from_sequences(ROWS, vocab=10)
    layout = build_unit_layout(simple_bundle(tree, chunk=4, units=1), tree, 0)
    model = HybridModel(replace(PRESETS["cpu-dense"], vocab_size=10), dtype=dtype, seed=0)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(layout.num_rows, 64, generator=generator, dtype=torch.float64).to(dtype)
    return tree, layout, model, hidden.requires_grad_()


@pytest.mark.parametrize("block_rows", [1, 2, 3, 1000])
def test_values_and_gradients_in_blocks(block_rows: int) -> None:
    tree, layout, model, hidden = build()
    found = unit_logprobs(model, hidden, layout, block_rows=block_rows)
    rows = {(int(p), int(t)): r for r, (p, t) in enumerate(zip(layout.positions, layout.tokens, strict=True))}
    logp = torch.log_softmax(hidden @ model.lm_head.weight.t(), -1)
    expected = []
    for row, index in zip(layout.trained_row, layout.trained_index, strict=True):
        tokens, position = tree.tokens(int(row)), int(index) + 1
        expected.append(logp[rows[position - 1, int(tokens[position - 1])], int(tokens[position])])
    want = torch.stack(expected)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    probe = torch.randn(len(found), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [hidden, model.lm_head.weight]
    for a, b in zip(
        torch.autograd.grad((found * probe).sum(), inputs),
        torch.autograd.grad((want * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block_rows", [1, 2, 1000])
def test_entropies_in_blocks(block_rows: int) -> None:
    tree, layout, model, hidden = build()
    found = unit_head(model, hidden, layout, block_rows, entropy=True)
    assert found.entropy is not None
    assert torch.equal(found.logprobs, unit_logprobs(model, hidden, layout, block_rows))
    assert unit_head(model, hidden, layout).entropy is None
    rows = {(int(p), int(t)): r for r, (p, t) in enumerate(zip(layout.positions, layout.tokens, strict=True))}
    p = torch.softmax(hidden @ model.lm_head.weight.t(), -1)
    entropy = -(p * p.log()).sum(-1)
    before = [tree.tokens(int(r)) for r in layout.trained_row]
    source = [rows[int(i), int(t[i])] for i, t in zip(layout.trained_index, before, strict=True)]
    want = entropy[source]
    torch.testing.assert_close(found.entropy, want, rtol=1e-12, atol=1e-12)
    generator = torch.Generator().manual_seed(1)
    probes = torch.randn(2, len(want), generator=generator, dtype=torch.float64)
    labels = [int(t[i + 1]) for i, t in zip(layout.trained_index, before, strict=True)]
    inputs = [hidden, model.lm_head.weight]
    for a, b in zip(
        torch.autograd.grad((found.entropy * probes[0] + found.logprobs * probes[1]).sum(), inputs),
        torch.autograd.grad((want * probes[0] + p[source, labels].log() * probes[1]).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_no_more_than_a_block_of_logits_exists(entropy: bool) -> None:
    tree = random_tree(3, num_rows=20)
    layout = build_unit_layout(simple_bundle(tree, chunk=4, units=1), tree, 0)
    model = HybridModel(replace(PRESETS["cpu-dense"], vocab_size=200), dtype=torch.float32, seed=0)
    rows, vocab, width = len(layout.head.rows), 200, 64
    assert rows > 2 * width
    hidden = torch.zeros(layout.num_rows, width, requires_grad=True)
    with LargestTensor() as largest:
        out = unit_head(model, hidden, layout, block_rows=16, entropy=entropy)
        (out.logprobs.sum() + (0 if out.entropy is None else out.entropy.sum())).backward()
    assert largest.elements == max(16 * vocab, vocab * width, layout.num_rows * width) < rows * vocab


def test_shared_pairs_are_computed_once_and_mapped_to_every_position() -> None:
    tree, layout, _, _ = build()
    assert layout.head.labels.tolist() == [2, 3, 8, 4, 9, 5, 6]
    assert len(layout.trained_row) == int(tree.trained_counts.sum()) == 4 + 4 + 3 + 2 + 0 + 1
    assert len(layout.head.rows) == 5


def test_bfloat16_returns_float32() -> None:
    _, layout, model, hidden = build(torch.bfloat16)
    found = unit_logprobs(model, hidden, layout)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16
    assert np.isfinite(found.detach().numpy()).all()


def test_block_rows_must_be_positive() -> None:
    _, layout, model, hidden = build()
    with pytest.raises(ValueError, match="block_rows"):
        unit_logprobs(model, hidden, layout, block_rows=0)


def test_a_unit_without_trained_positions_gives_zero_gradients() -> None:
    tree = tree_from_sequences([[3], [4]], vocab=10)
    layout = build_unit_layout(simple_bundle(tree, chunk=4, units=1), tree, 0)
    _, _, model, _ = build()
    unit_logprobs(model, unit_hidden(model, layout), layout).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
