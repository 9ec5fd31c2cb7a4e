from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from harts_cli.commands.synth import Kind, Preset
from harts_core.trees.synth import KINDS, PRESETS
from tests.cli.program import run_harts


def test_the_options_offer_every_kind_and_preset() -> None:
    assert tuple(k.value for k in Kind) == KINDS
    assert {p.value for p in Preset} == set(PRESETS)


def test_writes_rows_and_says_what(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    result = run_harts("synth", "-o", file, "--kind", "step", "--rows", "20", "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["rows"] == 20
    assert pq.read_metadata(file).num_rows == 20
    text = run_harts("synth", "-o", file, "--kind", "step", "--rows", "20")
    assert f"20 rows of {summary['tasks']} tasks, {summary['tokens']:,} tokens" in text.stdout


def test_bad_options_exit_2_and_write_nothing(tmp_path: Path) -> None:
    for options in (["--rows", "0"], ["--vocab-size", "3"], ["--kind", "loop"]):
        result = run_harts("synth", "-o", tmp_path / "rows.parquet", *options)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_missing_output_folder_exits_3_with_a_hint(tmp_path: Path) -> None:
    result = run_harts("synth", "-o", tmp_path / "no" / "rows.parquet")
    assert result.returncode == 3
    assert "the output folder does not exist" in result.stderr
    assert "mkdir -p" in result.stderr
