from __future__ import annotations

import json
from pathlib import Path

import pytest

from harts_core.errors import CorruptFileError, SchemaMismatchError
from harts_core.headers import parse_header

WHERE = Path("folder/file.json")


def parse(raw: bytes) -> dict[str, object]:
    return parse_header(raw, format="thing", version=2, name="its header", where=WHERE)


def test_the_whole_header_is_returned() -> None:
    header = {"format": "thing", "version": 2, "more": [1]}
    assert parse(json.dumps(header).encode()) == header


@pytest.mark.parametrize(
    ("raw", "kind", "message"),
    [
        (b"{", CorruptFileError, "its header is not JSON"),
        (b"\xff", CorruptFileError, "its header is not JSON"),
        (b"[" * 100_000, CorruptFileError, "its header is not JSON"),
        (b"[]", SchemaMismatchError, "its header is not of a thing"),
        (b'{"version": 2}', SchemaMismatchError, "its header is not of a thing"),
        (b'{"format": "thing"}', SchemaMismatchError, "has version None; this HARTS reads version 2"),
        (b'{"format": "thing", "version": 3}', SchemaMismatchError, "has version 3"),
        (b'{"format": "thing", "version": 2.0}', SchemaMismatchError, "has version 2.0"),
    ],
)
def test_what_is_none_is_refused(raw: bytes, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        parse(raw)
    assert caught.value.where == str(WHERE)  # type: ignore[attr-defined]
