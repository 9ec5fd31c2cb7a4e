"""One table of a configuration file: checked key by key, with errors that name it.

Integers are accepted for floats; nothing else is converted.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from harts_core.errors import ConfigError

T = TypeVar("T")


def require(condition: bool, what: str) -> None:
    """A check of a configuration's dataclass.

    Raises:
        ConfigError: ``what``, where the condition does not hold.
    """
    if not condition:
        raise ConfigError(what)


def parse_section(cls: type[T], table: Mapping[str, Any], name: str, where: str) -> T:
    """Build a configuration dataclass from a table: known keys, right types, its own checks.

    Integers are accepted for floats; nothing else is converted.

    Args:
        cls: a dataclass with fields of plain types (str, bool, int, float, dict, Literal, or None).
        table: key to value.
        name: the table's name, for messages.
        where: the file, for messages.

    Raises:
        ConfigError: an unknown key, a missing one without default, a wrong type, or a value ``cls`` refuses.
    """
    kinds = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"[{name}] unknown key {key}", where=where, hint=suggest(key, known, "keys"))
        try:
            values[key] = _checked(value, kinds[key])
        except TypeError as error:
            raise ConfigError(f"[{name}] {key} {error}", where=where) from None
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"[{name}] {f.name} is required", where=where)
    return build_section(cls, values, where)


def build_section(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """The dataclass, its own checks' errors being at a place."""
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(error.what, where=error.where or where, hint=error.hint) from None


def _checked(value: Any, kind: Any) -> Any:
    """The value as ``kind``, or TypeError saying what it must be."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices or isinstance(value, bool):
            raise TypeError(f"must be one of {', '.join(map(str, choices))}, not {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        options = [k for k in typing.get_args(kind) if k is not type(None)]
        return _checked(value, options[0])  # TOML has no null: an absent key is None
    plain = origin or kind
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        raise TypeError(f"must be {_KIND_NAMES[plain]}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"must be finite, not {value!r}")
    return value


_KIND_NAMES = {str: "a string", bool: "true or false", int: "an integer", float: "a number", dict: "a table"}


def suggest(word: str, known: typing.Iterable[str], noun: str) -> str:
    """A hint for a mistyped name: the nearest known one, or all of them."""
    known = list(known)
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known {noun}: {', '.join(known)}"
