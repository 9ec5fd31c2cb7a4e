"""From a layout to a complete plan bundle: token counts, costs, the call plan and the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import NONE, PlanBundle, SequenceTable, SpanTable, UnitTable
from harts_core.plan.cost_model import CostModel
from harts_core.plan.layout import TOKEN_WISE, Layout, layout_consumers, run_starts
from harts_core.plan.metrics import plan_metrics
from harts_core.plan.rounds import plan_rounds
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree

Int32 = npt.NDArray[np.int32]


def build_bundle(
    tree: RolloutTree,
    *,
    planner: str,
    parameters: dict[str, Any],
    cost_model: CostModel,
    replica: npt.NDArray[Any],
    slot: npt.NDArray[Any],
    sharing: str = "tree",
) -> PlanBundle:
    """The complete bundle of a plan without producers, given where each row is evaluated.

    Nothing is checked here: every plan goes through :func:`harts_core.plan.validate.validate_plan`.

    Args:
        tree: the rollout tree.
        planner: the planner's name.
        parameters: dp, capacity, pad, chunk, seed, … (JSON-able); ``sharing`` is set here.
        cost_model: for the units' costs.
        replica, slot: int [N], the replica and slot of each row; −1 (both) for a dropped row.
        sharing: "tree", "none" or "group", see :func:`harts_core.plan.layout.layout_consumers`.
    """
    layout = layout_consumers(
        tree,
        dp=int(parameters["dp"]),
        replica=np.asarray(replica, np.int32),
        slot=np.asarray(slot, np.int32),
        sharing=sharing,
    )
    return finish_bundle(tree, layout, planner=planner, parameters=parameters, cost_model=cost_model)


def finish_bundle(
    tree: RolloutTree,
    layout: Layout,
    *,
    planner: str,
    parameters: dict[str, Any],
    cost_model: CostModel,
) -> PlanBundle:
    """Complete any layout (with producers and imported spans too) to a bundle.

    Args:
        tree: the rollout tree that the layout is of.
        layout: units, windows, spans, assignments.
        planner, parameters, cost_model: as for :func:`build_bundle`.
    """
    parameters = {**parameters, **layout.parameters, "sharing": layout.sharing}
    units = unit_table(layout, int(parameters["pad"]), cost_model)
    sequences, num_rounds = _sequences(layout.spans, len(units), int(parameters["chunk"]))
    metrics = plan_metrics(
        tree,
        units=units,
        windows=layout.windows,
        assignments=layout.assignments,
        dp=int(parameters["dp"]),
        capacity=None if TOKEN_WISE in parameters else int(parameters["capacity"]),
        num_rounds=num_rounds,
        replay_tokens=_replay_tokens(layout.spans, sequences),
    )
    return PlanBundle(
        planner=planner,
        parameters=parameters,
        cost_model=cost_model.to_dict(),
        tree_sha256=tree.content_sha256,
        metrics=metrics,
        units=units,
        windows=layout.windows,
        spans=layout.spans,
        assignments=layout.assignments,
        sequences=sequences,
    )


def unit_table(layout: Layout, pad: int, cost: CostModel) -> UnitTable:
    """Token counts and costs of a layout's units.

    A = Σ q(k − q) + q(q + 1)/2 and R = Σ q·k over the owned spans.
    """
    spans, num_units = layout.spans, len(layout.replica)
    own = spans.owner == spans.unit
    q = (spans.stop - spans.start).astype(np.int64)
    k = spans.stop.astype(np.int64)

    def per_unit(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        total = np.zeros(num_units, np.int64)
        np.add.at(total, spans.unit, values)
        return total

    computed = per_unit(np.where(own, q, 0))
    padded = -(-computed // pad) * pad
    pairs = per_unit(np.where(own, q * (k - q) + q * (q + 1) // 2, 0))
    backward_pairs = per_unit(np.where(own, q * k, 0))
    return UnitTable(
        replica=layout.replica,
        kind=layout.kind,
        window=layout.window,
        slot=layout.slot,
        order=layout.order,
        complete_tokens=per_unit(q),
        computed_tokens=computed,
        padded_tokens=padded,
        cost_forward=cost.alpha_forward * padded + cost.beta_forward * pairs,
        cost_backward=cost.alpha_backward * padded + cost.beta_backward * backward_pairs,
    )


def _sequences(spans: SpanTable, num_units: int, chunk: int) -> tuple[SequenceTable, int]:
    """The call plan of all units, and their calls in total."""
    offset = np.searchsorted(spans.unit, np.arange(num_units + 1))
    line_parent = np.where(spans.parent == NONE, -1, spans.parent + offset[spans.unit])
    own = np.flatnonzero(spans.owner == spans.unit)
    index = np.full(len(spans) + 1, -1, np.int64)  # span line → owned segment; the last entry serves −1
    index[own] = np.arange(len(own))
    plan = plan_rounds(
        index[line_parent[own]],
        spans.start[own],
        spans.stop[own],
        chunk=chunk,
        forest=spans.unit[own],
        num_forests=num_units,
    )
    head = own[plan.segments.values[plan.segments.offsets[:-1]]]
    replay_start = spans.start[head] // chunk * chunk
    state = _anchor_lines(spans, line_parent, chunk)[line_parent[head]]
    zero = replay_start == 0
    call_starts = run_starts(plan.forest) | run_starts(plan.round)
    first_of_call = np.maximum.accumulate(np.where(call_starts, np.arange(len(plan)), 0))
    table = SequenceTable(
        unit=plan.forest,
        round=plan.round,
        index=np.arange(len(plan), dtype=np.int32) - first_of_call.astype(np.int32),
        spans=Ragged(offsets=plan.segments.offsets, values=spans.span[own[plan.segments.values]]),
        replay_start=replay_start,
        state_unit=np.where(zero, NONE, spans.owner[state]),
        state_span=np.where(zero, NONE, spans.owner_span[state]),
        state_position=np.where(zero, NONE, replay_start),
    )
    return table, int(plan.num_rounds.sum())


def _anchor_lines(spans: SpanTable, line_parent: Int32, chunk: int) -> npt.NDArray[np.int64]:
    """int64 [spans + 1], the span line that holds position a(stop) − 1; −1 if a(stop) is 0.

    The last entry serves line −1 (no span).
    """
    crossed = spans.stop // chunk != spans.start // chunk
    anchor = np.append(np.where(crossed, np.arange(len(spans)), line_parent), -1)
    while True:  # a span that crosses no boundary has its parent's: follow by doubling
        further = anchor[anchor]
        if np.array_equal(further, anchor):
            return anchor
        anchor = further


def _replay_tokens(spans: SpanTable, sequences: SequenceTable) -> int:
    """Tokens that all sequences replay: Σ start of the first span − replay_start."""
    offset = np.searchsorted(spans.unit, np.arange(int(spans.unit[-1]) + 1))
    head = offset[sequences.unit] + sequences.spans.values[sequences.spans.offsets[:-1]]
    return int((spans.start[head].astype(np.int64) - sequences.replay_start).sum())
