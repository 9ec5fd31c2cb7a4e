"""Router losses, statistics and bias updates on compact tokens against loops over whole trajectories."""

from __future__ import annotations

import math

import pytest
import torch

from harts_core.exec.model.moe import Routing
from harts_core.exec.model.moe_losses import (
    RouterTerms,
    router_losses,
    router_sums,
    update_expert_bias,
)


def plain_terms(logits: list[list[float]], chosen: list[list[int]], coefs: tuple[float, float]) -> float:
    """z_coef · Z + balance_coef · L of one layer, token by token over the original tokens."""
    S, E, k = len(logits), len(logits[0]), len(chosen[0])
    z_loss = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits) / S
    balance = 0.0
    for e in range(E):
        share = sum(e in experts for experts in chosen) / (k * S)
        mass = 0.0
        for row in logits:
            scores = [1 / (1 + math.exp(-v)) for v in row]
            mass += scores[e] / sum(scores) / S
        balance += E * share * mass
    return coefs[0] * z_loss + coefs[1] * balance


def random_routing(seed: int, tokens: int = 7, experts: int = 6, k: int = 2) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64).requires_grad_()
    chosen = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    return Routing(logits=logits, weights=torch.ones(tokens, k), experts=chosen)


@pytest.mark.parametrize("coefs", [(0.5, 0.0), (0.0, 2.0), (0.3, 0.7)])
def test_terms_count_every_original_token(coefs: tuple[float, float]) -> None:
    layers = [random_routing(0), random_routing(1)]
    occurrences = torch.tensor([3, 1, 1, 5, 0, 2, 4])
    total = int(occurrences.sum())
    terms = RouterTerms(z_loss_coef=coefs[0], balance_loss_coef=coefs[1])
    sums = router_sums(layers, occurrences)
    loss = router_losses(layers, occurrences, terms, original_tokens=total, load=sums.load)
    expected = 0.0
    for layer in layers:
        original = torch.repeat_interleave(torch.arange(7), occurrences).tolist()
        expected += plain_terms(
            [layer.logits[i].tolist() for i in original],
            [layer.experts[i].tolist() for i in original],
            coefs,
        )
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert sums.tokens == total
    assert sums.counts.sum(-1).tolist() == [2 * total] * 2


def test_shares_of_parts_sum_to_the_whole() -> None:
    layers = [random_routing(2), random_routing(3)]
    occurrences = torch.tensor([3, 1, 1, 5, 2, 2, 4])
    total = int(occurrences.sum())
    terms = RouterTerms(z_loss_coef=0.3, balance_loss_coef=0.7)
    whole = router_sums(layers, occurrences)
    loss = router_losses(layers, occurrences, terms, original_tokens=total, load=whole.load)
    parts = []
    for piece in (slice(0, 2), slice(2, 7)):
        cut = [Routing(logits=r.logits[piece], weights=r.weights, experts=r.experts[piece]) for r in layers]
        parts.append((cut, occurrences[piece]))
    first, second = (router_sums(*part) for part in parts)
    assert torch.equal((first + second).counts, whole.counts)
    assert (first + second).metrics() == pytest.approx(whole.metrics(), rel=1e-13)
    shares = [router_losses(*p, terms, original_tokens=total, load=whole.load) for p in parts]
    assert sum(s.item() for s in shares) == pytest.approx(loss.item(), rel=1e-13)
    logits = [r.logits for r in layers]
    for a, b in zip(
        torch.autograd.grad(sum(shares, torch.zeros(())), logits),
        torch.autograd.grad(loss, logits),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_the_balance_loss_asks_for_the_loads() -> None:
    terms = RouterTerms(balance_loss_coef=1.0)
    with pytest.raises(ValueError, match="loads"):
        router_losses([random_routing(0)], torch.ones(7, dtype=torch.int64), terms, original_tokens=7)


def test_statistics_of_known_loads() -> None:
    experts = torch.tensor([[0], [0], [0], [1]])
    routing = Routing(logits=torch.zeros(4, 4), weights=torch.ones(4, 1), experts=experts)
    sums = router_sums([routing], torch.tensor([1, 1, 4, 2]))
    assert sums.counts.tolist() == [[6, 2, 0, 0]]
    assert sums.load.tolist() == [[0.75, 0.25, 0, 0]]
    metrics = sums.metrics()
    assert metrics["expert_load_max"] == 3.0
    assert metrics["expert_load_min"] == 0.0
    assert metrics["experts_idle"] == 2
    assert metrics["balance_loss"] == pytest.approx(1.0)  # even scores
    assert metrics["router_z_loss"] == pytest.approx(math.log(4) ** 2)


def test_bias_moves_towards_even_loads() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5])
    update_expert_bias([bias], torch.tensor([[6, 2, 4, 4]]), 0.125)
    assert bias.tolist() == [0.375, 0.625, 0.5, 0.5]


def test_counts_do_not_lose_large_numbers() -> None:
    routing = Routing(logits=torch.zeros(2, 2), weights=torch.ones(2, 1), experts=torch.tensor([[0], [1]]))
    sums = router_sums([routing], torch.tensor([2**40 + 1, 1]))
    assert sums.counts.tolist() == [[2**40 + 1, 1]]
    assert float(sums.load[0, 1]) == pytest.approx(1 / (2**40 + 2), rel=1e-12)
