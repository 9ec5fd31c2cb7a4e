"""Single parts of the model against plain formulas, values and gradients, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harts_core.exec.kda import kda_naive
from harts_core.exec.layout import AttentionSpan, build_unit_layout
from harts_core.exec.model.attention import QUERY_BLOCK, forest_attention
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.model.experts import Experts
from harts_core.exec.model.moe import MoE, Router
from harts_core.exec.model.short_conv import ShortConv
from harts_core.exec.model.spec import LOCAL_SPEC
from harts_core.exec.unit import unit_hidden
from tests.support import random_sequences, tree_from_sequences
from tests.support_model import chosen_experts, lively_model, simple_bundle

MOE = PRESETS["cpu-moe"]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def same_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 1e-12) -> None:
    """Equal values, and equal gradients of a random projection of them."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    probe = randn(*found.shape, seed=9, dtype=found.dtype)
    for got, want in zip(
        torch.autograd.grad((found * probe).sum(), inputs),
        torch.autograd.grad((expected * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pieces", [[1], [2], [3], [1, 1, 1, 1], [2, 1, 3], [3, 2, 4, 1], [7, 1, 1, 1]])
def test_convolution_of_a_path_in_pieces_equals_one_padded_convolution(pieces: list[int]) -> None:
    total = sum(pieces)
    x, conv = randn(total, 6).requires_grad_(), ShortConv(6, torch.float64)
    with torch.no_grad():
        conv.weight.copy_(randn(6, 1, 4, seed=1))
    order = np.concatenate(
        [
            np.flatnonzero(np.repeat(np.arange(len(pieces)), pieces) == p)
            for p in np.random.default_rng(0).permutation(len(pieces))
        ]
    )  # memory order of the pieces
    row_of = np.argsort(order)
    ancestors = [
        torch.tensor([row_of[t - d] if t >= d else total for t in order], dtype=torch.int64)
        for d in (3, 2, 1)
    ]
    found = conv(x[torch.tensor(order)], ancestors)
    padded = F.conv1d(x.t()[None], conv.weight, padding=3, groups=6)[0, :, :total].t()
    same_gradients(found, F.silu(padded)[torch.tensor(order)], [x, conv.weight])


def test_convolution_reads_imported_rows() -> None:
    x, conv = randn(5, 2).requires_grad_(), ShortConv(2, torch.float64)
    with torch.no_grad():
        conv.weight.copy_(randn(2, 1, 4, seed=1))
    # own rows 0, 1 follow imported rows 2, 3, 4
    found = conv(x, [torch.tensor([2, 3]), torch.tensor([3, 4]), torch.tensor([4, 0])])
    path = x[[2, 3, 4, 0, 1]]
    same_gradients(found, F.silu(F.conv1d(path.t()[None], conv.weight, groups=2)[0].t()), [x, conv.weight])


@pytest.mark.parametrize("own", [1, 5, QUERY_BLOCK + 3])
def test_forest_attention_equals_dense_attention_per_path(own: int) -> None:
    """Root [0, 4), two children; the second also sees imported rows between."""
    H, K, V, scale = 2, 5, 3, 0.7
    rows = 4 + own + 6
    q, k, v = randn(rows, H, K), randn(rows + 2, H, K, seed=1), randn(rows + 2, H, V, seed=2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    spans = (
        AttentionSpan(start=0, stop=4, ancestors=()),
        AttentionSpan(start=4, stop=4 + own, ancestors=((0, 4),)),
        AttentionSpan(start=4 + own, stop=rows, ancestors=((0, 2), (rows, rows + 2), (4, 5))),
    )
    found = forest_attention(q, k, v, spans, scale)
    expected = torch.empty_like(found)
    for span in spans:
        path = [r for a, b in (*span.ancestors, (span.start, span.stop)) for r in range(a, b)]
        for row in range(span.start, span.stop):
            seen = path[: len(path) - (span.stop - row) + 1]
            p = torch.softmax(torch.einsum("hk,nhk->hn", q[row], k[seen]) * scale, -1)
            expected[row] = torch.einsum("hn,nhv->hv", p, v[seen])
    same_gradients(found, expected, inputs)


def test_router_matches_plain_sorting_and_breaks_ties_by_index() -> None:
    router = Router(MOE, torch.float64)
    with torch.no_grad():
        router.weight.copy_(randn(*router.weight.shape))
        router.weight[3] = router.weight[1]  # equal scores, in two groups
        router.expert_bias.copy_(0.3 * randn(MOE.num_experts, seed=3))
        router.expert_bias[3] = router.expert_bias[1]
    x = randn(200, MOE.hidden_size, seed=4)
    routing = router(x)
    scores = torch.sigmoid(x @ router.weight.t())
    for row, chosen in enumerate(routing.experts.tolist()):
        assert chosen == chosen_experts(MOE, (scores[row] + router.expert_bias).tolist())
        total = scores[row][chosen].sum()
        torch.testing.assert_close(routing.weights[row], 2.5 * scores[row][chosen] / total)


def test_all_scores_equal_goes_to_the_lowest_indices() -> None:
    router = Router(MOE, torch.float32)
    with torch.no_grad():
        router.weight.zero_()
    assert router(randn(3, MOE.hidden_size, dtype=torch.float32)).experts.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_experts_equal_a_loop_with_empty_groups_and_no_rows(dtype: torch.dtype, tokens: int) -> None:
    experts = Experts(MOE, dtype)
    with torch.no_grad():
        for i, p in enumerate(experts.parameters()):
            p.copy_(0.3 * randn(*p.shape, seed=i))
    x = randn(tokens, MOE.hidden_size, seed=5, dtype=dtype).requires_grad_()
    weights = randn(tokens, 2, seed=6, dtype=torch.float64 if dtype == torch.float64 else torch.float32).abs()
    chosen = (
        torch.stack(
            [torch.randperm(3, generator=torch.Generator().manual_seed(t))[:2] + 2 for t in range(tokens)]
        )
        if tokens
        else torch.empty(0, 2, dtype=torch.int64)
    )
    found = experts(x, weights, chosen)
    rows = [torch.zeros(MOE.hidden_size, dtype=weights.dtype)] * tokens
    for t in range(tokens):
        for e, w in zip(chosen[t].tolist(), weights[t], strict=True):
            h = F.silu(F.linear(x[t], experts.gate_proj[e])) * F.linear(x[t], experts.up_proj[e])
            rows[t] = rows[t] + w * F.linear(h, experts.down_proj[e])
    expected = torch.stack(rows).to(dtype) if rows else found.detach() + 0 * x.sum()
    if not tokens:
        assert found.shape == (0, MOE.hidden_size)
        found.sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in experts.parameters())
    elif dtype == torch.bfloat16:
        assert (found - expected).norm() < 0.01 * expected.norm()
    else:
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}[dtype]
        same_gradients(found, expected, [x, *experts.parameters()], tolerance)


def test_widths_without_a_grouped_product() -> None:
    """6 floats are not a whole number of 16-byte units."""
    odd, chosen = replace(MOE, moe_intermediate_size=6), torch.tensor([[0, 1], [2, 7], [7, 1], [3, 4]])
    narrow, wide = Experts(odd, torch.float32), Experts(odd, torch.float64)
    with torch.no_grad():
        for i, (a, b) in enumerate(zip(narrow.parameters(), wide.parameters(), strict=True)):
            a.copy_(randn(*a.shape, seed=i))
            b.copy_(a)
    x, weights = randn(4, MOE.hidden_size, dtype=torch.float32), torch.ones(4, 2)
    expected = wide(x.double(), weights.double(), chosen)
    torch.testing.assert_close(narrow(x, weights, chosen).double(), expected, rtol=1e-4, atol=1e-3)


def test_moe_without_rows() -> None:
    moe = MoE(MOE, torch.float32, LOCAL_SPEC)
    out, routing = moe(torch.zeros(0, MOE.hidden_size, requires_grad=True))
    assert out.shape == (0, MOE.hidden_size)
    assert routing.experts.shape == (0, 2)


def test_weights_depend_on_seed_and_name_only() -> None:
    small, deep = (
        HybridModel(replace(MOE, num_hidden_layers=n), dtype=torch.float32, seed=1) for n in (4, 8)
    )
    deeper = dict(deep.named_parameters())
    assert all(torch.equal(p, deeper[name]) for name, p in small.named_parameters())
    other = dict(HybridModel(MOE, dtype=torch.float32, seed=2).named_parameters())
    assert not torch.equal(other["lm_head.weight"], deeper["lm_head.weight"])


def test_dtype_islands() -> None:
    model = HybridModel(MOE, dtype=torch.bfloat16, seed=0)
    kinds = {name: p.dtype for name, p in [*model.named_parameters(), *model.named_buffers()]}
    island = (
        "norm.weight",
        "conv1d.weight",
        "A_log",
        "dt_bias",
        "mlp.gate.weight",
        "expert_bias",
        "layernorm.weight",
    )
    for name, dtype in kinds.items():
        assert dtype == (torch.float32 if name.endswith(island) else torch.bfloat16), name
    whole = HybridModel(MOE, dtype=torch.float64, seed=0)
    assert {p.dtype for p in whole.parameters()} == {torch.float64}


def test_bfloat16_is_close_to_float64_and_has_every_gradient() -> None:
    rows = random_sequences(np.random.default_rng(0), num_rows=6, max_extend=30, vocab=500)
    tree = tree_from_sequences(rows, vocab=512)
    layout = build_unit_layout(simple_bundle(tree, chunk=16, units=1), tree, 0)
    exact = unit_hidden(lively_model(MOE, torch.float64), layout)
    model = lively_model(MOE, torch.bfloat16)
    hidden = unit_hidden(model, layout)
    hidden.square().sum().backward()
    assert hidden.dtype == torch.bfloat16
    used = {n for n, p in model.named_parameters() if p.grad is not None}
    assert used == {n for n, _ in model.named_parameters()} - {"lm_head.weight"}
    error = (hidden.double() - exact).norm() / exact.norm()
    assert error < 0.2  # routing may flip on rounding; a wrong formula is off by more than one


def test_forward_and_backward_are_deterministic() -> None:
    rows = random_sequences(np.random.default_rng(1), num_rows=10, max_extend=30, vocab=500)
    tree = tree_from_sequences(rows, vocab=512)
    layout = build_unit_layout(simple_bundle(tree, chunk=16, units=1), tree, 0)
    results = []
    for _ in range(2):
        model = lively_model(MOE, torch.float32)
        unit_hidden(model, layout).square().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(g, results[1][n]) for n, g in results[0].items())


def test_naive_backend_is_selectable() -> None:
    model = HybridModel(MOE, dtype=torch.float32, kda_backend="naive", seed=0)
    assert model.model.layers[0].attention.backend is kda_naive
