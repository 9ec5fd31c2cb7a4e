"""What one unit hands to another: the rows and states of each layer that later units read.

An importing unit sees these tensors as leaves that gather gradients; the exporting unit's backward starts
from them. Shape legend: C own rows, D hidden width, H heads of this rank, K and V head widths, M states,
R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaInterface:
    """One MLA layer: keys [R, H, qk_head_dim], rotated, and values [R, H, v_head_dim]."""

    keys: Tensor
    values: Tensor


LayerInterface = KdaInterface | MlaInterface


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitInterface:
    """All layers of a unit, and the final hidden states [R, D] (after the final norm)."""

    layers: tuple[LayerInterface, ...]
    hidden: Tensor


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
