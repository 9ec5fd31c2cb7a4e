"""Runs a plan's events: unit forwards and backwards, and the interfaces that live between them.

Which event comes when is decided by ``harts_core.plan.schedule``; here each is carried out. A producer is
nothing special: it is a unit without loss whose interface others read. Where whole units are recomputed, a
unit's first forward makes no graph and no loss, only what others read of it; its second does, from the same
imports, right before its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from harts_core.exec.blocks import BlockManager, CacheSettings
from harts_core.exec.config import LinearCalls
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.live_blocks import UnitExport
from harts_core.exec.model.decoder import HybridModel, UnitOutput
from harts_core.exec.model.moe import Routing
from harts_core.exec.parallel.unit_pipe import Transfers, UnitPipe
from harts_core.exec.shared import ExportIndex, UnitImports
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cache_policy.simulate import CacheCounters
from harts_core.plan.recompute import Recompute
from harts_core.plan.schedule.second_forwards import with_second_forwards
from harts_core.plan.schedule.units import Event, UnitLinks, unit_links
from harts_core.trees.rollout_tree import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitForward:
    """A unit that has run forward.

    Attributes:
        layout: the unit's.
        hidden: [C, D], final hidden states of its own rows.
        imported_hidden: those that its head reads of other units; None where it imports nothing.
        routing: one entry per layer with experts.
    """

    layout: UnitLayout
    hidden: Tensor
    imported_hidden: Tensor | None
    routing: tuple[Routing, ...]


LossOf = Callable[[UnitForward], Tensor | None]
"""A unit's own loss: a scalar in its graph, or None where it adds nothing."""


@dataclass(slots=True, kw_only=True)
class ExecutionCounts:
    """What was executed.

    Attributes:
        forwards, backwards: calls by unit, second forwards included. A backward is counted where there was
            something to run back from.
        cache: what happened to the blocks that units keep for others.
        live_interfaces, peak_interfaces: units that keep something for others, now and at most.
        live_bytes: of blocks in fast memory now.
    """

    forwards: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)
    cache: CacheCounters = field(default_factory=CacheCounters)
    live_interfaces: int = 0
    peak_interfaces: int = 0
    live_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LiveUnit:
    """What a unit keeps between its forward and its backward.

    Attributes:
        loss: its own, in the graph.
        export: what others read, and where it is in the graph.
        hidden: the residual stream for the next stage of a pipeline, in the graph.
        received: that from the stage before.
    """

    loss: Tensor | None
    export: UnitExport | None
    hidden: Tensor | None
    received: Tensor | None


