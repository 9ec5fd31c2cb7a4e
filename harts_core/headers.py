"""The JSON in which a file of HARTS states its format and version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harts_core.errors import CorruptFileError, SchemaMismatchError


def parse_json(raw: bytes, *, name: str, where: Path) -> Any:
    """Parse JSON that a file holds.

    Args:
        raw: the text, UTF-8.
        name: what it is, for messages.
        where: the file.

    Raises:
        CorruptFileError: it is not JSON.
    """
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{name} is not JSON ({error})", where=str(where)) from error


def parse_header(raw: bytes, *, format: str, version: int, name: str, where: Path) -> dict[str, Any]:
    """``parse_json`` of an object whose ``format`` and ``version`` must be these.

    Raises:
        CorruptFileError: it is not JSON.
        SchemaMismatchError: it is of another format or version.
    """
    header = parse_json(raw, name=name, where=where)
    if not isinstance(header, dict) or header.get("format") != format:
        raise SchemaMismatchError(f"{name} is not of a {format}", where=str(where))
    found = header.get("version")
    if type(found) is not int or found != version:  # True == 1
        raise SchemaMismatchError(
            f"{name} has version {found!r}; this HARTS reads version {version}", where=str(where)
        )
    return header
