"""Units that import: one producer forward, consumers on its interface, one producer backward at the end."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from harts_core.errors import ExecError
from harts_core.exec.head import unit_logprobs
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.interface import ExportRows, KdaInterface, MlaInterface, UnitInterface
from harts_core.plan.validate import validate_plan
from tests.numerics.test_parity import CONFIGS, linear_loss, reference, tree_of
from tests.support_model import lively_model
from tests.support_windows import window_bundle

Pairs = list[tuple[Tensor, Tensor]]


def needed(consumer: UnitLayout, producer: UnitLayout) -> ExportRows:
    """What one consumer imports, as rows of the producer."""
    need = consumer.imported

    def rows(index: np.ndarray) -> Tensor:
        found = [producer.row_of(int(need.span[i]), int(need.position[i])) for i in index]
        return torch.tensor(found, dtype=torch.int64)

    return ExportRows(
        conv=rows(need.conv),
        replay=rows(need.replay),
        keys=rows(need.keys),
        hidden=rows(need.hidden),
        states=torch.tensor([producer.state_slots[key] for key in need.states], dtype=torch.int64),
    )


def together(requests: list[ExportRows]) -> ExportRows:
    names = [f.name for f in fields(ExportRows)]
    return ExportRows(**{name: torch.cat([getattr(r, name) for r in requests]) for name in names})


def leaves(exported: UnitInterface, requests: list[ExportRows]) -> tuple[list[UnitInterface], Pairs]:
    """Each consumer's part of the interface as leaves, and (exported part, leaf) pairs."""
    pairs: Pairs = []

    def parts(x: Tensor, name: str) -> list[Tensor]:
        mine = x.split([len(getattr(r, name)) for r in requests])
        leaf = [part.detach().requires_grad_() for part in mine]
        pairs.extend(zip(mine, leaf, strict=True))
        return leaf

    layers: list[list[KdaInterface | MlaInterface]] = []
    for layer in exported.layers:
        if isinstance(layer, MlaInterface):
            both = zip(parts(layer.keys, "keys"), parts(layer.values, "keys"), strict=True)
            layers.append([MlaInterface(keys=k, values=v) for k, v in both])
            continue
        conv = zip(*(parts(x, "conv") for x in layer.conv), strict=True)
        replay = zip(*(parts(x, "replay") for x in layer.replay), strict=True)
        states = parts(layer.states, "states")
        layers.append(
            [KdaInterface(conv=c, replay=r, states=s) for c, r, s in zip(conv, replay, states, strict=True)]
        )
    hidden = parts(exported.hidden, "hidden")
    return [UnitInterface(layers=mine, hidden=h) for *mine, h in zip(*layers, hidden, strict=True)], pairs


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("tree_name", ["random-0", "inside-chunks", "depth-9", "tiny-pieces"])
def test_producer_and_consumers(tree_name: str, recompute: str) -> None:
    tree = tree_of(tree_name)
    bundle = window_bundle(tree, chunk=4, consumers=3, seed=8)
    validate_plan(bundle, tree)
    producer, *consumers = (build_unit_layout(bundle, tree, unit) for unit in range(bundle.num_units))
    requests = [needed(layout, producer) for layout in consumers]
    imported = {f.name for f in fields(ExportRows) if any(len(getattr(r, f.name)) for r in requests)}
    reaches_boundary = tree_name != "tiny-pieces"
    assert imported == {"conv", "replay", "keys", "hidden"} | ({"states"} if reaches_boundary else set())

    model = lively_model(CONFIGS["moe"], torch.float64)
    exported = model(producer, recompute=recompute, export=together(requests)).interface
    interfaces, pairs = leaves(exported, requests)
    rows: list[Tensor] = [torch.zeros(0)] * tree.num_rows
    for layout, imports in zip(consumers, interfaces, strict=True):
        hidden = model(layout, imports, recompute=recompute).hidden
        values = unit_logprobs(model, hidden, layout, imported_hidden=imports.hidden)
        names, counts = np.unique(layout.trained_row, return_counts=True)
        for row, part in zip(names, values.split(counts.tolist()), strict=True):
            rows[row] = part
    loss = linear_loss(rows)
    loss.backward()
    roots = [(x, leaf.grad) for x, leaf in pairs if leaf.grad is not None]
    torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])

    expected, want = reference("moe", tree_name)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (found - want[name]).abs().max() <= 1e-10 * want[name].abs().max(), name


def test_forgotten_imports_are_an_error() -> None:
    tree = tree_of("random-0")
    bundle = window_bundle(tree, chunk=4, consumers=3, seed=8)
    layout = build_unit_layout(bundle, tree, 1)
    model = lively_model(CONFIGS["dense"], torch.float32)
    with pytest.raises(ExecError, match="nothing was imported") as caught:
        model(layout)
    assert "unit 1" in str(caught.value)
    with pytest.raises(ExecError, match="final hidden states"):
        unit_logprobs(model, torch.zeros(layout.num_rows, 32), layout)
