"""Which rows a unit hands to later ones, and how these read them out of its blocks.

Importers read a block's values detached; their backwards add into its gradient
(``harts_core.exec.live_blocks``), so that nothing depends on how many importers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harts_core.exec.model.interface import TABLES, ExportRows, LayerInterface, Table

if TYPE_CHECKING:
    from harts_core.exec.layout import UnitLayout
    from harts_core.exec.live_blocks import LiveBlock, UnitExport

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Source:
    """One block's part of a table: places in the importer's table, and rows of the block's tensors."""

    block: LiveBlock
    places: Tensor
    rows: Tensor


class UnitImports:
    """What one unit reads of the units before it (``LayerImports``).

    Args:
        layout: the importing unit's.
        owners: layout and export of every unit that it imports from.
        device: of the model.
    """

    def __init__(
        self,
        layout: UnitLayout,
        owners: Sequence[tuple[UnitLayout, UnitExport]],
        device: torch.device,
    ) -> None:
        self._export = owners[0][1]  # all have tensors of the same kinds
        self._anchor = torch.zeros((), requires_grad=True, device=device)
        self._sources: dict[Table, list[_Source]] = {table: [] for table in TABLES}
        for table in TABLES:
            for owner_layout, export in owners:
                places, rows = needed_rows(layout, owner_layout, table)
                if len(places):
                    self._sources[table] += _sources(export.read_by(layout.unit), table, places, rows, device)

    def layer(self, index: int) -> LayerInterface:
        """The rows and states of one layer, in the order of the importing unit's layout."""
        first = self._export.first_tensor[index]
        kind = self._export.kinds[index]
        return kind.from_tensors([self._gather(first + i) for i in range(len(kind.TENSOR_TABLES))])

    def hidden(self) -> Tensor:
        """The final hidden states that the head reads."""
        return self._gather(len(self._export.tensors) - 1)

    def _gather(self, tensor: int) -> Tensor:
        """The rows of one exported tensor."""
        exported = self._export.tensors[tensor]
        sources = self._sources[exported.table]
        if not sources:
            return torch.empty(0, *exported.shape[1:], dtype=exported.dtype, device=exported.device)
        gathered: Tensor = _Gather.apply(self._anchor, sources, tensor)  # type: ignore[no-untyped-call]
        return gathered


def _sources(
    blocks: Sequence[LiveBlock], table: Table, places: Int64, rows: Int64, device: torch.device
) -> list[_Source]:
    """Where an owner's rows are; a row that several blocks hold is read from the first."""
    lengths = [len(live.rows[table]) for live in blocks]
    held = np.concatenate([live.rows[table] for live in blocks])
    order = np.argsort(held, kind="stable")
    found = order[np.searchsorted(held[order], rows)]
    first = np.concatenate([[0], np.cumsum(lengths)])
    block = np.searchsorted(first, found, side="right") - 1
    sources = []
    for b in np.unique(block).tolist():
        mine = block == b
        sources.append(
            _Source(
                block=blocks[b],
                places=torch.tensor(places[mine], device=device),
                rows=torch.tensor(found[mine] - first[b], device=device),
            )
        )
    return sources


class _Gather(torch.autograd.Function):
    """Rows of cached tensors; the backward adds to the blocks' gradients, and so ends there.

    The anchor only makes the result part of a graph: the cached tensors themselves are outside every graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, sources: list[_Source], tensor: int) -> Tensor:
        ctx.sources, ctx.tensor = sources, tensor
        if len(sources) == 1:
            (source,) = sources  # one block gives the whole table, in order
            return source.block.values[tensor].index_select(0, source.rows)
        values = sources[0].block.values[tensor]
        out = values.new_empty(sum(len(s.rows) for s in sources), *values.shape[1:])
        for s in sources:
            out.index_copy_(0, s.places, s.block.values[tensor].index_select(0, s.rows))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        for s in ctx.sources:
            part = grads[0] if len(ctx.sources) == 1 else grads[0].index_select(0, s.places)
            s.block.add_gradient(ctx.tensor, s.rows, part)
        return None, None, None
