from __future__ import annotations

import json
from pathlib import Path

from harts_core.trees.ingest import ingest
from harts_core.trees.tree_file import read_tree, write_tree
from tests.cli.program import run_harts
from tests.unit.trees.ingest_helpers import ingest_rows, row


def test_export_and_ingest_again(tmp_path: Path) -> None:
    tree, _ = ingest_rows(tmp_path, [row(), row(trajectory_id="b", step=3)])
    write_tree(tmp_path / "tree.arrow", tree)
    result = run_harts("export", tmp_path / "tree.arrow", "-o", tmp_path / "rows.parquet", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rows"] == 2
    again, _ = ingest([tmp_path / "rows.parquet"])
    assert again.content_sha256 == read_tree(tmp_path / "tree.arrow").content_sha256


def test_a_rollout_tree_is_not_a_source(tmp_path: Path) -> None:
    tree, _ = ingest_rows(tmp_path, [row()])
    write_tree(tmp_path / "tree.arrow", tree)
    result = run_harts("ingest", tmp_path / "tree.arrow", "-o", tmp_path / "t.arrow")
    assert result.returncode == 3
    assert "a rollout-tree file already" in result.stderr
    assert "harts export" in result.stderr


def test_missing_tree(tmp_path: Path) -> None:
    result = run_harts("export", tmp_path / "none.arrow", "-o", tmp_path / "rows.parquet")
    assert result.returncode == 3
    assert "no such file" in result.stderr
