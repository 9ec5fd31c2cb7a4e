from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harts_core.errors import ConfigError
from harts_core.trees import export
from harts_core.trees.export import export_rows
from harts_core.trees.ingest import ingest
from tests.unit.trees.ingest_helpers import ingest_rows, row


def test_rows_read_back_to_the_same_content(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nulls, scalar and per-token advantages, steps, duplicates, several batches of rows."""
    records = []
    for i in range(40):
        length = int(rng.integers(2, 30))
        trained = rng.integers(0, 2, length)
        trained[-1] = 1
        record = row(
            trajectory_id=f"r{i // 2}" if i % 3 else f"x{i}",
            step=i if i % 3 else None,
            tokens=rng.integers(0, 3, length).tolist(),
            loss_mask=trained.tolist(),
            old_logprobs=(-rng.random(length)).tolist() if i % 4 else None,
            ref_logprobs=(-rng.random(length)).tolist() if i % 5 else None,
            advantages=[float(i)] if i % 2 else rng.standard_normal(length).tolist(),
            reward=float(rng.random()) if i % 7 else None,
            policy_version=i if i % 6 else None,
        )
        records.append(record)
    tree, _ = ingest_rows(tmp_path, records, vocab_size=3, tokenizer="tiny")
    monkeypatch.setattr(export, "BATCH_TOKENS", 64)
    seen: list[int] = []
    export_rows(tmp_path / "out.parquet", tree, lambda phase, done, total: seen.append(done))
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == len(seen) > 3
    again, _ = ingest([tmp_path / "out.parquet"])
    assert again.content_sha256 == tree.content_sha256
    assert again.metadata["vocab_size"] == 3
    assert again.metadata["tokenizer"] == "tiny"


def test_only_parquet(tmp_path: Path) -> None:
    tree, _ = ingest_rows(tmp_path, [row()])
    with pytest.raises(ConfigError, match="rows are exported as Parquet"):
        export_rows(tmp_path / "out.jsonl", tree)
    assert not (tmp_path / "out.jsonl").exists()
