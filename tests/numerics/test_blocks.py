"""Blocks in execution: measured as simulated, and the same gradients whatever is moved or how it is cut."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from harts_core.exec.blocks import BlockManager, CacheSettings
from harts_core.exec.config import OptimizerSection
from harts_core.exec.live_blocks import LiveBlock
from harts_core.exec.logprob import tree_logprobs
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.exec.windows import ExecutionCounts, UnitExecutor
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.units import unit_events, unit_links
from tests.numerics.test_parity import CONFIGS
from tests.numerics.test_windows import MODES, Weighted, check, weighted_tree
from tests.support_model import lively_model
from tests.support_windows import chain_bundle, nested_bundle

NAME = "random-3"
TREE = weighted_tree(NAME)


def psrl_bundle() -> PlanBundle:
    return plan_tree(TREE, PlanOptions(planner="psrl", dp=1, capacity=8, chunk=4, on_too_long="split"))


PLANS = {
    "chain": chain_bundle(TREE, units=6, chunk=4),
    "nested": nested_bundle(TREE, dp=1, slots=4, levels=2, chunk=4, seed=2),
    "replicas": nested_bundle(TREE, dp=2, slots=2, levels=2, chunk=4, seed=2),
    "psrl": psrl_bundle(),
}


def train(
    bundle: PlanBundle, settings: CacheSettings, *, dtype: torch.dtype, recompute: str = "none"
) -> tuple[float, dict[str, Tensor], ExecutionCounts]:
    model = lively_model(CONFIGS["moe"], dtype)
    optimizer = Optimizer(model.named_parameters(), OptimizerSection())
    trainer = Trainer(
        model,
        Weighted(),
        optimizer,
        recompute=recompute,  # type: ignore[arg-type]
        head_block_rows=16,
        cache=settings,
    )
    result = trainer.backward(trainer.prepare(bundle, TREE))
    return result.loss, optimizer.gradients(), result.counts


def simulated(
    bundle: PlanBundle, settings: CacheSettings, dtype: torch.dtype, recompute: str
) -> dict[str, int]:
    units = [u for d in range(bundle.dp) for u in bundle.units_of_replica(d).tolist()]
    executor = UnitExecutor(
        lively_model(CONFIGS["moe"], dtype),
        bundle,
        TREE,
        lambda _: None,
        unit_events(unit_links(bundle), units),
        recompute=recompute,  # type: ignore[arg-type]
        cache=settings,
    )
    return asdict(executor.blocks.simulated)


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("plan", PLANS)
def test_a_budget_gives_the_same_bits(plan: str, dtype: torch.dtype, recompute: str) -> None:
    bundle = PLANS[plan]
    free = CacheSettings()
    loss, want, counts = train(bundle, free, dtype=dtype, recompute=recompute)
    assert asdict(counts.cache) == simulated(bundle, free, dtype, recompute)
    for budget in (counts.cache.peak_bytes // 2, 0):
        settings = CacheSettings(budget_bytes=budget)
        same, found, limited = train(bundle, settings, dtype=dtype, recompute=recompute)
        assert asdict(limited.cache) == simulated(bundle, settings, dtype, recompute)
        assert same == loss
        assert all(torch.equal(found[name], gradient) for name, gradient in want.items())
        assert limited.cache.peak_bytes <= counts.cache.peak_bytes
        if plan == "nested" or recompute != "none":  # a chain's pass may need all that is there
            assert limited.cache.offloaded_bytes > 0
            assert limited.cache.peak_bytes < counts.cache.peak_bytes


@pytest.mark.parametrize("plan", PLANS)
def test_narrow_gradients_have_the_same_bits(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every gradient had the state dtype for all its life, for fewer bytes."""
    bundle = PLANS[plan]
    _, want, counts = train(bundle, CacheSettings(), dtype=torch.bfloat16)
    store = BlockManager._store_block

    def store_wide(self: BlockManager, *arguments: Any) -> LiveBlock:
        live = store(self, *arguments)
        live.dtypes = (torch.float32,) * len(live.dtypes)
        return live

    monkeypatch.setattr(BlockManager, "_store_block", store_wide)
    _, found, wide = train(bundle, CacheSettings(), dtype=torch.bfloat16)
    assert counts.cache.peak_bytes < wide.cache.peak_bytes
    assert counts.cache.allocated_bytes < wide.cache.allocated_bytes
    assert all(torch.equal(found[name], gradient) for name, gradient in want.items())


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("plan", PLANS)
def test_fixed_sizes(plan: str, size: int) -> None:
    """Gradients to rounding (a token in two blocks has two parts of its gradient), at least as many bytes."""
    bundle = PLANS[plan]
    settings = CacheSettings(block_tokens=size)
    loss, want, adaptive = train(bundle, CacheSettings(), dtype=torch.float64)
    same, found, counts = train(bundle, settings, dtype=torch.float64)
    assert asdict(counts.cache) == simulated(bundle, settings, torch.float64, "none")
    assert same == loss
    for name, gradient in want.items():
        assert (found[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name
    assert adaptive.cache.peak_bytes <= counts.cache.peak_bytes
    if size == 1:
        assert asdict(adaptive.cache) == asdict(counts.cache)
    else:
        assert adaptive.cache.allocated_bytes < counts.cache.allocated_bytes


@pytest.mark.parametrize("tree_name", [NAME, "depth-9"])
def test_psrl_equals_training_by_trajectory(tree_name: str) -> None:
    tree = weighted_tree(tree_name)
    capacity = max(8, int(tree.length.max()) // 4)
    options = PlanOptions(planner="psrl", dp=1, capacity=capacity, chunk=4, on_too_long="split")
    check("moe", tree_name, plan_tree(tree, options))


@pytest.mark.parametrize("settings", [CacheSettings(budget_bytes=0), CacheSettings(block_tokens=16)])
@pytest.mark.parametrize("plan", PLANS)
def test_forward_only(plan: str, settings: CacheSettings) -> None:
    model = lively_model(CONFIGS["moe"], torch.float32)
    want = tree_logprobs(model, PLANS[plan], TREE)
    found = tree_logprobs(model, PLANS[plan], TREE, cache=settings)
    assert (found.values == want.values).all()
