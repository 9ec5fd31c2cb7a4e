"""The metrics that every plan reports (DESIGN §3), from its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.plan.bounds import least_tokens_in_sets, least_tokens_within_capacity
from harts_core.plan.bundle import CONSUMER, PRODUCER, AssignmentTable, UnitTable, WindowTable
from harts_core.plan.layout import run_starts
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.rollout_tree import RolloutTree


def plan_metrics(
    tree: RolloutTree,
    *,
    units: UnitTable,
    windows: WindowTable,
    assignments: AssignmentTable,
    dp: int,
    capacity: int | None,
    num_rounds: int,
    replay_tokens: int,
) -> dict[str, Any]:
    """All metrics of a plan, with the names of DESIGN §5; token totals are of the rows that were kept.

    - ``original_tokens`` S, ``trie_tokens`` C(all), ``complete_tokens`` Σ C(consumer), ``residual_tokens``
      and ``producer_tokens``: computed by consumers and producers.
    - ``within_compression`` S / complete; ``decoder_compression`` S / (residual + producer);
      ``effective_compression`` = decoder compression × balance.
    - ``balance`` η = (Σ r + Σ p) / (D·(Σ_slots max_d r + Σ_windows max_d p)), r and p a replica's residual
      and producer tokens; ``slot_balance_p5``: the 5th percentile over slots of mean_d r / max_d r;
      ``step_balance``: mean over max of the replicas' totals.
    - ``num_rounds``: packed linear-attention calls of a layer, summed over units; ``replay_tokens``.
    - ``bound_decoder``: no plan on D replicas compresses more (S over the least tokens in D sets; the
      whole-trie bound is original_tokens / trie_tokens); ``bound_within``: no plan with this capacity does
      within microbatches; the same as ``bound_decoder`` where trajectories are split.

    Args:
        tree: the rollout tree.
        units, windows, assignments: tables of the plan.
        dp: D.
        capacity: T; None where trajectories are split, so that it does not bound complete layouts.
        num_rounds, replay_tokens: of the call plan.
    """
    rows = assignments.row[run_starts(assignments.row)]
    length = tree.length[rows]
    lcp = neighbour_lcp(tree.lcp, rows, np.arange(len(rows)) == 0)
    original = int(length.astype(np.int64).sum())
    residual = _per_replica(units, CONSUMER, units.slot, dp)
    producer = _per_replica(units, PRODUCER, units.window, dp)
    complete = int(units.complete_tokens[units.kind == CONSUMER].sum())
    computed = int(residual.sum() + producer.sum())
    whole = least_tokens_in_sets(length, lcp, min(dp, len(rows)))
    within = (
        whole if capacity is None else least_tokens_within_capacity(length, lcp, capacity=capacity, dp=dp)
    )
    ideal = dp * int(residual.max(axis=1).sum() + producer.max(axis=1, initial=0).sum())
    balance = computed / ideal
    totals = residual.sum(axis=0) + producer.sum(axis=0)
    heaviest = np.maximum(residual.max(axis=1), 1)  # a slot may compute nothing (all of it imported)
    slot_balance = np.where(residual.max(axis=1) > 0, residual.mean(axis=1) / heaviest, 1.0)
    return {
        "original_tokens": original,
        "trie_tokens": least_tokens_in_sets(length, lcp, 1),
        "complete_tokens": complete,
        "residual_tokens": int(residual.sum()),
        "producer_tokens": int(producer.sum()),
        "within_compression": original / complete,
        "decoder_compression": original / computed,
        "balance": balance,
        "effective_compression": original / computed * balance,
        "slot_balance_p5": float(np.percentile(slot_balance, 5)),
        "step_balance": float(totals.mean() / totals.max()),
        "num_consumers": int((units.kind == CONSUMER).sum()),
        "num_slots": len(residual),
        "num_windows": len(windows),
        "num_rounds": num_rounds,
        "replay_tokens": replay_tokens,
        "bound_within": original / within,
        "bound_decoder": original / whole,
    }


def _per_replica(
    units: UnitTable, kind: int, column: npt.NDArray[np.int32], dp: int
) -> npt.NDArray[np.int64]:
    """int64 [slots or windows, D], computed tokens of the units of one kind."""
    mine = np.flatnonzero(units.kind == kind)
    table = np.zeros((int(column[mine].max(initial=-1)) + 1, dp), np.int64)
    np.add.at(table, (column[mine], units.replica[mine]), units.computed_tokens[mine])
    return table
