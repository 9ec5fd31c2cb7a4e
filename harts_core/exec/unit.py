"""Run one unit of a plan forward."""

from __future__ import annotations

from torch import Tensor

from harts_core.exec.layout import DeviceLayout, UnitLayout
from harts_core.exec.model.decoder import HybridModel, Recompute, UnitOutput
from harts_core.exec.model.interface import LayerImports


def unit_hidden(
    model: HybridModel,
    layout: UnitLayout | DeviceLayout,
    imports: LayerImports | None = None,
    recompute: Recompute = "none",
) -> Tensor:
    """The final hidden states of a unit's own tokens.

    Args:
        model: the model.
        layout: the unit's layout.
        imports: what the layout needs from other units; None where it needs nothing.
        recompute: "none", or "layer" to trade a second forward for memory.

    Returns:
        hidden_CH [C, hidden_size] in the model dtype, after the final norm, in memory order.
    """
    output: UnitOutput = model(layout, imports, recompute=recompute)
    return output.hidden
