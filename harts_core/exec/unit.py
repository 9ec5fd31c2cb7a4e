"""Run one unit of a plan forward."""

from __future__ import annotations

from torch import Tensor

from harts_core.exec.layout import DeviceLayout, UnitLayout
from harts_core.exec.model.decoder import HybridModel, UnitOutput
from harts_core.exec.model.interface import LayerImports
from harts_core.plan.recompute import Recompute


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
        recompute: whether layers run again in the backward pass, to trade their second forward for memory.

    Returns:
        hidden_CH [C, hidden_size] in the model dtype, after the final norm, in memory order.
    """
    output: UnitOutput = model(layout, imports, recompute=recompute)
    return output.hidden
