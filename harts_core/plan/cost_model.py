"""The cost model: what a unit's forward and backward passes cost, from its tokens and key lengths.

ĉF = α_F·n + β_F·A and ĉB = α_B·n + β_B·R (DESIGN §3): n new tokens (padded), A query-key pairs of causal
attention, R pairs that a block-wise backward touches.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harts_core.errors import ConfigError

COEFFICIENTS = ("alpha_forward", "beta_forward", "alpha_backward", "beta_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of the cost formulas; any unit, as long as it is one for all four.

    Attributes:
        name: preset name, or the name given in the file.
        alpha_forward, alpha_backward: cost per new token.
        beta_forward, beta_backward: cost per query-key pair.
    """

    name: str
    alpha_forward: float
    beta_forward: float
    alpha_backward: float
    beta_backward: float

    def __post_init__(self) -> None:
        for key in COEFFICIENTS:
            value = getattr(self, key)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"cost model {self.name}: {key} must be a finite number ≥ 0, not {value}")
        if self.alpha_forward + self.beta_forward == 0:
            raise ConfigError(f"cost model {self.name}: alpha_forward and beta_forward are both zero")

    def to_dict(self) -> dict[str, Any]:
        """Name and coefficients, JSON-able."""
        return asdict(self)


def _from_shapes(name: str, *, layer_mflop: float, layers: int, mla_layers: int, heads: int) -> CostModel:
    """GFLOP per token and per query-key pair; backward 2× the linear parts, 2.5× attention (it recomputes).

    A token costs ``layer_mflop`` in each layer; a pair costs 2·(192 + 128) operations per head and MLA layer
    (query-key width 128 + 64, value width 128).
    """
    alpha = layers * layer_mflop * 1e-3
    beta = mla_layers * heads * 2 * (192 + 128) * 1e-9
    return CostModel(
        name=name,
        alpha_forward=alpha,
        beta_forward=beta,
        alpha_backward=2 * alpha,
        beta_backward=2.5 * beta,
    )


PRESETS: dict[str, CostModel] = {
    # GFLOP: 2 × the weights that a token passes through (attention projections, eight routed experts and
    # the shared one), of MODEL.md's shapes.
    "ling-3.0-tiny": _from_shapes("ling-3.0-tiny", layer_mflop=80.0, layers=24, mla_layers=6, heads=16),
    "ling-3.0-flash": _from_shapes("ling-3.0-flash", layer_mflop=232.0, layers=42, mla_layers=7, heads=32),
    # Tokens only: for tests and for models whose attention is cheap.
    "tokens": CostModel(
        name="tokens", alpha_forward=1.0, beta_forward=0.0, alpha_backward=2.0, beta_backward=0.0
    ),
}
DEFAULT_COST_MODEL = "ling-3.0-tiny"


def load_cost_model(source: str | Path) -> CostModel:
    """A preset by name, or a TOML/JSON file with ``name`` and the four coefficients.

    Raises:
        ConfigError: no such preset or file, unreadable, or a key is missing, unknown or not a number.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"no such cost model: {source}", hint=f"name a TOML or JSON file, or one of {', '.join(PRESETS)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the cost model cannot be read ({error})", where=str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError("the cost model must be a table of names and numbers", where=str(path))
    unknown = sorted(set(values) - set(COEFFICIENTS) - {"name"})
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]}", where=str(path), hint=f"known: name, {', '.join(COEFFICIENTS)}"
        )
    for key in COEFFICIENTS:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} is missing or not a number", where=str(path))
    name = values.get("name", path.stem)
    if not isinstance(name, str):
        raise ConfigError("name must be a string", where=str(path))
    return CostModel(name=name, **{key: float(values[key]) for key in COEFFICIENTS})
