"""Writing small rollout files and ingesting them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from harts_core.trees.ingest_report import IngestReport
from harts_core.trees.rollout_tree import RolloutTree


def row(**fields: Any) -> dict[str, Any]:
    """A valid HARTS row; ``fields`` change it."""
    good: dict[str, Any] = {
        "trajectory_id": "a",
        "group_id": "g",
        "tokens": [5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1],
        "old_logprobs": [0.0, 0.0, -0.5, -0.25],
    }
    return {k: v for k, v in (good | fields).items() if v is not ...}


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def ingest_rows(tmp_path: Path, records: Iterable[Any], **options: Any) -> tuple[RolloutTree, IngestReport]:
    return ingest([write_jsonl(tmp_path / "rows.jsonl", records)], IngestOptions(**options))
