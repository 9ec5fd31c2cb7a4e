"""Rows that a unit hands to later ones, and the gradients that these leave there.

An exporting unit keeps each exported tensor once, with the rows that some later unit reads. Importers read it
detached; their backwards add into one gradient per tensor, in the order in which they run, in the state
dtype, so that nothing depends on how many importers there are. The exporting unit's own backward then starts
from those gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harts_core.exec.kda import state_dtype
from harts_core.exec.model.interface import TABLES, ExportRows, LayerInterface, Table, UnitInterface

if TYPE_CHECKING:
    from harts_core.exec.layout import UnitLayout

Int64 = npt.NDArray[np.int64]


def needed_rows(importer: UnitLayout, owner: UnitLayout, table: Table) -> tuple[Int64, Int64]:
    """What one unit reads of another in one table.

    Returns:
        int64, places in the importer's table, increasing; and the owner's row (``states``: slot) of each.
    """
    need = importer.imported
    if table == "states":
        at = [i for i, key in enumerate(need.states) if key[0] == owner.unit]
        slots = [owner.state_slots[need.states[i]] for i in at]
        return np.array(at, np.int64), np.array(slots, np.int64)
    tokens: Int64 = getattr(need, table)
    places = np.flatnonzero(need.unit[tokens] == owner.unit)
    tokens = tokens[places]
    span = need.span[tokens]
    return places, owner.span_row[span] + need.position[tokens] - owner.span_start[span]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportIndex:
    """The rows of each table that some importer reads: int64, increasing, distinct."""

    rows: dict[Table, Int64]

    @classmethod
    def build(cls, owner: UnitLayout, importers: Sequence[UnitLayout]) -> ExportIndex:
        """The union over the importers."""
        rows: dict[Table, Int64] = {}
        for table in TABLES:
            wanted = [needed_rows(importer, owner, table)[1] for importer in importers]
            rows[table] = np.unique(np.concatenate([np.empty(0, np.int64), *wanted]))
        return cls(rows=rows)

    def to(self, device: torch.device) -> ExportRows:
        """As the model takes it."""
        return ExportRows(**{name: torch.tensor(rows, device=device) for name, rows in self.rows.items()})


class SharedTensor:
    """One exported tensor.

    Attributes:
        exported: in the exporting unit's graph (forward only: without a graph).
        values: the same values, detached: what importers read.
        gradient: the importers' gradients so far, in the state dtype; None before the first.
    """

    __slots__ = ("__weakref__", "exported", "gradient", "values")

    def __init__(self, exported: Tensor) -> None:
        self.exported = exported
        self.values = exported.detach()
        self.gradient: Tensor | None = None

    def add_gradient(self, rows: Tensor, gradient: Tensor) -> None:
        """Add an importer's gradient of some rows."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.values, dtype=state_dtype(self.values.dtype))
        self.gradient.index_add_(0, rows, gradient.to(self.gradient.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of the values and the gradient."""
        return sum(t.numel() * t.element_size() for t in (self.values, self.gradient) if t is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedInterface:
    """Everything that a unit exports.

    Attributes:
        index: the exported rows.
        kinds: the interface class of each layer.
        layers: each layer's tensors, in the order of its class's ``tensors``.
        hidden: the final hidden states.
    """

    index: ExportIndex
    kinds: tuple[type[LayerInterface], ...]
    layers: tuple[tuple[SharedTensor, ...], ...]
    hidden: SharedTensor

    @classmethod
    def of(cls, index: ExportIndex, interface: UnitInterface) -> SharedInterface:
        """Share what a unit's forward exported."""
        return cls(
            index=index,
            kinds=tuple(type(layer) for layer in interface.layers),
            layers=tuple(tuple(map(SharedTensor, layer.tensors())) for layer in interface.layers),
            hidden=SharedTensor(interface.hidden),
        )

    def tensors(self) -> tuple[SharedTensor, ...]:
        """All of them, layer by layer."""
        return *(tensor for layer in self.layers for tensor in layer), self.hidden

    @property
    def num_bytes(self) -> int:
        """Bytes of all values and gathered gradients."""
        return sum(tensor.num_bytes for tensor in self.tensors())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Source:
    """One owner's part of a table: which owner, places in the importer's table, rows of the exported one."""

    owner: int
    places: Tensor
    rows: Tensor


class UnitImports:
    """What one unit reads of the units before it (``LayerImports``).

    Args:
        layout: the importing unit's.
        owners: layout and interface of every unit that it imports from.
        device: of the model.
    """

    def __init__(
        self,
        layout: UnitLayout,
        owners: Sequence[tuple[UnitLayout, SharedInterface]],
        device: torch.device,
    ) -> None:
        self._kinds = owners[0][1].kinds
        self._interfaces = [interface for _, interface in owners]
        self._anchor = torch.zeros((), requires_grad=True, device=device)
        self._sources: dict[Table, list[_Source]] = {table: [] for table in TABLES}
        for table in TABLES:
            for i, (owner_layout, interface) in enumerate(owners):
                places, rows = needed_rows(layout, owner_layout, table)
                if len(places):
                    found = np.searchsorted(interface.index.rows[table], rows)
                    source = _Source(
                        owner=i,
                        places=torch.tensor(places, device=device),
                        rows=torch.tensor(found, device=device),
                    )
                    self._sources[table].append(source)

    def layer(self, index: int) -> LayerInterface:
        """The rows and states of one layer, in the order of the importing unit's layout."""
        kind = self._kinds[index]
        tensors = [
            self._gather(table, [interface.layers[index][i] for interface in self._interfaces])
            for i, table in enumerate(kind.TENSOR_TABLES)
        ]
        return kind.from_tensors(tensors)

    def hidden(self) -> Tensor:
        """The final hidden states that the head reads."""
        return self._gather("hidden", [interface.hidden for interface in self._interfaces])

    def _gather(self, table: Table, tensors: list[SharedTensor]) -> Tensor:
        """The table's rows; ``tensors`` has one entry per owner."""
        pieces = [(tensors[s.owner], s.places, s.rows) for s in self._sources[table]]
        if not pieces:
            return tensors[0].values[:0]
        gathered: Tensor = _Gather.apply(self._anchor, pieces)  # type: ignore[no-untyped-call]
        return gathered


class _Gather(torch.autograd.Function):
    """Rows of shared tensors; the backward adds to their gradients, and so ends there.

    The anchor only makes the result part of a graph: the shared tensors themselves are outside every graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pieces: list[tuple[SharedTensor, Tensor, Tensor]]) -> Tensor:
        ctx.pieces = pieces
        if len(pieces) == 1:
            tensor, _, rows = pieces[0]  # one owner gives the whole table, in order
            return tensor.values.index_select(0, rows)
        values = pieces[0][0].values
        out = values.new_empty(sum(len(rows) for _, _, rows in pieces), *values.shape[1:])
        for tensor, places, rows in pieces:
            out.index_copy_(0, places, tensor.values.index_select(0, rows))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        for tensor, places, rows in ctx.pieces:
            part = grads[0] if len(ctx.pieces) == 1 else grads[0].index_select(0, places)
            tensor.add_gradient(rows, part)
        return None, None
