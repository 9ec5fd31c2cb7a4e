"""Seconds of silence on the first use of a machine are announced, by every command that compiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numba
import pytest

import harts_cli.output
import harts_core.exec.calibrate
import harts_core.exec.logprob
import harts_core.trees.tree_file
from harts_cli.output import compiling_shown
from tests.cli.program import run_harts
from tests.support_train import write_config, write_inputs

NOTICE = "first use\n"


def compile_something() -> None:
    @numba.njit
    def successor(x: int) -> int:
        return x + 1

    successor(1)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels of reading a tree, and of making the units of a calibration, were not cached."""

    def after_compiling(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            compile_something()
            return function(*args, **kwargs)

        return wrapped

    for module, name in (
        (harts_core.trees.tree_file, "read_tree"),
        (harts_core.exec.logprob, "read_tree"),
        (harts_core.exec.calibrate, "calibration_units"),
    ):
        monkeypatch.setattr(module, name, after_compiling(getattr(module, name)))
    monkeypatch.setattr(harts_cli.output, "COMPILING", NOTICE)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    "command",
    [
        "inspect tree {tree}",
        "inspect plan {plan} --tree {tree}",
        "inspect memory {plan} --tree {tree}",
        "train {plan} --tree {tree} --config {config} --out {folder}/run",
        "logprob {plan} --tree {tree} --config {config} --as old -o {folder}/out.arrow",
        "calibrate --config {config} --capacity 512 --repeats 1 --chunk 16 -o {folder}/cost.toml",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_commands_announce_it_once(tmp_path: Path, command: str) -> None:
    tree, plan, _ = write_inputs(tmp_path)
    config = write_config(tmp_path)
    names = {"tree": tree, "plan": plan, "config": config, "folder": tmp_path}
    result = run_harts(*command.format(**names).split())
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(NOTICE) == 1
    assert NOTICE not in result.stdout


def test_processes_beside_the_first_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with compiling_shown(announce=False) as clock:
        compile_something()
    assert clock.seconds > 0
    assert capsys.readouterr().err == ""
