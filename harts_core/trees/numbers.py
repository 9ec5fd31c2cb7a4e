"""Strict conversion of untrusted values to numbers: exact or refused, every coercion counted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError
from harts_core.trees.findings import Findings

_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


def flat_array(value: Any, field: str, where: str) -> npt.NDArray[Any]:
    """A list, array or [1, T] nesting as a 1-D numpy array of whatever type it holds.

    Raises:
        DataError: text, a scalar, or a nesting other than [1, T].
    """
    if isinstance(value, str):
        raise DataError(f"{field} is text, not a list of numbers", where=where, hint=TEXT_HINT)
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{field} is {type(value).__name__}, not a list of numbers", where=where)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise DataError(f"{field} is not a flat list of numbers (nor [1, T])", where=where)
    return array


TEXT_HINT = "dump token ids with a hook from docs/hooks, or render text with --format messages --tokenizer"


def integer_array(value: Any, field: str, where: str, findings: Findings) -> npt.NDArray[Any]:
    """Signed integers [n], int64 or the narrower type that they come in.

    Integral floats and exact numeric strings are coerced with a warning.

    Raises:
        DataError: a value is not an integer.
    """
    array = flat_array(value, field, where)
    _refuse_booleans(value, field, where)
    if array.dtype.kind == "i":
        return array
    if array.dtype.kind == "u":
        if array.dtype.itemsize == 8 and array.size and int(array.max()) > 2**62:
            raise _not_an_integer(array, int(array.argmax()), field, where)
        return array.astype(np.int64)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.floor(array)) & (np.abs(array) < 2**53)
        if whole.all():
            findings.warn(f"{field}: integral floats read as integers", where, len(array))
            return array.astype(np.int64)
        raise _not_an_integer(array, int(np.flatnonzero(~whole)[0]), field, where)
    # Only what a string really is may be parsed: numpy turns a list of mixed types into strings.
    items = [v.item() if isinstance(v, np.generic) else v for v in value_items(value)]
    out = np.empty(len(items), np.int64)
    strings = 0
    for i, item in enumerate(items):
        if isinstance(item, str) and _INTEGER.fullmatch(item):
            strings += 1
            out[i] = int(item)
        elif isinstance(item, int) and not isinstance(item, bool) and abs(item) < 2**62:
            out[i] = item
        elif isinstance(item, float) and item.is_integer() and abs(item) < 2**53:
            out[i] = int(item)
        else:
            raise _not_an_integer(items, i, field, where)
    if strings:
        findings.warn(f"{field}: numeric strings read as integers", where, strings)
    return out


def _refuse_booleans(value: Any, field: str, where: str) -> None:
    """numpy reads True as 1 where a list holds numbers too."""
    if isinstance(value, np.ndarray):
        return
    items = value_items(value)
    if bool in set(map(type, items)):
        at = next(i for i, item in enumerate(items) if isinstance(item, bool))
        raise DataError(f"{field} holds {items[at]} at index {at}, which is not a number", where=where)


def value_items(value: Any) -> list[Any]:
    """The items of a list, array or [1, T] nesting, with their own types."""
    items = list(value)
    if len(items) == 1 and isinstance(items[0], list | tuple | np.ndarray):
        items = list(items[0])
    return items


def _not_an_integer(items: Any, index: int, field: str, where: str) -> DataError:
    shown = str(items[index])[:40] if not isinstance(items[index], str) else repr(items[index][:40])
    return DataError(f"{field} holds {shown} at index {index}, which is not an integer", where=where)


def float_array(value: Any, field: str, where: str, findings: Findings) -> npt.NDArray[np.float64]:
    """float64 [n]; null becomes NaN; exact numeric strings are coerced with a warning.

    Raises:
        DataError: a value is not a number.
    """
    array = flat_array(value, field, where)
    _refuse_booleans(value, field, where)
    if array.dtype.kind in "fiu":
        return array.astype(np.float64, copy=False)
    items = [v.item() if isinstance(v, np.generic) else v for v in value_items(value)]
    out = np.empty(len(items), np.float64)
    strings = 0
    for i, item in enumerate(items):
        if item is None:
            out[i] = np.nan
        elif isinstance(item, str) and _NUMBER.fullmatch(item):
            strings += 1
            out[i] = float(item)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            out[i] = _to_float(item)
        else:
            shown = repr(item)[:40]
            raise DataError(f"{field} holds {shown} at index {i}, which is not a number", where=where)
    if strings:
        findings.warn(f"{field}: numeric strings read as numbers", where, strings)
    return out


def _to_float(item: int | float) -> float:
    try:
        return float(item)
    except OverflowError:
        return float("inf")


def mask_array(value: Any, field: str, where: str, findings: Findings) -> npt.NDArray[np.bool_]:
    """bool [n] from booleans or 0 and 1.

    Raises:
        DataError: another value.
    """
    array = flat_array(value, field, where)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind in "fiu":  # 0.0 and 1.0 are what float masks hold; no warning
        numbers: npt.NDArray[Any] = array
    elif array.dtype.kind == "O" and all(isinstance(v, bool) or v in (0, 1) for v in array.tolist()):
        return array.astype(np.bool_)
    else:
        numbers = integer_array(value, field, where, findings)
    wrong = ~((numbers == 0) | (numbers == 1))
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise DataError(f"{field} holds {numbers[i]} at index {i}; a mask holds 0 and 1", where=where)
    return np.asarray(numbers == 1)


def integer(value: Any, field: str, where: str, findings: Findings) -> int | None:
    """One integer, or None for null."""
    if value is None:
        return None
    if isinstance(value, list | tuple | np.ndarray | dict | bool):
        raise DataError(f"{field} is {type(value).__name__}, not an integer", where=where)
    number = int(integer_array([value], field, where, findings)[0])
    if abs(number) > 2**31 - 1:
        raise DataError(f"{field} {number} does not fit 32 bits", where=where)
    return number


def name_string(value: Any, field: str, where: str) -> str | None:
    """A string or integer as an identifier; None for null or empty.

    Raises:
        DataError: another type, or text that UTF-8 cannot hold.
    """
    if value is None or value == "":
        return None
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{field} is {type(value).__name__}, not a string or integer", where=where)
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{field} holds a lone surrogate, which is not text", where=where) from error
    return text
