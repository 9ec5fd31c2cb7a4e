from __future__ import annotations

import json
from pathlib import Path

from harts_core.trees.tree_file import read_tree
from tests.cli.program import run_harts
from tests.unit.trees.ingest_helpers import row, write_jsonl


def make(tmp_path: Path) -> Path:
    records = [row(trajectory_id=f"t{i}", tokens=[5, 6, 7, i // 2], reward=float(i % 2)) for i in range(4)]
    return write_jsonl(tmp_path / "rows.jsonl", records)


def test_writes_the_tree_and_prints_the_report(tmp_path: Path) -> None:
    result = run_harts("ingest", make(tmp_path), "-o", tmp_path / "tree.arrow")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for text in ("trie tokens", "compression", "3.20×", "duplicates", "lost sharing"):
        assert text in result.stdout
    assert read_tree(tmp_path / "tree.arrow").num_rows == 4


def test_json_report(tmp_path: Path) -> None:
    arguments = ["ingest", make(tmp_path), "-o", tmp_path / "t.arrow", "--json", "--advantages", "grpo"]
    result = run_harts(*arguments)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["rows"], report["tokens"], report["trie_tokens"], report["duplicates"]) == (4, 16, 5, 2)
    assert report["compression"] == 3.2
    tree = read_tree(tmp_path / "t.arrow")
    assert report["content_sha256"] == tree.content_sha256
    assert tree.advantages is not None


def test_options_reach_the_library(tmp_path: Path) -> None:
    record = row(tokens=..., ids=["5", "6"], loss_mask=[0, 1], old_logprobs=[0, None], group_id=...)
    path = write_jsonl(tmp_path / "r.jsonl", [record, row(trajectory_id="b", ids=[1, 2, 3, 4]), {"x": 1}])
    arguments = ["--map", "tokens=ids", "--vocab-size", "50", "--tokenizer", "tiny", "--sampling", "step"]
    arguments += ["--on-bad-record", "skip", "--on-nonfinite", "drop", "--group-by-prompt", "--json"]
    result = run_harts("ingest", path, "-o", tmp_path / "t.arrow", *arguments)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    dropped = {reason: finding["count"] for reason, finding in report["dropped"].items()}
    assert dropped == {"non-finite value (positions)": 1, "no trained position": 1, "bad record": 1}
    metadata = read_tree(tmp_path / "t.arrow").metadata
    assert (metadata["vocab_size"], metadata["tokenizer"], metadata["sampling"]) == (50, "tiny", "step")


def test_bad_data_is_one_message_and_no_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "r.jsonl", [row(), row(trajectory_id="b", loss_mask=[1])])
    result = run_harts("ingest", path, "-o", tmp_path / "t.arrow")
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.startswith("error: loss_mask has 1 values for 4 tokens\n  where: r.jsonl, line 2")
    assert list(tmp_path.iterdir()) == [path]


def test_the_output_may_not_be_a_source(tmp_path: Path) -> None:
    path = make(tmp_path)
    before = path.read_bytes()
    result = run_harts("ingest", path, "-o", path)
    assert result.returncode == 2
    assert "the output is the input " in result.stderr
    assert path.read_bytes() == before


def test_wrong_options_are_usage_errors(tmp_path: Path) -> None:
    path = make(tmp_path)
    for arguments in (["--map", "tokens"], ["--format", "x"], ["--advantages", "gae"], ["--group-size", "0"]):
        result = run_harts("ingest", path, "-o", tmp_path / "t.arrow", *arguments)
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == [path]
