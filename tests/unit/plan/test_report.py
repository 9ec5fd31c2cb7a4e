"""Plan reports against plain loops over the tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harts_core.errors import InvalidPlanError
from harts_core.plan.report import plan_report, tokens_per_round
from harts_core.trees.ragged import Ragged
from tests.unit.plan.plans import random_plan, windowed_plan, with_table


@pytest.mark.parametrize("seed", range(4))
def test_units_add_up_over_slots_and_replicas(seed: int) -> None:
    tree, bundle = random_plan(seed)
    report = plan_report(bundle)
    for name in ("rows", "complete_tokens", "computed_tokens", "padded_tokens"):
        total = sum(getattr(u, name) for u in report.units)
        assert sum(getattr(s, name) for s in report.slots) == total
        assert sum(getattr(r, name) for r in report.replicas) == total
    assert sum(u.rows for u in report.units) == tree.num_rows
    assert sum(u.complete_tokens for u in report.units) == bundle.metrics["complete_tokens"]
    assert sum(u.rounds for u in report.units) == bundle.metrics["num_rounds"]
    assert sum(u.replay_tokens for u in report.units) == bundle.metrics["replay_tokens"]
    assert sum(u.spans for u in report.units) == len(bundle.spans)
    assert sum(u.sequences for u in report.units) == len(bundle.sequences)
    assert sum(r.cost_forward for r in report.replicas) == pytest.approx(bundle.units.cost_forward.sum())
    assert report.consumer_fill.maximum == max(u.complete_tokens for u in report.units) / 500
    balances = [s.balance for s in report.slots]
    assert float(np.percentile(balances, 5)) == pytest.approx(bundle.metrics["slot_balance_p5"])


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_every_round(seed: int) -> None:
    _, bundle = random_plan(seed)
    expected: dict[tuple[int, int], int] = {}
    for i in range(len(bundle.sequences)):
        unit = int(bundle.sequences.unit[i])
        key = (unit, int(bundle.sequences.round[i]))
        for span in bundle.sequences.spans[i].tolist():
            line = int(bundle.span_offsets[unit]) + span
            expected[key] = expected.get(key, 0) + int(bundle.spans.stop[line] - bundle.spans.start[line])
    assert tokens_per_round(bundle).tolist() == [expected[key] for key in sorted(expected)]
    assert sum(expected.values()) == bundle.units.computed_tokens.sum()
    assert plan_report(bundle).round_tokens.count == len(expected)


def test_windows_and_producers() -> None:
    report = plan_report(windowed_plan())
    (window,) = report.windows
    assert (window.slot_start, window.slot_stop, window.producers, window.producer_tokens) == (0, 2, 1, 4)
    assert [(u.kind, u.slot, u.window, u.rows) for u in report.units] == [
        ("producer", None, 0, 0),
        ("consumer", 0, 0, 1),
        ("consumer", 1, 0, 1),
    ]
    assert [u.fill for u in report.units] == [4 / 8, 5 / 8, 6 / 8]
    assert [s.rounds for s in report.slots] == [1, 1]
    (replica,) = report.replicas
    assert (replica.units, replica.computed_tokens, replica.padded_tokens) == (3, 7, 12)
    assert (replica.cost_forward, replica.cost_backward) == (7.0, 14.0)
    assert report.consumer_fill.count == 2


def test_replay_is_counted_from_where_a_sequence_enters() -> None:
    bundle = with_table(windowed_plan(), "sequences", replay_start=[0, 2, 1])
    assert [u.replay_tokens for u in plan_report(bundle).units] == [0, 2, 3]


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        ("assignments", {"unit": [1, 3]}, "no such unit"),
        ("spans", {"unit": [0, 2, 2, 1, 1]}, "not sorted"),
        ("spans", {"unit": [0, 1, 1, 2, 9]}, "no such unit"),
        ("sequences", {"unit": [0, 1, -2]}, "no such unit"),
        ("sequences", {"spans": Ragged.from_rows([[0], [2], [1]], np.int32)}, "does not have"),
        ("sequences", {"spans": Ragged.from_rows([[0], [], [1]], np.int32)}, "computes no span"),
        ("units", {"replica": [0, 1, 0]}, "replica is not in"),
        ("units", {"window": [0, 0, 4]}, "no such window"),
    ],
)
def test_broken_references_are_named(table: str, columns: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        plan_report(with_table(windowed_plan(), table, **columns))


def test_metrics_must_be_numbers() -> None:
    with pytest.raises(InvalidPlanError, match="balance must be a number"):
        plan_report(replace(windowed_plan(), metrics={"balance": "good"}))
