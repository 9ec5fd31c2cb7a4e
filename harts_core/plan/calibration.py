"""Calibrating a cost model: units of known token and pair counts, and the fit of coefficients to their times.

A unit with n computed tokens, A causal pairs and R backward pairs takes γ_F + α_F·n + β_F·A forward and
γ_B + α_B·n + β_B·R backward; the cost model (:mod:`harts_core.plan.cost_model`) has the α and β. The units
differ in n and, at the same n, in their pairs, so that these coefficients can be told apart.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.plan.build import build_bundle
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cost_model import COEFFICIENTS, CostModel
from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.rollout_tree import RolloutTree

Float64 = npt.NDArray[np.float64]
LEAST_TOKENS = 64
"""Of the largest unit."""
ROWS, BRANCHES = 8, 4
SIZES = (8, 4, 2, 1)
"""Units hold capacity / 8, / 4, / 2 and all of it."""
SUBSETS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
"""Of the coefficients α, β, γ."""
PAIRS = CostModel(name="pairs", alpha_forward=0.0, beta_forward=1.0, alpha_backward=0.0, beta_backward=1.0)
"""The cost of a unit under this model is A forward and R backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTiming:
    """A timed unit.

    Attributes:
        shape, tokens, pairs, backward_pairs: as in CalibrationUnit.
        forward_s, backward_s: measured seconds.
    """

    shape: str
    tokens: int
    pairs: int
    backward_pairs: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationUnit:
    """One unit to time: unit 0 of ``bundle``, a plan of ``tree``.

    Attributes:
        shape: "chain" (one trajectory), "rows" (several, nothing shared), "branches" (half is shared).
        tree, bundle: the tree and its plan.
        tokens: n.
        pairs: A.
        backward_pairs: R.
    """

    shape: str
    tree: RolloutTree
    bundle: PlanBundle
    tokens: int
    pairs: int
    backward_pairs: int

    def timed(self, *, forward_s: float, backward_s: float) -> UnitTiming:
        """The unit with its measured seconds."""
        return UnitTiming(
            shape=self.shape,
            tokens=self.tokens,
            pairs=self.pairs,
            backward_pairs=self.backward_pairs,
            forward_s=forward_s,
            backward_s=backward_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """Coefficients of one pass, and how well they explain its times.

    Attributes:
        alpha: seconds per token, ≥ 0.
        beta: seconds per pair, ≥ 0.
        overhead: seconds per unit, ≥ 0; not part of the cost model, as all plans have about as many units.
        residuals: measured / fitted − 1 of every unit, in their order.
        r_squared: 1 − squared residuals / squared deviations from the mean, in seconds.
    """

    alpha: float
    beta: float
    overhead: float
    residuals: tuple[float, ...]
    r_squared: float


def calibration_units(*, capacity: int, vocab_size: int, chunk: int) -> list[CalibrationUnit]:
    """Units of every shape and size, the smallest first.

    Args:
        capacity: tokens of the largest, at least LEAST_TOKENS.
        vocab_size: random token ids are below it, at least ROWS.
        chunk: B.
    """
    rng = np.random.default_rng(0)

    def tokens(count: int, first: int | None = None) -> list[int]:
        drawn = rng.integers(0, vocab_size, count).tolist()
        return drawn if first is None else [first, *drawn[1:]]

    units = []
    for divisor in SIZES:
        size = capacity // divisor // ROWS * ROWS
        stem = tokens(size // 2)
        shapes = {
            "chain": [tokens(size)],
            "rows": [tokens(size // ROWS, first=i) for i in range(ROWS)],
            "branches": [[*stem, *tokens(size // 2 // BRANCHES, first=i)] for i in range(BRANCHES)],
        }
        units += [_unit(shape, rows, chunk) for shape, rows in shapes.items()]
    return units


def _unit(shape: str, rows: list[list[int]], chunk: int) -> CalibrationUnit:
    tree = build_tree(
        Trajectory(
            trajectory_id=str(i), group_id="0", tokens=np.array(row), loss_spans=np.empty((0, 2), np.int64)
        )
        for i, row in enumerate(rows)
    )
    place = np.zeros(len(rows), np.int32)
    bundle = build_bundle(
        tree,
        planner="calibration",
        parameters={"dp": 1, "capacity": tree.trie_tokens, "pad": 1, "chunk": chunk, "seed": 0},
        cost_model=PAIRS,
        replica=place,
        slot=place,
    )
    units = bundle.units
    return CalibrationUnit(
        shape=shape,
        tree=tree,
        bundle=bundle,
        tokens=int(units.computed_tokens[0]),
        pairs=int(units.cost_forward[0]),
        backward_pairs=int(units.cost_backward[0]),
    )


def fit_costs(timings: list[UnitTiming]) -> tuple[CostFit, CostFit]:
    """(forward, backward): non-negative coefficients with the least squared relative residuals.

    Relative, as the noise of times is. A third coefficient takes up what a unit costs whatever it holds, so
    that it does not distort the two that tell plans apart.

    Args:
        timings: at least three units, all seconds positive.
    """
    tokens = np.array([t.tokens for t in timings], np.float64)
    pairs = np.array([t.pairs for t in timings], np.float64)
    backward_pairs = np.array([t.backward_pairs for t in timings], np.float64)
    forward_s = np.array([t.forward_s for t in timings])
    backward_s = np.array([t.backward_s for t in timings])
    return _fit(tokens, pairs, forward_s), _fit(tokens, backward_pairs, backward_s)


def _fit(tokens: Float64, pairs: Float64, seconds: Float64) -> CostFit:
    """Least squares of (γ + α·n + β·A)/t ≈ 1 over α, β, γ ≥ 0.

    The optimum is the unconstrained one of those coefficients that are positive in it, so the best of all
    subsets whose own optimum is non-negative.
    """
    terms = np.stack([tokens, pairs, np.ones(len(seconds))], axis=1)
    columns = terms / seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)
    best, least = np.zeros(3), np.inf
    for subset in SUBSETS:
        candidate = np.zeros(3)
        free = list(subset)
        solved = np.linalg.lstsq(columns[:, free] / scale[free], np.ones(len(seconds)), rcond=None)[0]
        candidate[free] = solved / scale[free]
        error = float(((columns @ candidate - 1) ** 2).sum())
        if (candidate >= 0).all() and error < least:
            best, least = candidate, error
    fitted = terms @ best
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return CostFit(
        alpha=float(best[0]),
        beta=float(best[1]),
        overhead=float(best[2]),
        residuals=tuple((seconds / fitted - 1).tolist()),
        r_squared=1 - float(((seconds - fitted) ** 2).sum()) / spread if spread else 1.0,
    )


def cost_model_of(name: str, forward: CostFit, backward: CostFit) -> CostModel:
    """The cost model of two fits, in seconds."""
    return CostModel(
        name=name,
        alpha_forward=forward.alpha,
        beta_forward=forward.beta,
        alpha_backward=backward.alpha,
        beta_backward=backward.beta,
    )


def cost_model_text(model: CostModel, comment: str) -> str:
    """The TOML file that ``load_cost_model`` reads, with a comment of one line."""
    values: dict[str, Any] = asdict(model)
    lines = [f"# {comment}", f"name = {json.dumps(values['name'])}"]
    return "\n".join([*lines, *(f"{key} = {values[key]!r}" for key in COEFFICIENTS)]) + "\n"