class UnitExecutor:
    """Runs units of one plan on one model.

    Args:
        model: the model.
        bundle: a validated plan.
        tree: its rollout tree.
        loss_of: called once per unit, right after the forward that makes its graph.
        events: the forwards, backwards, frees and transfers of this process, in order; without backwards: no
            graphs are made.
        recompute: activations to recompute; of units: ``self.events`` has their second forwards.
        linear_calls: how linear attention is cut into packed calls.
        links: who imports from whom; None: as the plan says.
        lockstep: run every backward through all layers, even where nothing below the last ones has a
            gradient: the layers exchange tokens with those of other ranks.
        cache: how blocks are kept.
        transfers: with the stages before and after, of a model that is one stage of a pipeline.

    Attributes:
        events: everything that ``run`` has to be called with, in order.
    """

    def __init__(
        self,
        model: HybridModel,
        bundle: PlanBundle,
        tree: RolloutTree,
        loss_of: LossOf,
        events: Sequence[Event],
        *,
        recompute: Recompute = "none",
        linear_calls: LinearCalls = "rounds",
        links: UnitLinks | None = None,
        lockstep: bool = False,
        cache: CacheSettings = CacheSettings(),
        transfers: Transfers | None = None,
    ) -> None:
        self.model, self.bundle, self.tree = model, bundle, tree
        self.training = any(event.kind == "backward" for event in events)
        self.loss_of, self.recompute = loss_of, recompute
        self.linear_calls = linear_calls
        self.links: UnitLinks = unit_links(bundle) if links is None else links
        self.lockstep = lockstep
        self.events = with_second_forwards(events, recompute)
        self._recomputed = {event.unit for event in self.events if event.kind == "recompute"}
        self.blocks = BlockManager(model, bundle, tree, self.events, recompute=recompute, settings=cache)
        self.counts = ExecutionCounts(cache=self.blocks.counters)
        self._pipe = UnitPipe(model, transfers)
        self._layouts: dict[int, UnitLayout] = {}
        self._live: dict[int, _LiveUnit] = {}

    def run(self, event: Event) -> None:
        """Carry out the next event."""
        match event.kind:
            case "forward":
                self.blocks.begin(event)
                self._forward(event.unit)
                self.blocks.end()
            case "recompute":
                self.blocks.begin(event)
                self._recompute(event.unit)
                self.blocks.end()
            case "backward":
                self.blocks.begin(event)
                self._backward(event.unit)
                self.blocks.end()
            case "free":
                self._free(event.unit)
            case "receive_activation":
                self._pipe.receive_activation(self._layout(event.unit))
            case "send_activation":
                self._send_activation(event.unit)
            case "receive_gradient":
                self._pipe.receive_gradient(event.unit, self._live[event.unit].hidden)
            case "send_gradient":
                self._pipe.send_gradient(self._live[event.unit].received)
        self._count_interfaces()

    def _layout(self, unit: int) -> UnitLayout:
        """Built when the unit, or one that it imports from, first needs it; kept until the unit is freed."""
        if unit not in self._layouts:
            self._layouts[unit] = build_unit_layout(
                self.bundle, self.tree, unit, linear_calls=self.linear_calls
            )
        return self._layouts[unit]

    def _forward(self, unit: int) -> None:
        """The unit's first forward: without graph and loss if there will be a second."""
        layout, received = self._layout(unit), self._pipe.activation(unit)
        index = self._export_index(layout)
        once = unit not in self._recomputed
        with torch.set_grad_enabled(self.training and once):
            output, loss = self._run_model(layout, index, received, has_loss=once)
        kept = None
        if index is not None and output.interface is not None:
            kept = self.blocks.store(layout, index, output.interface)
        keeps_hidden = not self._pipe.is_last or (self.lockstep and self.training and once)
        self._live[unit] = _LiveUnit(
            loss=loss,
            export=kept,
            hidden=output.hidden if keeps_hidden else None,
            received=received,
        )
        if not once:
            layout.forget_devices()

    def _recompute(self, unit: int) -> None:
        """The unit's second forward: the same values, now with a graph and the loss."""
        first = self._live[unit]
        index = None if first.export is None else first.export.index
        output, loss = self._run_model(self._layout(unit), index, first.received, has_loss=True)
        kept = first.export
        if kept is not None and output.interface is not None:
            kept = kept.in_graph(output.interface)
        keeps_hidden = self.lockstep or not self._pipe.is_last
        self._live[unit] = replace(
            first, loss=loss, export=kept, hidden=output.hidden if keeps_hidden else None
        )

    def _run_model(
        self, layout: UnitLayout, index: ExportIndex | None, received: Tensor | None, *, has_loss: bool
    ) -> tuple[UnitOutput, Tensor | None]:
        """One forward of a unit, with or without its loss."""
        imports = self._imports(layout)
        output: UnitOutput = self.model(
            layout,
            imports,
            recompute=self.recompute if torch.is_grad_enabled() else "none",
            export=None if index is None else index.to(self.model.device),
            received=received,
        )
        self.counts.forwards[layout.unit] = self.counts.forwards.get(layout.unit, 0) + 1
        if not has_loss:
            return output, None
        forward = UnitForward(
            layout=layout,
            hidden=output.hidden,
            imported_hidden=imports.hidden() if imports is not None and self._pipe.is_last else None,
            routing=output.routing,
        )
        return output, self.loss_of(forward)

    def _send_activation(self, unit: int) -> None:
        """To the stage after; a unit that will run forward again keeps no more of it."""
        live = self._live[unit]
        self._pipe.send_activation(live.hidden)
        if unit in self._recomputed:
            self._live[unit] = replace(live, hidden=None)

    def _export_index(self, layout: UnitLayout) -> ExportIndex | None:
        readers = [self._layout(reader) for reader in self.links.importers[layout.unit]]
        return ExportIndex.build(layout, readers) if readers else None

    def _imports(self, layout: UnitLayout) -> UnitImports | None:
        owners = []
        for owner in self.links.owners[layout.unit]:
            kept = self._live[owner].export
            assert kept is not None  # an owner's importers are known before its forward
            owners.append((self._layout(owner), kept))
        return UnitImports(layout, owners, self.model.device) if owners else None

    def _backward(self, unit: int) -> None:
        """One backward from the unit's loss and from what its importers left in its blocks."""
        live = self._live[unit]
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if live.loss is not None:
            roots.append(get_gradient_edge(live.loss))
            gradients.append(torch.ones_like(live.loss))
        if live.export is not None:
            edges, gathered = live.export.gradient_roots()
            live.export.drop_gradients()
            roots += edges
            gradients += gathered
        if live.hidden is not None:
            roots.append(get_gradient_edge(live.hidden))
            gradients.append(self._pipe.gradient(unit, live.hidden))
        if roots:
            torch.autograd.backward(roots, gradients)
            self.counts.backwards[unit] = self.counts.backwards.get(unit, 0) + 1

    def _free(self, unit: int) -> None:
        del self._live[unit]
        self.blocks.forget(unit)
        self._layouts.pop(unit).forget_devices()

    def _count_interfaces(self) -> None:
        counts = self.counts
        counts.live_interfaces = sum(unit.export is not None for unit in self._live.values())
        counts.peak_interfaces = max(counts.peak_interfaces, counts.live_interfaces)
        counts.live_bytes = self.blocks.live_bytes
