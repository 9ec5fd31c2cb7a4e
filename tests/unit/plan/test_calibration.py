"""The units that calibration times, and the fit."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from harts_core.plan.calibration import (
    UnitTiming,
    calibration_units,
    cost_model_of,
    cost_model_text,
    fit_costs,
)
from harts_core.plan.cost_model import load_cost_model
from harts_core.plan.validate import validate_plan


def test_units_have_the_counts_of_their_shapes() -> None:
    units = calibration_units(capacity=256, vocab_size=16, chunk=16)
    assert [(u.shape, u.tokens) for u in units] == [
        (shape, size) for size in (32, 64, 128, 256) for shape in ("chain", "rows", "branches")
    ]
    for unit in units:
        validate_plan(unit.bundle, unit.tree)
        rows = [tuple(unit.tree.tokens(i).tolist()) for i in range(unit.tree.num_rows)]
        prefixes = {row[: i + 1] for row in rows for i in range(len(row))}
        assert unit.tokens == len(prefixes)
        assert unit.pairs == sum(map(len, prefixes))  # a token's keys: its ancestors and itself
    chain, rows, branches = units[-3:]
    assert (chain.tree.num_rows, rows.tree.num_rows, branches.tree.num_rows) == (1, 8, 4)
    assert rows.pairs < branches.pairs < chain.pairs
    assert chain.backward_pairs == 256 * 256
    assert branches.backward_pairs == 128 * 128 + 4 * 32 * 160


def timings(
    forward: tuple[float, float], backward: tuple[float, float], overhead: float = 0.0
) -> list[UnitTiming]:
    return [
        UnitTiming(
            shape=u.shape,
            tokens=u.tokens,
            pairs=u.pairs,
            backward_pairs=u.backward_pairs,
            forward_s=overhead + forward[0] * u.tokens + forward[1] * u.pairs,
            backward_s=overhead + backward[0] * u.tokens + backward[1] * u.backward_pairs,
        )
        for u in calibration_units(capacity=512, vocab_size=16, chunk=16)
    ]


def test_exact_times_give_the_coefficients_back(tmp_path: Path) -> None:
    forward, backward = fit_costs(timings((2e-6, 3e-9), (5e-6, 7e-9), overhead=1e-3))
    assert (forward.alpha, forward.beta) == pytest.approx((2e-6, 3e-9))
    assert (backward.alpha, backward.beta) == pytest.approx((5e-6, 7e-9))
    assert forward.overhead == pytest.approx(1e-3)
    assert forward.r_squared == pytest.approx(1)
    assert forward.residuals == pytest.approx([0.0] * 12, abs=1e-12)
    model = cost_model_of("mine", forward, backward)
    (tmp_path / "cost.toml").write_text(cost_model_text(model, "seconds"))
    assert load_cost_model(tmp_path / "cost.toml") == model


def test_coefficients_are_the_best_non_negative_ones(rng: np.random.Generator) -> None:
    for true in ((2e-6, 3e-9), (2e-6, -1e-9), (-1e-7, 3e-8), (1e-6, 0.0)):
        exact = timings((2e-6, 0), (1e-6, 0))
        tokens = np.array([t.tokens for t in exact])
        pairs = np.array([t.pairs for t in exact])
        seconds = np.maximum((true[0] * tokens + true[1] * pairs), 1e-6) * rng.uniform(0.9, 1.1, len(exact))
        noisy = [
            UnitTiming(
                shape=t.shape,
                tokens=t.tokens,
                pairs=t.pairs,
                backward_pairs=t.backward_pairs,
                forward_s=s,
                backward_s=s,
            )
            for t, s in zip(exact, seconds.tolist(), strict=True)
        ]
        fit, _ = fit_costs(noisy)
        assert fit.alpha >= 0
        assert fit.beta >= 0
        assert fit.overhead >= 0
        fitted = fit.overhead + fit.alpha * tokens + fit.beta * pairs
        assert fit.residuals == pytest.approx((seconds / fitted - 1).tolist())
        best = (((fitted - seconds) / seconds) ** 2).sum()
        for a, b in itertools.product((0.97, 1.0, 1.03), (0.97, 1.0, 1.03)):  # neighbours are no better
            for add in (0.0, 1e-12):
                other = fit.overhead + add + (fit.alpha * a + add) * tokens + (fit.beta * b + add) * pairs
                assert (((other - seconds) / seconds) ** 2).sum() >= best * (1 - 1e-9)
