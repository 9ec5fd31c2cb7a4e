"""Plans whose units import from each other against trajectory-by-trajectory training, in float64.

The trainer runs the whole step: forwards in order, each backward once. The reference runs every trajectory
alone with the plain model of tests/support_model.py. Loss and every parameter gradient must agree to 1e-10.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from harts_core.exec.config import OptimizerSection
from harts_core.exec.model.moe_losses import RouterTerms
from harts_core.exec.objectives import ObjectiveBatch, ObjectiveOutput
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.plan.build import finish_bundle
from harts_core.plan.bundle import PRODUCER, PlanBundle
from harts_core.plan.cost_model import PRESETS
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.plan.windows_layout import ProducerLevel, layout_windows
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import finish_tree
from tests.numerics.test_parity import CONFIGS, TREES, VOCAB, gradients, make_model
from tests.support import tree_from_sequences
from tests.support_model import lively_model, model_weights, reference_logprobs, simple_bundle
from tests.support_windows import chain_bundle, nested_bundle, window_bundle

MODES = ("none", "layer", "unit", "unit+layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """Σ A·λ + tanh(λ): depends on every position in its own way, whichever unit evaluates it."""

    columns = ("advantages",)

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        value = batch.column("advantages") * batch.logprobs + batch.logprobs.tanh()
        return ObjectiveOutput(loss=value.sum())


@functools.cache
def weighted_tree(name: str) -> RolloutTree:
    """A tree of test_parity with an advantage for every trained position."""
    tree = tree_from_sequences(TREES[name], vocab=VOCAB)
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal(n) for n in tree.trained_counts]
    return finish_tree(replace(tree, advantages=Ragged.from_rows(weights, np.float32)), "test")


@functools.cache
def reference(config: str, tree_name: str, *, fresh: bool = False) -> tuple[float, dict[str, Tensor]]:
    tree = weighted_tree(tree_name)
    model = make_model(config, torch.float64, fresh=fresh)
    loss = torch.zeros((), dtype=torch.float64)
    assert tree.advantages is not None
    for row, p in enumerate(reference_logprobs(CONFIGS[config], model_weights(model), tree)):
        loss = loss + (torch.tensor(tree.advantages[row], dtype=p.dtype) * p + p.tanh()).sum()
    return loss.item(), gradients(model, loss)


def train(
    config: str,
    bundle: PlanBundle,
    tree: RolloutTree,
    *,
    recompute: str = "none",
    dtype: torch.dtype,
    fresh: bool = False,
) -> tuple[Trainer, float]:
    model = make_model(config, dtype, fresh=fresh)
    optimizer = Optimizer(model.named_parameters(), OptimizerSection())
    trainer = Trainer(model, Weighted(), optimizer, recompute=recompute, head_block_rows=16)  # type: ignore[arg-type]
    data = trainer.prepare(bundle, tree)
    result = trainer.backward(data)
    counts = result.counts
    assert counts.forwards == expected_forwards(bundle, recompute)
    assert set(counts.backwards.values()) == {1}
    for unit in counts.forwards.keys() - counts.backwards.keys():  # nothing trained depends on it
        rows = bundle.spans.row[bundle.spans.owner == unit]
        assert not tree.trained_counts[rows].any()
    assert counts.live_interfaces == counts.live_bytes == 0
    return trainer, result.loss


def expected_forwards(bundle: PlanBundle, recompute: str) -> dict[int, int]:
    """Where units are recomputed, two of every unit whose backward does not follow its forward at once."""
    forwards = dict.fromkeys(range(bundle.num_units), 1)
    if recompute.startswith("unit"):
        units = [u for d in range(bundle.dp) for u in bundle.units_of_replica(d).tolist()]
        events = unit_events(unit_links(bundle), units)
        passes = [(e.kind, e.unit) for e in events if e.kind != "free"]
        for unit in forwards:
            between = passes.index(("backward", unit)) - passes.index(("forward", unit)) - 1
            forwards[unit] += between > 0
    return forwards


def check(
    config: str,
    tree_name: str,
    bundle: PlanBundle,
    *,
    recompute: str = "none",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
) -> None:
    fresh = dtype == torch.float32  # a lively model amplifies rounding (tests/numerics/test_parity.py)
    trainer, loss = train(
        config, bundle, weighted_tree(tree_name), recompute=recompute, dtype=dtype, fresh=fresh
    )
    expected, want = reference(config, tree_name, fresh=fresh)
    assert loss == pytest.approx(expected, rel=tolerance)
    found = trainer.optimizer.gradients()
    for name, gradient in want.items():
        mine = found.get(name, torch.zeros_like(gradient))
        assert (mine.double() - gradient).abs().max() <= tolerance * gradient.abs().max(), name


def test_router_losses_count_every_original_token() -> None:
    """z-loss, balance loss, loads and bias updates of shared producers equal those of repeated prefixes."""
    tree = weighted_tree("random-1")
    results = []
    for bundle in (
        simple_bundle(tree, sharing="none", chunk=4, units=3),
        nested_bundle(tree, dp=1, slots=4, levels=2, chunk=4, seed=1),
        chain_bundle(tree, units=5, chunk=4),
    ):
        model = lively_model(CONFIGS["moe"], torch.float64)
        optimizer = Optimizer(model.named_parameters(), OptimizerSection(expert_bias_rate=0.01))
        terms = RouterTerms(z_loss_coef=0.3, balance_loss_coef=0.7)
        trainer = Trainer(model, Weighted(), optimizer, router=terms)
        data = trainer.prepare(bundle, tree)
        loss = trainer.backward(data)
        found = {n: g.clone() for n, g in optimizer.gradients().items()}
        trainer.step_on(data)
        results.append((loss, found, [b.clone() for b in model.expert_biases]))
    expected, want, biases = results[0]
    for loss, found, moved in results[1:]:
        assert loss.loss == pytest.approx(expected.loss, rel=1e-10)
        assert loss.metrics == pytest.approx(expected.metrics, rel=1e-10)
        assert all(torch.equal(a, b) for a, b in zip(moved, biases, strict=True))
        for name, gradient in want.items():
            assert (found[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name


SOME_TREES = ("random-0", "inside-chunks", "depth-9", "tiny-pieces", "duplicates-and-prefixes")


@pytest.mark.parametrize("config", ["dense", "moe"])
@pytest.mark.parametrize("tree_name", SOME_TREES)
def test_one_producer(config: str, tree_name: str) -> None:
    tree = weighted_tree(tree_name)
    check(config, tree_name, window_bundle(tree, chunk=4, consumers=3, seed=8))


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize(("tree_name", "dp"), [("random-1", 1), ("chunk-bounds", 2), ("several-roots", 1)])
def test_nested_producers(tree_name: str, dp: int, levels: int) -> None:
    tree = weighted_tree(tree_name)
    bundles = [
        nested_bundle(tree, dp=dp, slots=len(TREES[tree_name]) // (2 * dp), levels=levels, chunk=4, seed=seed)
        for seed in range(3)
    ]
    assert any(np.any(b.units.kind == PRODUCER) for b in bundles)
    if levels > 1 and tree_name == "random-1":
        assert any(producer_importers(b) for b in bundles)
    for i, bundle in enumerate(bundles):
        check("moe" if i else "dense", tree_name, bundle)


def producer_importers(bundle: PlanBundle) -> int:
    """Spans that producers import from other producers."""
    kind, spans = bundle.units.kind, bundle.spans
    return int(np.sum((spans.owner != spans.unit) & (kind[spans.unit] == PRODUCER)))


@pytest.mark.parametrize("recompute", ["unit", "unit+layer"])
@pytest.mark.parametrize(("tree_name", "dp"), [("random-1", 1), ("chunk-bounds", 2)])
def test_whole_units_run_again(tree_name: str, dp: int, recompute: str) -> None:
    """Nested producers of several replicas, and a chain over them all."""
    tree = weighted_tree(tree_name)
    slots = len(TREES[tree_name]) // (2 * dp)
    check(
        "moe",
        tree_name,
        nested_bundle(tree, dp=dp, slots=slots, levels=2, chunk=4, seed=1),
        recompute=recompute,
    )
    check("dense", tree_name, chain_bundle(tree, units=5, chunk=4), recompute=recompute)


@pytest.mark.parametrize("config", ["dense", "moe"])
@pytest.mark.parametrize(("tree_name", "units"), [("random-2", 5), ("depth-9", 4), ("inside-chunks", 7)])
def test_chains_of_consumers(config: str, tree_name: str, units: int) -> None:
    """Trajectories are cut at any token; units import from several earlier ones, which import themselves."""
    bundle = chain_bundle(weighted_tree(tree_name), units=units, chunk=4)
    table = bundle.assignments
    assert len(table) > len(np.unique(table.row))
    check(config, tree_name, bundle)


@pytest.mark.parametrize("recompute", MODES)
def test_chunks_of_64(recompute: str) -> None:
    tree = weighted_tree("chunk-64")
    check(
        "moe", "chunk-64", nested_bundle(tree, dp=1, slots=3, levels=2, chunk=64, seed=1), recompute=recompute
    )
    check("moe", "chunk-64", chain_bundle(tree, units=4, chunk=64), recompute=recompute)


@pytest.mark.parametrize("config", ["dense", "moe"])
def test_float32(config: str) -> None:
    tree = weighted_tree("random-2")
    for bundle in (
        nested_bundle(tree, dp=1, slots=4, levels=2, chunk=16, seed=1),
        chain_bundle(tree, units=4, chunk=16),
    ):
        check(config, "random-2", bundle, dtype=torch.float32, tolerance=1e-5)


@pytest.mark.parametrize("recompute", MODES[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nested", "chain"])
def test_recomputation_gives_the_same_bits(kind: str, dtype: torch.dtype, recompute: str) -> None:
    tree = weighted_tree("random-3")
    if kind == "nested":
        bundle = nested_bundle(tree, dp=1, slots=4, levels=2, chunk=4, seed=2)
    else:
        bundle = chain_bundle(tree, units=4, chunk=4)
    plain, loss = train("moe", bundle, tree, dtype=dtype)
    again, same_loss = train("moe", bundle, tree, dtype=dtype, recompute=recompute)
    assert same_loss == pytest.approx(loss, rel=1e-15)  # units recomputed: added up in backward order
    found = again.optimizer.gradients()
    for name, gradient in plain.optimizer.gradients().items():
        assert torch.equal(found[name], gradient), name


def test_consumers_that_compute_nothing() -> None:
    """A producer that holds whole rows leaves consumers without a token of their own."""
    name = "duplicates-and-prefixes"
    tree = weighted_tree(name)
    everything = [ProducerLevel(window_of_slot=np.zeros(4, int), depth=tree.length)]
    rows = np.arange(tree.num_rows)
    layout = layout_windows(
        tree, dp=1, replica=np.zeros(len(rows), np.int32), slot=(rows % 4).astype(np.int32), levels=everything
    )
    parameters = {"dp": 1, "capacity": 100, "pad": 1, "chunk": 4, "seed": 0}
    bundle = finish_bundle(tree, layout, planner="test", parameters=parameters, cost_model=PRESETS["tokens"])
    assert bundle.units.computed_tokens.tolist() == [30, 0, 0, 0, 0]
    for recompute in MODES:
        check("moe", name, bundle, recompute=recompute)


@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_of_every_planner(planner: str) -> None:
    """Through the planners' own choices of windows, depths and places."""
    if planner == "ortools-ffd":
        pytest.importorskip("ortools")
    producers = 0
    for tree_name, dp in (("random-0", 1), ("random-1", 2), ("chunk-bounds", 1)):
        tree = weighted_tree(tree_name)
        options = PlanOptions(dp=dp, capacity=int(tree.length.max()) + 20, planner=planner, chunk=4)
        bundle = plan_tree(tree, options)
        producers += int(np.sum(bundle.units.kind == PRODUCER))
        check("moe", tree_name, bundle)
    assert (producers > 0) == (planner == "harts")
