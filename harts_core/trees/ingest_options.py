"""The options of ``harts ingest``, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harts_core.errors import ConfigError
from harts_core.trees.formats import rows
from harts_core.trees.group_advantages import ADVANTAGE_KINDS, AdvantageKind

MAX_VOCAB_SIZE = 2**31 - 1
"""Token ids are int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOptions:
    """How to read and check.

    Attributes:
        format: a format's name; None: sniffed per file.
        fields: HARTS field → (dotted) name in the record; overrides the aliases of HARTS rows.
        vocab_size: ids must be below it.
        tokenizer: its name, for the tree's metadata; for messages, what renders them.
        sampling: how rollouts were sampled, for the metadata; for messages, how they become rows.
        group_key: a (dotted) field of the file's record that is the group, in any format.
        group_size: consecutive blocks of this many rollouts of a file are a group.
        group_by_prompt: trajectories with the same tokens before the first trained one are a group.
        advantages: "grpo" or "dr_grpo": computed from rewards, replacing those in the files.
        reward_key: which entry of a dict of rewards counts (Harbor).
        on_bad_record: "error" stops at the first; "skip" counts them.
        on_nonfinite: "error", or "drop": those positions are not trained.
        duplicate_ids: "error", or "suffix": repeats are renamed ``id~2``, ….
        max_record_mib: longest JSON line or document, in MiB.
    """

    format: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int | None = None
    tokenizer: str | None = None
    sampling: str | None = None
    group_key: str | None = None
    group_size: int | None = None
    group_by_prompt: bool = False
    advantages: AdvantageKind | None = None
    reward_key: str | None = None
    on_bad_record: Literal["error", "skip"] = "error"
    on_nonfinite: Literal["error", "drop"] = "error"
    duplicate_ids: Literal["error", "suffix"] = "error"
    max_record_mib: float = 256.0

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "advantages": (None, *ADVANTAGE_KINDS),
            "on_bad_record": ("error", "skip"),
            "on_nonfinite": ("error", "drop"),
            "duplicate_ids": ("error", "suffix"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                options = " or ".join(str(a) for a in allowed if a)
                raise ConfigError(f"{getattr(self, name)!r} is not {options}", where=option_name(name))
        for name in ("vocab_size", "group_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("must be at least 1", where=option_name(name))
        if not 0 < self.max_record_mib < math.inf:
            raise ConfigError(
                f"must be a positive number, not {self.max_record_mib}", where=option_name("max_record_mib")
            )
        if self.vocab_size is not None and self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(f"must be at most {MAX_VOCAB_SIZE}", where=option_name("vocab_size"))
        if sum([self.group_key is not None, self.group_size is not None, self.group_by_prompt]) > 1:
            raise ConfigError("--group-key, --group-size and --group-by-prompt exclude each other")
        for name in self.fields:
            if name not in rows.ALIASES:
                raise ConfigError(
                    f"no field {name!r}", where="--map", hint="one of " + ", ".join(rows.ALIASES)
                )

    @property
    def max_record_bytes(self) -> int:
        """Longest JSON line or document, in bytes."""
        return min(max(1, int(self.max_record_mib * 2**20)), 2**62)


def option_name(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")
