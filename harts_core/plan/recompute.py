"""Which activations a training step computes again in its backward passes, instead of keeping them."""

from __future__ import annotations

from typing import Literal

Recompute = Literal["none", "layer", "unit", "unit+layer"]
"""``layer``: a layer keeps its input and runs again in the backward pass. ``unit``: a unit keeps what later
units import, and its whole forward runs again right before its backward. ``unit+layer``: both."""


def recomputes_layers(recompute: Recompute) -> bool:
    """Whether the backward pass runs each layer again, and so reads what the unit imports once more."""
    return recompute in ("layer", "unit+layer")


def recomputes_units(recompute: Recompute) -> bool:
    """Whether a unit that waits for its backward keeps no graph, and runs forward again before it."""
    return recompute in ("unit", "unit+layer")
