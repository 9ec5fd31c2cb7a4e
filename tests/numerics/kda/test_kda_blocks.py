"""The pieces of the chunkwise form against direct formulas."""

from __future__ import annotations

import pytest
import torch

from harts_core.exec.kda.decay import RunDecays, decay_products
from harts_core.exec.kda.dyadic import inverse_unit_lower, lower_blocks, suffix_sums_


@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_decay_products_are_the_pairwise_sums(width: int) -> None:
    torch.manual_seed(width)
    q, b, k = (torch.randn(6, width, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    g = (-3 * torch.rand(6, width, 5, dtype=torch.float64)).requires_grad_()
    G = g.cumsum(-2)
    decay = (G.unsqueeze(-2) - G.unsqueeze(-3)).clamp(max=0).exp()  # s > t is cut off below
    expected = (
        torch.einsum("...tk,...sk,...tsk->...ts", q, k, decay).tril(),
        torch.einsum("...tk,...sk,...tsk->...ts", b, k, decay).tril(-1),
        G.exp(),
        (G[..., -1:, :] - G).exp(),
    )
    actual = decay_products(q, b, k, g)
    weights = [torch.randn_like(x) for x in expected]
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
    for x, y in zip(
        torch.autograd.grad(actual, (q, b, k, g), weights),
        torch.autograd.grad(expected, (q, b, k, g), weights),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_run_decays_keep_relative_precision_after_a_strong_decay() -> None:
    """exp of differences of a running sum would be wrong by about 1e-3 here."""
    g = torch.full((1, 64, 1), -1e-3)
    g[0, 3] = -1e4
    decays = RunDecays(g)
    for _ in range(6):
        decays.grow()
    expected = (g.double().flip(1).cumsum(1).flip(1) - g.double()).exp()
    torch.testing.assert_close(decays.to_end.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("width", [1, 2, 16, 64])
def test_inverse_unit_lower(width: int) -> None:
    torch.manual_seed(0)
    N = (0.3 * torch.randn(2, 3, width, width, dtype=torch.float64).tril(-1)).requires_grad_()
    X = inverse_unit_lower(N)
    expected = torch.linalg.inv(torch.eye(width, dtype=torch.float64) + N)
    torch.testing.assert_close(X, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(X)
    (dN,) = torch.autograd.grad(X, N, weight)
    (expected_dN,) = torch.autograd.grad(expected, N, weight)
    torch.testing.assert_close(dN, expected_dN.tril(-1), rtol=1e-9, atol=1e-9)


def test_lower_blocks_are_views_of_the_off_diagonal_blocks() -> None:
    x = torch.arange(64.0).view(1, 8, 8)
    blocks = lower_blocks(x, 2)
    assert torch.equal(blocks[0, 0], x[0, 2:4, 0:2])
    assert torch.equal(blocks[0, 1], x[0, 6:8, 4:6])
    blocks.zero_()
    assert int((x == 0).sum()) == 8 + 1


def test_suffix_sums() -> None:
    x = torch.arange(8.0).view(8, 1)
    assert suffix_sums_(x).flatten().tolist() == [28.0, 28.0, 27.0, 25.0, 22.0, 18.0, 13.0, 7.0]
