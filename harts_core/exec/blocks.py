"""The block manager: what units keep for later ones, in blocks that are freed after their last use.

What exists when is known before the first unit runs (``harts_core.plan.cache_policy``); here the simulated
actions are carried out on tensors, and the counters are measured on them. A unit's exported rows are copied
into their blocks once; the unit's graph is kept through an edge, not through the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts_core.exec.cache_bytes import cache_row_bytes
from harts_core.exec.config import Dtype, RuntimeSection
from harts_core.exec.kda import state_dtype
from harts_core.exec.layout import UnitLayout
from harts_core.exec.live_blocks import CachedTensors, ExportedTensor, LiveBlock, UnitExport, exported_tensors
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.model.interface import TABLES, Table, UnitInterface
from harts_core.exec.shared import ExportIndex, Int64
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cache_policy.blocks import Block, cache_blocks
from harts_core.plan.cache_policy.simulate import CacheCounters, simulate
from harts_core.plan.cache_policy.trace import block_sizes, cache_trace
from harts_core.plan.recompute import Recompute, recomputes_layers
from harts_core.plan.schedule.units import Event
from harts_core.trees.rollout_tree import RolloutTree

_DTYPES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How blocks are kept.

    Attributes:
        budget_bytes: fast memory for blocks; None: no limit.
        block_tokens: a fixed block size, to compare with; None: adaptive.
    """

    budget_bytes: int | None = None
    block_tokens: int | None = None

    @classmethod
    def of(cls, runtime: RuntimeSection) -> CacheSettings:
        """As ``[runtime]`` says, where 0 stands for no limit and for adaptive blocks."""
        return cls(
            budget_bytes=runtime.memory_budget_bytes or None, block_tokens=runtime.cache_block_tokens or None
        )


class BlockManager:
    """Keeps the blocks of one run of events.

    Args:
        model: its shape, dtype and device are used.
        bundle: a validated plan.
        tree: its rollout tree.
        events: all events that will come, in order, second forwards included.
        recompute: with layers, backwards read the values again.
        settings: budget and block size.
    """

    def __init__(
        self,
        model: HybridModel,
        bundle: PlanBundle,
        tree: RolloutTree,
        events: Sequence[Event],
        *,
        recompute: Recompute,
        settings: CacheSettings,
    ) -> None:
        self._device, self._bundle = model.device, bundle
        blocks = cache_blocks(bundle, settings.block_tokens)
        row_bytes = cache_row_bytes(
            model.config,
            _DTYPES[model.dtype],
            tensor_parallel=model.spec.tensor_parallel,
            layers=model.spec.stage.layers(model.config.num_hidden_layers),
            has_head=model.spec.stage.is_last,
        )
        sizes = block_sizes(bundle, blocks, row_bytes, tree)
        self._trace = cache_trace(blocks, sizes, events, reread=recomputes_layers(recompute))
        self._run = simulate(self._trace, budget=settings.budget_bytes)
        self._budget = settings.budget_bytes
        self._blocks = blocks.blocks
        self._needed: list[list[int]] = [[] for _ in self._trace.passes]
        for i, item in enumerate(self._trace.objects):
            for use in item.uses:
                self._needed[use].append(i)
        self._at = 0
        self._live: dict[int, LiveBlock] = {}
        self._cached: dict[int, CachedTensors] = {}
        self.counters = CacheCounters()

    @property
    def simulated(self) -> CacheCounters:
        """What the simulation says that the counters will be."""
        return self._run.counters

    @property
    def live_bytes(self) -> int:
        """Bytes in fast memory now."""
        return sum(c.num_bytes for c in self._cached.values() if not c.on_host)

    def begin(self, event: Event) -> None:
        """Before a pass: move blocks, and make the gradients that a backward will add to."""
        assert event == self._trace.passes[self._at], (event, self._trace.passes[self._at])
        actions, counters = self._run.actions[self._at], self.counters
        for i in self._needed[self._at]:
            if i in self._cached:
                if self._cached[i].on_host:
                    counters.miss_bytes += self._cached[i].num_bytes
                else:
                    counters.hit_bytes += self._cached[i].num_bytes
        for i in actions.offload:
            self._cached[i].offload()
            counters.offloaded_bytes += self._cached[i].num_bytes
        for i in (*actions.fetch, *actions.prefetch):
            self._cached[i].fetch()
        for i in actions.widen:
            before = self._cached[i].num_bytes
            self._cached[i].convert([state_dtype(d) for d in self._dtypes_of(i)])
            counters.allocated_bytes += self._cached[i].num_bytes - before
        counters.prefetched_bytes += sum(self._cached[i].num_bytes for i in actions.prefetch)
        if event.kind == "backward":
            for i in actions.create:
                live = self._live[self._trace.objects[i].block]
                live.gradient = self._new_gradient(live)
                self._keep(i, live.gradient)
            self._measure_peak()

    def store(self, layout: UnitLayout, index: ExportIndex, interface: UnitInterface) -> UnitExport:
        """In a unit's first forward: put what it exported into blocks."""
        parts = [layer.tensors() for layer in interface.layers]
        exported = exported_tensors(interface)
        values = [t.detach() for part in parts for t in part] + [interface.hidden.detach()]
        blocks = [
            self._store_block(i, layout, index, exported, values) for i in self._run.actions[self._at].create
        ]
        self._measure_peak()
        return UnitExport(
            index=index,
            kinds=tuple(type(layer) for layer in interface.layers),
            tensors=exported,
            first_tensor=tuple(np.cumsum([0, *map(len, parts)]).tolist()),
            blocks=tuple(blocks),
        )

    def end(self) -> None:
        """After a pass: free what nobody will read again; sums that are complete need less."""
        for i in self._run.actions[self._at].narrow:
            self._cached[i].convert(self._dtypes_of(i))
        for i in self._run.actions[self._at].free:
            self._cached.pop(i).drop()
        self._at += 1

    def forget(self, unit: int) -> None:
        """Drop what is known of a unit's blocks, when the unit itself is freed."""
        for block in [b for b, live in self._live.items() if live.block.owner == unit]:
            del self._live[block]

    def _store_block(
        self,
        i: int,
        layout: UnitLayout,
        index: ExportIndex,
        exported: Sequence[ExportedTensor],
        values: Sequence[Tensor],
    ) -> LiveBlock:
        number = self._trace.objects[i].block
        block = self._blocks[number]
        rows = _block_rows(int(self._bundle.span_offsets[layout.unit]), layout, index, block)
        tensors = [
            _block_values(tensor, index.rows[e.table], rows[e.table], _room(block, e.table, rows))
            for tensor, e in zip(values, exported, strict=True)
        ]
        live = LiveBlock(
            block=block,
            rows=rows,
            values=CachedTensors(tensors, self._device),
            shapes=tuple(t.shape for t in tensors),
            dtypes=tuple(t.dtype for t in tensors),
        )
        self._live[number] = live
        self._keep(i, live.values)
        return live

    def _new_gradient(self, live: LiveBlock) -> CachedTensors:
        forms = zip(live.shapes, live.dtypes, strict=True)
        return CachedTensors(
            [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in forms], self._device
        )

    def _dtypes_of(self, i: int) -> tuple[torch.dtype, ...]:
        """Those of the values of an object's block."""
        return self._live[self._trace.objects[i].block].dtypes

    def _keep(self, i: int, tensors: CachedTensors) -> None:
        self._cached[i] = tensors
        self.counters.allocated_bytes += tensors.num_bytes

    def _measure_peak(self) -> None:
        used, counters = self.live_bytes, self.counters
        counters.peak_bytes = max(counters.peak_bytes, used)
        if self._budget is not None:
            counters.over_budget_bytes = max(counters.over_budget_bytes, used - self._budget)


