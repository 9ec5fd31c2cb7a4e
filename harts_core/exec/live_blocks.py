"""What a unit keeps for later ones while the plan runs: tensors in blocks, and their gradients.

Importers read a block detached, and their backwards add into its gradient, in the order in which they run, in
the state dtype: the gradient takes that form when a second one is added, and the values' own after the last,
to which the sum is rounded anyway. The unit's own backward starts from those gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from harts_core.exec.kda import state_dtype
from harts_core.exec.model.interface import LayerInterface, Table, UnitInterface
from harts_core.exec.shared import ExportIndex, Int64
from harts_core.plan.cache_policy.blocks import Block


class CachedTensors:
    """Tensors that live and move together: a block's values, or its gradient.

    Attributes:
        num_bytes: their size, wherever they are.
    """

    __slots__ = ("_device", "_host", "_tensors", "num_bytes")

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors: list[Tensor] = list(tensors)
        self._host: list[Tensor] = []
        self._device = device
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors)

    @property
    def on_host(self) -> bool:
        """Whether they have been moved out."""
        return bool(self._host)

    def __getitem__(self, i: int) -> Tensor:
        return self._tensors[i]

    def offload(self) -> None:
        """Move them to host buffers: pinned for a GPU, whose copies then do not block; plain otherwise."""
        pinned = self._device.type == "cuda"
        for tensor in self._tensors:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._host.append(buffer.copy_(tensor, non_blocking=pinned))
        self._tensors = []

    def fetch(self) -> None:
        """Bring them back."""
        for buffer in self._host:
            tensor = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            self._tensors.append(tensor.copy_(buffer, non_blocking=True))
        self._host = []

    def convert(self, dtypes: Sequence[torch.dtype]) -> None:
        """Give each tensor, none of them on the host, its dtype."""
        for i, dtype in enumerate(dtypes):
            self._tensors[i] = self._tensors[i].to(dtype)
        self.num_bytes = sum(t.numel() * t.element_size() for t in self._tensors)

    def drop(self) -> None:
        """Free the memory."""
        self._tensors, self._host = [], []


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class LiveBlock:
    """A block of a unit that has run.

    Attributes:
        block: what it holds.
        rows: int64, the owner's rows (states: slots) of each table, in the order of its tensors.
        values: one tensor per exported tensor of the unit.
        shapes, dtypes: theirs, known also when the values are gone.
        gradient: likewise; None before the first backward that adds to it, and in forward-only passes.
        touched: which tensors' gradients have been added to.
    """

    block: Block
    rows: dict[Table, Int64]
    values: CachedTensors
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    gradient: CachedTensors | None = None
    touched: set[int] = field(default_factory=set)

    def add_gradient(self, tensor: int, rows: Tensor, gradient: Tensor) -> None:
        """Add an importer's gradient of some rows of a tensor."""
        assert self.gradient is not None  # made before a backward that reaches it
        self.touched.add(tensor)
        total = self.gradient[tensor]
        total.index_add_(0, rows, gradient.to(total.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportedTensor:
    """What remains of an exported tensor: its form, and its place in the unit's graph (None: in no graph)."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitExport:
    """Everything that a unit exports.

    Attributes:
        index: the exported rows.
        kinds: the interface class of each layer.
        tensors: layer by layer, then the final hidden states.
        first_tensor: of each layer, and of the hidden states.
        blocks: the unit's blocks.
    """

    index: ExportIndex
    kinds: tuple[type[LayerInterface], ...]
    tensors: tuple[ExportedTensor, ...]
    first_tensor: tuple[int, ...]
    blocks: tuple[LiveBlock, ...]

    def read_by(self, unit: int) -> list[LiveBlock]:
        """The blocks that a unit reads."""
        return [live for live in self.blocks if unit in live.block.readers]

    def in_graph(self, interface: UnitInterface) -> UnitExport:
        """The same rows, whose gradients will go into the graph of a second forward that made them again."""
        return replace(self, tensors=exported_tensors(interface))

    def gradient_roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the unit's backward starts, and the gathered gradients there."""
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for i, exported in enumerate(self.tensors):
            touched = [live for live in self.blocks if i in live.touched]
            if exported.edge is None or not touched:
                continue
            rows = self.index.rows[exported.table]
            total = torch.zeros(exported.shape, dtype=state_dtype(exported.dtype), device=exported.device)
            for live in touched:
                assert live.gradient is not None
                own = live.rows[exported.table]
                place = torch.as_tensor(np.searchsorted(rows, own), device=total.device)
                total.index_add_(0, place, live.gradient[i][: len(own)].to(total.dtype))
            edges.append(exported.edge)
            gradients.append(total.to(exported.dtype))
        return edges, gradients

    def drop_gradients(self) -> None:
        """Free the gathered gradients, from which the unit's backward is about to start."""
        for live in self.blocks:
            if live.gradient is not None:
                live.gradient.drop()


def exported_tensors(interface: UnitInterface) -> tuple[ExportedTensor, ...]:
    """What remains of everything that a forward exported: layer by layer, then the final hidden states."""
    tensors = [t for layer in interface.layers for t in layer.tensors()]
    tables = [table for layer in interface.layers for table in layer.TENSOR_TABLES]
    return tuple(
        ExportedTensor(
            edge=get_gradient_edge(tensor) if tensor.requires_grad else None,
            shape=tensor.shape,
            dtype=tensor.dtype,
            device=tensor.device,
            table=table,
        )
        for tensor, table in zip([*tensors, interface.hidden], [*tables, "hidden"], strict=True)
    )
