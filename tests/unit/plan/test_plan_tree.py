"""Edge cases of planning and the clear refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from harts_core.errors import ConfigError, InfeasiblePlanError
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cost_model import PRESETS, load_cost_model
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners.problem import place_consumers
from tests.support import tree_from_sequences

PLANNERS = pytest.mark.parametrize("planner", ["harts-l1", "expanded"])


def plan(sequences: list[list[int]], planner: str, **options: int | str) -> PlanBundle:
    return plan_tree(tree_from_sequences(sequences), PlanOptions(planner=planner, **options))  # type: ignore[arg-type]


@PLANNERS
def test_a_single_row(planner: str) -> None:
    bundle = plan([[1, 2, 3]], planner, dp=1, capacity=3)
    assert bundle.metrics["num_consumers"] == 1
    assert bundle.metrics["bound_within"] == 1


def test_all_rows_identical_fill_every_replica() -> None:
    m = plan([[1, 2, 3, 4]] * 9, "harts-l1", dp=4, capacity=4).metrics
    assert (m["num_consumers"], m["complete_tokens"], m["trie_tokens"]) == (4, 16, 4)
    assert m["within_compression"] == m["bound_within"] == m["bound_decoder"] == 9 / 4


def test_expanded_needs_a_row_for_every_consumer() -> None:
    with pytest.raises(InfeasiblePlanError, match="9 trajectories need 9 consumers of 4 tokens"):
        plan([[1, 2, 3, 4]] * 9, "expanded", dp=4, capacity=4)


@PLANNERS
def test_no_sharing_at_all(planner: str) -> None:
    bundle = plan([[i] * (i + 1) for i in range(12)], planner, dp=2, capacity=20)
    assert bundle.metrics["within_compression"] == 1
    assert bundle.metrics["bound_decoder"] == 1


def test_capacity_of_the_longest_row_and_one_shared_root() -> None:
    rows = [[9] * 10 + [i] * (i + 1) for i in range(8)]
    bundle = plan(rows, "harts-l1", dp=2, capacity=18)
    assert bundle.units.complete_tokens.max() <= 18
    assert bundle.metrics["bound_decoder"] == sum(map(len, rows)) / (10 + 36 + 10)


def test_prefixes_and_single_tokens_join_for_nothing() -> None:
    rows = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [5], [5, 6], [5, 6, 7]]
    bundle = plan(rows, "harts-l1", dp=2, capacity=4)
    assert bundle.metrics["complete_tokens"] == 7
    assert bundle.metrics["num_consumers"] == 2


def test_fewer_rows_than_replicas() -> None:
    with pytest.raises(InfeasiblePlanError, match="2 trajectories cannot give each of 3 replicas one"):
        plan([[1], [2]], "harts-l1", dp=3, capacity=5)


@PLANNERS
def test_rows_longer_than_the_capacity(planner: str) -> None:
    rows = [[1] * 3, [1] * 9, [2] * 4, [3] * 12]
    with pytest.raises(InfeasiblePlanError, match="2 trajectories are longer") as caught:
        plan(rows, planner, dp=1, capacity=5)
    assert caught.value.where == "rows 1 (9 tokens), 3 (12 tokens)"
    bundle = plan(rows, planner, dp=1, capacity=5, on_too_long="drop")
    assert bundle.parameters["dropped_rows"] == [1, 3]
    assert bundle.assignments.row.tolist() == [0, 2]
    assert bundle.metrics["original_tokens"] == 7
    if planner == "expanded":
        with pytest.raises(ConfigError, match="shares by prefix trees, not expanded"):
            plan(rows, planner, dp=1, capacity=5, on_too_long="split")
    else:
        split = plan(rows, planner, dp=1, capacity=5, on_too_long="split")
        assert split.metrics["original_tokens"] == 28
    with pytest.raises(InfeasiblePlanError, match="0 trajectories"):
        plan(rows, planner, dp=1, capacity=2, on_too_long="drop")


def test_rows_that_fill_no_whole_slot_are_refused() -> None:
    rows = [[i] * 6 for i in range(5)]  # five consumers at least, four or eight on four replicas
    with pytest.raises(InfeasiblePlanError, match="multiple of 4 replicas"):
        plan(rows, "harts-l1", dp=4, capacity=6)


def test_another_seed_may_change_the_search_but_not_the_format() -> None:
    rng = np.random.default_rng(0)
    rows = [[1] * 30 + rng.integers(2, 5, 40).tolist() for _ in range(40)]
    for seed in (0, 1):
        assert plan(rows, "harts-l1", dp=2, capacity=200, seed=seed).parameters["seed"] == seed


def test_unknown_planner_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no such planner: best") as caught:
        plan([[1]], "best", dp=1, capacity=5)
    assert caught.value.hint is not None
    assert "harts-l1" in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        *({"dp": 0}, {"capacity": 0}, {"pad": -1}, {"chunk": 0}, {"seed": -1}, {"producer_capacity": 0}),
        *({"max_live_producers": 0}, {"max_window_slots": 0}, {"on_too_long": "ignore"}, {"capacity": 2**31}),
    ],
)
def test_options_are_checked(options: dict[str, int | str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PlanOptions(**{"dp": 1, "capacity": 8, **options})  # type: ignore[arg-type]


def test_place_consumers_evens_slots_and_replicas() -> None:
    slot, replica = place_consumers(np.array([5, 9, 1, 7, 3, 6]), 2)
    assert slot.tolist() == [1, 0, 2, 0, 2, 1]  # 9 7 | 6 5 | 3 1
    totals = [sum(w for w, r in zip([5, 9, 1, 7, 3, 6], replica, strict=True) if r == d) for d in (0, 1)]
    assert sorted(totals) == [15, 16]  # 9 + 5 + 1 or 3, 7 + 6 + 3 or 1


def test_cost_model_files(tmp_path: Path) -> None:
    values = {"alpha_forward": 1.5, "beta_forward": 0, "alpha_backward": 3, "beta_backward": 0.25}
    (tmp_path / "c.json").write_text(json.dumps(values))
    assert load_cost_model(tmp_path / "c.json").to_dict() == {"name": "c", **values}
    (tmp_path / "c.toml").write_text('name = "mine"\n' + "".join(f"{k} = {v}\n" for k, v in values.items()))
    assert load_cost_model(tmp_path / "c.toml").to_dict() == {"name": "mine", **values}
    assert load_cost_model("tokens") is PRESETS["tokens"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha_forward = 1", "beta_forward is missing"),
        ("speed = 1", "unknown key speed"),
        ("alpha_forward = ", "cannot be read"),
        ("alpha_forward = -1\nbeta_forward = 0\nalpha_backward = 1\nbeta_backward = 1", "must be a finite"),
        ("alpha_forward = nan\nbeta_forward = 0\nalpha_backward = 1\nbeta_backward = 1", "must be a finite"),
        ("alpha_forward = 0\nbeta_forward = 0\nalpha_backward = 1\nbeta_backward = 1", "both zero"),
        ("alpha_forward = 1\nbeta_forward = 1\nalpha_backward = 1\nbeta_backward = true", "not a number"),
    ],
)
def test_bad_cost_model_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_cost_model(tmp_path / "c.toml")


def test_missing_cost_model_names_the_presets() -> None:
    with pytest.raises(ConfigError, match="no such cost model: nowhere") as caught:
        load_cost_model("nowhere")
    assert caught.value.hint is not None
    assert "ling-3.0-tiny" in caught.value.hint
