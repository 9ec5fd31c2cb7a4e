"""What plan.json and runtime.json of a bundle may hold: one description, as a JSON Schema, and its check.

``schemas/plan.schema.json`` is this description. The check knows the keywords that are used here, and is
stricter than JSON Schema in two things: a boolean is no number, and numbers are finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from harts_core.errors import SchemaMismatchError
from harts_core.plan.cost_model import COEFFICIENTS
from harts_core.plan.layout import SHARING, TOKEN_WISE
from harts_core.plan.options import MAX_TOKENS, ON_TOO_LONG

FORMAT = "plan-bundle"
VERSION = 1
TABLE_NAMES = ("units", "windows", "spans", "assignments", "sequences")
COUNT_METRICS = (
    *("original_tokens", "trie_tokens", "complete_tokens", "residual_tokens", "producer_tokens"),
    *("num_consumers", "num_slots", "num_windows", "num_rounds", "replay_tokens"),
)
RATIO_METRICS = (
    *("within_compression", "decoder_compression", "balance", "effective_compression"),
    *("slot_balance_p5", "step_balance", "bound_within", "bound_decoder"),
)

Schema = dict[str, Any]

_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_POSITIVE: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
_AMOUNT: Schema = {"type": "number", "minimum": 0, "maximum": 1e18}  # written as an integer it fits int64
_STRING: Schema = {"type": "string"}
_SHA256: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}


def _object(properties: Schema, *, extra: Schema | bool = False, optional: Schema | None = None) -> Schema:
    return {
        "type": "object",
        "properties": properties | (optional or {}),
        "additionalProperties": extra,
        "required": sorted(properties),
    }


_PARAMETERS = _object(
    {**dict.fromkeys(("dp", "capacity", "pad", "chunk"), _POSITIVE), "sharing": {"enum": list(SHARING)}},
    optional={  # of the planners here; another one may have others
        "seed": _COUNT,
        "producer_capacity": _POSITIVE,
        "max_live_producers": _POSITIVE,
        "max_window_slots": _POSITIVE,
        "effort": _POSITIVE,
        "on_too_long": {"enum": list(ON_TOO_LONG)},
        "dropped_rows": {"type": "array", "items": _COUNT},
        TOKEN_WISE: _COUNT,
    },
    extra=True,
)
MANIFEST_SCHEMA = _object(
    {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "planner": _STRING,
        "parameters": _PARAMETERS,
        "cost_model": _object({"name": _STRING, **dict.fromkeys(COEFFICIENTS, _AMOUNT)}),
        "tree_sha256": _SHA256,
        "metrics": _object(dict.fromkeys(COUNT_METRICS, _COUNT) | dict.fromkeys(RATIO_METRICS, _AMOUNT)),
        "activation_tokens": {"type": "array", "items": {"type": "array", "items": _COUNT}},
        "tables": _object(dict.fromkeys(TABLE_NAMES, _SHA256)),
    }
)
"""plan.json."""
RUNTIME_SCHEMA = _object({}, extra={"type": "number"})
"""runtime.json: clock times by name."""


def check_described(value: Any, schema: Schema, where: str, path: str = "") -> None:
    """Check a JSON value against one of this module's schemas.

    Args:
        value: parsed JSON.
        schema: what it must be.
        where: the file, for messages.
        path: the value's place in the file, ``parameters.dp``.

    Raises:
        SchemaMismatchError: the first difference, with its place.
    """
    name = path or "the document"
    wrong = _difference(value, schema)
    if wrong is not None:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
        raise SchemaMismatchError(f"{name} must be {wrong}, not {shown}", where=where)
    if isinstance(value, list):
        for i, item in enumerate(value):
            check_described(item, schema.get("items", {}), where, f"{path}[{i}]")
    elif isinstance(value, dict):
        known, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        others = extra if isinstance(extra, dict) else {}
        prefix = f"{path}." if path else ""
        for key in schema.get("required", ()):
            if key not in value:
                raise SchemaMismatchError(f"{prefix}{key} is missing", where=where)
        for key, item in value.items():
            if key not in known and extra is False:
                raise SchemaMismatchError(f"{prefix}{key} is not a key of the format", where=where)
            check_described(item, known.get(key, others), where, prefix + key)


def _difference(value: Any, schema: Schema) -> str | None:
    """What the value should be instead, leaving aside what is in it; None if it is right."""
    if "const" in schema and (type(value) is not type(schema["const"]) or value != schema["const"]):
        return f"{schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {', '.join(schema['enum'])}"
    kind = schema.get("type")
    if kind is not None and not _KINDS[kind][1](value):
        return _KINDS[kind][0]
    if "pattern" in schema and not re.match(schema["pattern"], value):
        return "64 hexadecimal digits"
    low, high = schema.get("minimum"), schema.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        return f"at least {low}" if high is None else f"in [{low}, {high}]"
    return None


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "integer": ("an integer", lambda v: type(v) is int),
    "number": ("a finite number", _finite),
    "string": ("text", lambda v: isinstance(v, str)),
    "array": ("a list", lambda v: isinstance(v, list)),
    "object": ("an object", lambda v: isinstance(v, dict)),
}
