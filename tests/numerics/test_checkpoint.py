"""Resuming is bit-exact: interrupted and straight runs end with the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harts_core.errors import ConfigError, CorruptFileError, DataError, InvalidPlanError
from harts_core.exec.checkpoint import list_checkpoints, read_state
from harts_core.exec.run import RunOptions, RunResult, train_run
from tests.support_train import write_config, write_inputs


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def train(
    folder: Path,
    out: str,
    *,
    steps: int,
    resume: bool = False,
    plans: tuple[str, ...] = ("shared",),
    **more: Path,
) -> RunResult:
    return train_run(
        RunOptions(
            plans=tuple(folder / p for p in plans),
            trees=(folder / "tree.arrow",),
            config=folder / "train.toml",
            out=folder / out,
            steps=steps,
            resume=resume,
            **more,
        )
    )


def assert_same_checkpoint(a: Path, b: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors", "config.json", "state.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_and_two_steps_equal_four(tmp_path: Path, dtype: str) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path, dtype=dtype)
    plans = ("shared", "expanded", "shared")  # the resumed run must continue within the list
    straight = train(tmp_path, "straight", steps=4, plans=plans)
    first = train(tmp_path, "cut", steps=2, plans=plans)
    torch.manual_seed(123)  # the random state comes from the checkpoint too
    second = train(tmp_path, "cut", steps=4, plans=plans, resume=True)
    assert second.steps_before == 2
    assert [m.step for m in first.steps + second.steps] == [1, 2, 3, 4]
    assert_same_checkpoint(straight.checkpoint, second.checkpoint)
    for a, b in zip(straight.steps, first.steps + second.steps, strict=True):
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    records = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path)
    done = train(tmp_path, "run", steps=2)
    again = train(tmp_path, "run", steps=2, resume=True)
    assert again.steps == ()
    assert again.checkpoint == done.checkpoint
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path, every=1, keep=2)
    train(tmp_path, "run", steps=4)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000004"]


def test_a_cut_off_write_is_ignored_and_removed(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path, every=1, keep=3)
    straight = train(tmp_path, "straight", steps=3)
    train(tmp_path, "run", steps=2)
    folder = tmp_path / "run" / "checkpoints"
    debris = folder / ".step-000003.abcdef.tmp"
    debris.mkdir()
    (debris / "model.safetensors").write_bytes(b"half")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "loss": 1}\n{"st')  # step 3 was logged, its checkpoint was not finished
    resumed = train(tmp_path, "run", steps=3, resume=True)
    assert_same_checkpoint(straight.checkpoint, resumed.checkpoint)
    assert not debris.exists()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3]
    assert records[2]["loss"] == straight.steps[2].loss


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path)
    path = train(tmp_path, "run", steps=1).checkpoint
    assert read_state(path).step == 1
    file = path / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptFileError, match="does not match its hash"):
        train(tmp_path, "run", steps=2, resume=True)
    file.unlink()
    with pytest.raises(CorruptFileError, match="lacks a file"):
        read_state(path)
    (path / "state.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="not the state of a checkpoint"):
        read_state(path)
    (path / "state.json").unlink()
    with pytest.raises(DataError, match=r"no state\.json"):
        read_state(path)


def test_another_configuration_or_plan_is_not_a_resume(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    train(tmp_path, "run", steps=1)
    with pytest.raises(InvalidPlanError, match="not those of the run"):
        train(tmp_path, "run", steps=2, resume=True, plans=("expanded",))
    config.write_text(config.read_text().replace("1e-3", "2e-3"))
    with pytest.raises(ConfigError, match=r"\[optimizer\] learning_rate: 0.001 → 0.002"):
        train(tmp_path, "run", steps=2, resume=True)
    write_config(tmp_path, every=5, keep=1)  # these may change
    assert len(train(tmp_path, "run", steps=2, resume=True).steps) == 1


def test_a_run_starts_from_another_runs_checkpoint(tmp_path: Path) -> None:
    """The weights come along, the optimizer starts anew; config.json names the model."""
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    first = train(tmp_path, "first", steps=2)
    config.write_text("[optimizer]\nlearning_rate = 0.0\n[runtime]\nthreads = 1\n")
    second = train(tmp_path, "second", steps=1, checkpoint=first.checkpoint)
    same = (first.checkpoint / "model.safetensors").read_bytes()
    assert (second.checkpoint / "model.safetensors").read_bytes() == same
    config.write_text('[model]\npreset = "cpu-dense"\n')
    with pytest.raises(ConfigError, match="contradicts the checkpoint"):
        train(tmp_path, "third", steps=1, checkpoint=first.checkpoint)
    assert not (tmp_path / "third").exists()
    assert list_checkpoints(tmp_path / "third" / "checkpoints") == []
