"""The rollout formats that ``harts ingest`` reads: one module each, one visible list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harts_core.errors import ConfigError, DataError
from harts_core.trees.formats import (
    atif,
    atropos,
    harbor,
    messages,
    nemo_rl,
    prime_rl,
    rows,
    slime,
    verifiers,
)
from harts_core.trees.formats.record import Format

FORMATS: tuple[Format, ...] = (
    verifiers.FORMAT,
    nemo_rl.FORMAT,
    atropos.FORMAT,
    slime.FORMAT,
    harbor.FORMAT,
    atif.FORMAT,
    prime_rl.FORMAT,
    rows.FORMAT,
    messages.FORMAT,
)
"""In sniffing order: the most particular first."""


def find_format(name: str) -> Format:
    """The format of a name.

    Raises:
        ConfigError: no such format.
    """
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise ConfigError(
        f"no format {name!r}", where="--format", hint="one of " + ", ".join(f.name for f in FORMATS)
    )


def sniff_format(record: Mapping[str, Any]) -> Format:
    """The format of a record by its content.

    Raises:
        DataError: none fits; dumps of decoded text are told apart, with the hook that fixes them.
    """
    for candidate in FORMATS:
        if candidate.sniff(record):
            return candidate
    if {"input", "output"} <= record.keys():
        raise DataError(
            "a verl rollout dump: decoded text without special tokens, whose token ids cannot be recovered",
            hint="dump rows with docs/hooks/verl.py instead of trainer.rollout_data_dir",
        )
    raise DataError(
        "the format is not known from the fields " + ", ".join(list(record)[:12]),
        hint="name it with --format, or the token field with --format rows --map tokens=NAME",
    )
