"""The program itself: help, version, and how errors leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harts_core import __version__
from tests.cli.program import run_harts, run_harts_process


def test_help_lists_the_commands() -> None:
    result = run_harts("--help")
    assert result.returncode == 0
    for command in ("synth", "ingest", "plan", "inspect", "train", "export"):
        assert command in result.stdout


def test_version() -> None:
    assert run_harts("--version").stdout == f"harts {__version__}\n"


def test_no_command_shows_the_help_as_a_usage_error() -> None:
    result = run_harts()
    assert result.returncode == 2
    assert "Usage" in result.stdout + result.stderr


def test_an_expected_error_is_three_lines_on_stderr(tmp_path: Path) -> None:
    result = run_harts_process("synth", "-o", tmp_path / "no" / "rows.parquet")
    assert result.returncode == 3
    assert result.stdout == ""
    assert [line.split(":")[0].strip() for line in result.stderr.splitlines()] == ["error", "where", "hint"]


def test_debug_mode_shows_the_traceback(tmp_path: Path) -> None:
    target = tmp_path / "no" / "rows.parquet"
    result = run_harts_process("synth", "-o", target, env={"HARTS_DEBUG": "1"})
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "DataError" in result.stderr


@pytest.mark.parametrize("arguments", [["frobnicate"], ["synth"], ["synth", "-o", "x", "--rows", "many"]])
def test_usage_errors_exit_2(arguments: list[str]) -> None:
    result = run_harts(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harts_core.trees.synth.write_rows", interrupt)
    result = run_harts("synth", "-o", tmp_path / "rows.parquet")
    assert result.returncode == 130
    assert list(tmp_path.iterdir()) == []
