"""What one unit hands to another: the rows and states of each layer that later units read.

An importing unit sees these tensors as leaves that gather gradients; the exporting unit's backward starts
from them (``harts_core.exec.shared``). Shape legend: D hidden width, H heads of this rank, K and V head
widths, M states, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import Tensor

Table = Literal["conv", "replay", "keys", "hidden", "states"]
TABLES: tuple[Table, ...] = ("conv", "replay", "keys", "hidden", "states")
"""Kinds of rows that are handed over; each reaches other tokens (``ImportedRows``, ``ExportRows``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaInterface:
    """One KDA layer.

    Attributes:
        conv: inputs of the q, k and v convolutions, [R, H·K] each.
        replay: k [R, H, K], v [R, H, V], log gate [R, H, K] and β [R, H] of rows to be replayed.
        states: boundary states [M, H, K, V].
    """

    conv: tuple[Tensor, Tensor, Tensor]
    replay: tuple[Tensor, Tensor, Tensor, Tensor]
    states: Tensor
    TENSOR_TABLES: ClassVar[tuple[Table, ...]] = (*("conv",) * 3, *("replay",) * 4, "states")

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors; ``TENSOR_TABLES`` names the table of each."""
        return *self.conv, *self.replay, self.states

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> KdaInterface:
        """The inverse of ``tensors``."""
        q, k, v, replay_k, replay_v, g, beta, states = tensors
        return cls(conv=(q, k, v), replay=(replay_k, replay_v, g, beta), states=states)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaInterface:
    """One MLA layer: keys [R, H, qk_head_dim], rotated, and values [R, H, v_head_dim]."""

    keys: Tensor
    values: Tensor
    TENSOR_TABLES: ClassVar[tuple[Table, ...]] = ("keys", "keys")

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors; ``TENSOR_TABLES`` names the table of each."""
        return self.keys, self.values

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> MlaInterface:
        """The inverse of ``tensors``."""
        keys, values = tensors
        return cls(keys=keys, values=values)


LayerInterface = KdaInterface | MlaInterface


class LayerImports(Protocol):
    """What a unit imports, layer by layer; asked inside the layer, so that recomputation asks again."""

    def layer(self, index: int) -> LayerInterface:
        """The rows and states of one layer, in the order of the importing unit's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitInterface:
    """All layers of a unit, and the final hidden states [R, D] (after the final norm)."""

    layers: tuple[LayerInterface, ...]
    hidden: Tensor

    def layer(self, index: int) -> LayerInterface:
        """The rows and states of one layer."""
        return self.layers[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRows:
    """Which of its own rows and states a unit exports.

    Attributes:
        conv, replay, keys, hidden: int64, own rows, for each table of the interface.
        states: int64, state slots of the unit's layout.
    """

    conv: Tensor
    replay: Tensor
    keys: Tensor
    hidden: Tensor
    states: Tensor
