"""Rules of the manifest's parameters and cost model."""

from __future__ import annotations

import math

from harts_core.plan.bundle import PlanBundle
from harts_core.plan.validate.failure import reject
from harts_core.trees.rollout_tree import RolloutTree


def check_manifest(bundle: PlanBundle, tree: RolloutTree) -> None:
    """Parameters are present and of the right kind; dropped rows exist and are listed once, in order."""
    p = bundle.parameters
    for key in ("dp", "capacity", "pad", "chunk", "producer_capacity", "max_live_producers"):
        value = p.get(key, 1 if key in ("producer_capacity", "max_live_producers") else None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise reject(f"{key} must be a positive integer, not {value!r}", f"parameters.{key}")
    if p.get("sharing") not in ("tree", "none", "group"):
        raise reject(f"sharing must be tree, none or group, not {p.get('sharing')!r}", "parameters.sharing")
    slot = p.get("token_wise_from_slot", 0)
    if not isinstance(slot, int) or isinstance(slot, bool) or slot < 0:
        raise reject(f"token_wise_from_slot must be a slot, not {slot!r}", "parameters.token_wise_from_slot")
    dropped = p.get("dropped_rows", [])
    if not isinstance(dropped, list) or not all(type(r) is int and 0 <= r < tree.num_rows for r in dropped):
        raise reject("dropped_rows must list rows of the tree", "parameters.dropped_rows")
    if sorted(set(dropped)) != dropped:
        raise reject("dropped_rows must rise", "parameters.dropped_rows")
    for key in ("alpha_forward", "beta_forward", "alpha_backward", "beta_backward"):
        value = bundle.cost_model.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise reject(f"{key} must be a finite number, not {value!r}", f"cost_model.{key}")
