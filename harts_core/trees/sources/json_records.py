"""JSON records: one object per line, or one document (an object or a list), plain, gzip or zstd."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harts_core.errors import CorruptFileError, DataError
from harts_core.trees.sources.item import Item

LIMIT_HINT = "raise the limit with --max-record-mib, or leave it out with --on-bad-record skip"


def read_json(path: Path, max_record_bytes: int) -> Iterator[Item]:
    """Stream the records of a file; memory is bounded by ``max_record_bytes``, not by the file."""
    line = 0
    try:
        import zstandard

        failures: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, zstandard.ZstdError)
        with open(path, "rb") as raw, _decompressed(raw) as stream:
            for line, text in _lines(stream, max_record_bytes):
                if line == 1 and isinstance(text, bytes) and text.strip() in (b"{", b"[", b"[{"):
                    yield from _document(text + stream.read(max_record_bytes + 1), max_record_bytes)
                    return
                yield from _records(text, line)
    except failures as error:
        what = f"cannot be read beyond line {line} ({error or type(error).__name__})"
        yield Item(number=line + 1, unit="line", content=CorruptFileError(what, hint="the file is damaged"))


def _decompressed(raw: io.BufferedReader) -> io.BufferedReader:
    head = raw.read(4)
    raw.seek(0)
    if head[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 2**20)
    if head == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(_ZstdFrames(raw), 2**20)
    return raw


class _ZstdFrames(io.RawIOBase):
    """The content of concatenated zstd frames; a frame cut short is an error, not an end."""

    CHUNK = 4096  # compressed bytes at a time: bounds what a hostile file can expand to at once

    def __init__(self, raw: io.BufferedReader) -> None:
        import zstandard

        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        """A reader."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the next bytes; 0 at the end."""
        while not self._content:
            self._compressed = self._compressed or self._raw.read(self.CHUNK)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("a zstd frame is cut short")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._content = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._content))
        buffer[:size] = self._content[:size]
        self._content = self._content[size:]
        return size


def _lines(stream: io.BufferedReader, limit: int) -> Iterator[tuple[int, bytes | DataError]]:
    """(number, line) for every line that is not blank; a line over the limit is an error in its place."""
    number = 0
    while line := stream.readline(limit + 1):
        number += 1
        if len(line) > limit and not line.endswith(b"\n"):
            while (rest := stream.readline(2**20)) and not rest.endswith(b"\n"):
                pass
            error = DataError(f"longer than {limit / 2**20:g} MiB", hint=LIMIT_HINT)
            yield number, error
        elif number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
            yield number, DataError("UTF-16 text; JSON files are UTF-8", hint="iconv -f UTF-16 -t UTF-8")
            return
        elif number == 1 and line.startswith(b"\xef\xbb\xbf"):
            yield number, line[3:]
        elif line.strip():
            yield number, line


def _records(text: bytes | DataError, line: int) -> Iterator[Item]:
    value = text if isinstance(text, DataError) else _parse(text)
    if isinstance(value, list):  # a list on one line: its elements are the records
        yield from _elements(value)
    elif isinstance(value, dict | DataError):
        yield Item(number=line, unit="line", content=value)
    else:
        error = DataError(f"a JSON {type(value).__name__}, not an object")
        yield Item(number=line, unit="line", content=error)


def _document(text: bytes, limit: int) -> Iterator[Item]:
    """A pretty-printed document: an object, or a list of them."""
    if len(text) > limit:
        error = DataError(f"one JSON document longer than {limit / 2**20:g} MiB", hint=LIMIT_HINT)
        yield Item(number=0, unit="file", content=error)
        return
    value = _parse(text)
    if isinstance(value, list):
        yield from _elements(value)
    else:
        content = value if isinstance(value, dict | DataError) else DataError("not a JSON object or list")
        yield Item(number=0, unit="file", content=content)


def _elements(values: list[Any]) -> Iterator[Item]:
    for i, value in enumerate(values):
        content = value if isinstance(value, dict) else DataError(f"a {type(value).__name__}, not an object")
        yield Item(number=i, unit="item", content=content)


def _parse(text: bytes) -> Any:
    """The JSON value, or the error of it. NaN and infinities pass here; the checks judge them by field."""
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8 text (byte {error.start})", hint="re-encode the file as UTF-8")
    except RecursionError:
        return DataError("JSON nested too deeply")
    except ValueError as error:
        end = "" if text.endswith(b"\n") else "; the line has no end: the file may be truncated"
        return DataError(f"not valid JSON ({error}){end}")
