"""One record of a source file, or the error that stands in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harts_core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A record as a mapping, or why it could not be read.

    Attributes:
        number: 1-based line of a JSON file, 0-based row of a columnar file, 0-based index in a document.
        unit: "line", "row", "item" or "file": what ``number`` counts ("file": the whole file).
        content: the record's fields, or the error (without ``where``).
    """

    number: int
    unit: str
    content: Mapping[str, Any] | DataError

    def where(self, source: str) -> str:
        """The item's place for messages: "file.jsonl, line 3"."""
        return source if self.unit == "file" else f"{source}, {self.unit} {self.number}"
