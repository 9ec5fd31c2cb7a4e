"""Nothing lives past its window: interfaces, graphs and layouts are gone when a unit is freed, without a
garbage collector's help."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts_core.exec.head import unit_logprobs
from harts_core.exec.layout import UnitLayout
from harts_core.exec.model.config import PRESETS, ModelConfig
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.model.spec import LOCAL_SPEC, Stage
from harts_core.exec.windows import UnitExecutor, UnitForward
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.schedule.pipeline import pipeline_schedule
from harts_core.plan.schedule.units import unit_events, unit_links
from tests.support_train import random_tree
from tests.support_windows import chain_bundle, nested_bundle

TINY = ModelConfig.from_dict(
    PRESETS["cpu-moe"].to_dict() | {"num_hidden_layers": 2, "layer_group_size": 2, "vocab_size": 200}
)
TREE = random_tree(5, num_rows=14)
PLANS = {
    "nested": nested_bundle(TREE, dp=1, slots=5, levels=2, chunk=4, seed=3),
    "chain": chain_bundle(TREE, units=5, chunk=4),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    checkpoint(torch.neg, torch.zeros(1), use_reentrant=False)  # its first call imports, leaving cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("recompute", ["none", "layer", "unit", "unit+layer"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_freed_unit_leaves_nothing(plan: str, recompute: str, training: bool) -> None:
    bundle: PlanBundle = PLANS[plan]
    model = HybridModel(TINY, dtype=torch.float32, seed=0)
    kept: dict[int, list[weakref.ref[object]]] = {}

    def loss_of(forward: UnitForward) -> Tensor | None:
        layout: UnitLayout = forward.layout
        assert layout.unit not in kept  # evaluated once
        kept[layout.unit] = [weakref.ref(forward.hidden), weakref.ref(layout.tokens)]
        values = unit_logprobs(model, forward.hidden, layout, imported_hidden=forward.imported_hidden)
        kept[layout.unit].append(weakref.ref(values))
        return values.sum() if len(values) else None

    links = unit_links(bundle)
    events = unit_events(links, bundle.units_of_replica(0).tolist(), training=training)
    executor = UnitExecutor(model, bundle, TREE, loss_of, events, recompute=recompute)  # type: ignore[arg-type]
    second = {event.unit for event in executor.events if event.kind == "recompute"}
    assert bool(second) == (training and recompute.startswith("unit"))
    blocks: dict[int, list[weakref.ref[object]]] = {}
    for event in executor.events:
        executor.run(event)
        if event.kind in ("forward", "recompute"):
            export = executor._live[event.unit].export
            assert (export is not None) == bool(links.importers[event.unit])
            has_graph = training and (event.unit not in second or event.kind == "recompute")
            assert (event.unit in kept) == (has_graph or not training)
            if export is not None:
                assert all((t.edge is not None) == has_graph for t in export.tensors if t.shape[0])
                blocks[event.unit] = [weakref.ref(live) for live in export.blocks]
            del export
        elif event.kind == "free":
            refs = kept.pop(event.unit) + blocks.pop(event.unit, [])
            alive = [ref() for ref in refs if ref() is not None]
            assert not alive, (event, [type(x) for x in alive])
        assert executor.counts.live_interfaces == len(blocks)
        if recompute.startswith("unit") and training:
            assert len(kept) <= 1  # the graph of one unit
    assert not kept
    assert executor.counts.live_bytes == 0
    assert executor.counts.cache == executor.blocks.simulated
    assert executor.counts.cache.peak_bytes > 0
    assert executor.counts.peak_interfaces >= 2


def test_gradients_arrive_once_and_add_up() -> None:
    """What importers leave in an interface is the gradient of the sum of their losses."""
    bundle = PLANS["nested"]
    model = HybridModel(TINY, dtype=torch.float64, seed=0)
    events = unit_events(unit_links(bundle), bundle.units_of_replica(0).tolist())
    executor = UnitExecutor(
        model,
        bundle,
        TREE,
        lambda f: (
            f.hidden.square().sum() if len(f.hidden) and not executor.links.importers[f.layout.unit] else None
        ),
        events,
    )
    for event in events:
        if event.kind == "backward" and executor.links.importers[event.unit]:
            export = executor._live[event.unit].export
            assert export is not None
            edges, gradients = export.gradient_roots()
            assert len(edges) == len(gradients) > 0
            assert all(bool(torch.isfinite(g).all()) for g in gradients)
            del export, edges, gradients
        executor.run(event)
    assert set(executor.counts.forwards.values()) == {1}
    assert set(executor.counts.backwards.values()) == {1}


class NoNeighbour:
    """The stage after the first of two: takes everything, and returns gradients of ones."""

    def receive_activation(self, like: Tensor) -> Tensor:
        raise AssertionError("the first stage has its tokens")

    def send_activation(self, value: Tensor) -> None:
        pass

    def receive_gradient(self, like: Tensor) -> Tensor:
        return torch.ones_like(like)

    def send_gradient(self, value: Tensor) -> None:
        raise AssertionError("there is no stage before")


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("plan", PLANS)
def test_a_stage_that_runs_again_keeps_no_output(plan: str) -> None:
    """Of the first forward on the first of two stages: neither the residual stream that was sent nor the
    index tensors; both come again with the second."""
    bundle: PlanBundle = PLANS[plan]
    spec = replace(LOCAL_SPEC, stage=Stage(0, 2))
    model = HybridModel(TINY, dtype=torch.float32, spec=spec, seed=0)
    schedule = pipeline_schedule(bundle, num_stages=2, replica=0)
    executor = UnitExecutor(
        model,
        bundle,
        TREE,
        lambda forward: None,
        schedule.stages[0],
        recompute="unit",
        transfers=NoNeighbour(),
    )
    second = {event.unit for event in executor.events if event.kind == "recompute"}
    assert second
    again: set[int] = set()
    for event in executor.events:
        executor.run(event)
        again |= {event.unit} if event.kind == "recompute" else set()
        if event.kind in ("send_activation", "recompute"):
            has_graph = event.unit not in second or event.unit in again
            assert (executor._live[event.unit].hidden is not None) == has_graph
            assert bool(executor._layouts[event.unit]._devices) == has_graph
    assert again == second