def _block_rows(first_line: int, layout: UnitLayout, index: ExportIndex, block: Block) -> dict[Table, Int64]:
    """The exported rows (states: slots) of each table that belong to a block; ``first_line`` of the unit."""
    found: dict[Table, list[Int64]] = {table: [] for table in TABLES}
    exported_slots = set(index.rows["states"].tolist())
    for line, start, stop in block.runs:
        span = line - first_line
        first = int(layout.span_row[span]) + start - int(layout.span_start[span])
        for table in TABLES:
            if table == "states":
                slots = [
                    slot
                    for (_, s, position), slot in layout.state_slots.items()
                    if s == span and start < position <= stop and slot in exported_slots
                ]
                found[table].append(np.array(slots, np.int64))
            else:
                rows = index.rows[table]
                low, high = np.searchsorted(rows, [first, first + stop - start])
                found[table].append(rows[low:high])
    return {table: np.concatenate(rows) for table, rows in found.items()}


def _room(block: Block, table: Table, rows: dict[Table, Int64]) -> int:
    """Rows of a block's tensor: keys and values have room for the whole block."""
    count = len(rows[table])
    return block.allocated_tokens if table == "keys" and count else count


def _block_values(tensor: Tensor, exported: Int64, rows: Int64, room: int) -> Tensor:
    """A block's rows of an exported tensor, with zeros up to ``room``; the tensor itself if they are all."""
    if room == len(rows) and np.array_equal(rows, exported):
        return tensor
    place = torch.as_tensor(np.searchsorted(exported, rows), device=tensor.device)
    if room == len(rows):
        return tensor.index_select(0, place)
    values = tensor.new_zeros(room, *tensor.shape[1:])
    values[: len(rows)] = tensor.index_select(0, place)
    return values
