"""Resuming is bit-exact: interrupted and straight runs end with the same bytes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harts_core.errors import ConfigError, DataError, HartsError, InvalidPlanError
from harts_core.exec.checkpoint import list_checkpoints, read_state
from harts_core.exec.run import RunOptions, RunResult, train_run
from harts_core.exec.weights.safetensors_file import SafetensorsFile
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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damaged(checkpoint: Path, damages: list[tuple[str, bytes | None, str]]) -> Iterator[tuple[str, str]]:
    """Each file with other contents (None: without it) until the next: its name, and what is to be said."""
    whole = contents(checkpoint)
    for name, content, message in damages:
        if content is None:
            (checkpoint / name).unlink()
        else:
            (checkpoint / name).write_bytes(content)
        yield name, message
        (checkpoint / name).write_bytes(whole[name])


def refused_resume(folder: Path, checkpoint: Path, message: str) -> HartsError:
    """The error, which says how to do without the checkpoint."""
    with pytest.raises(HartsError, match=message) as error:
        train(folder, "run", steps=2, resume=True)
    assert error.value.hint is not None
    assert error.value.hint.startswith(f"remove {checkpoint}: --resume then continues")
    return error.value


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


def test_damaged_checkpoints_are_refused_and_say_how_to_fall_back(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path)
    path = train(tmp_path, "run", steps=1).checkpoint
    assert read_state(path).step == 1
    whole = contents(path)
    state = json.loads(whole["state.json"])

    def flipped(name: str) -> bytes:
        return whole[name][:-1] + bytes([whole[name][-1] ^ 1])

    def changed(**values: object) -> bytes:
        return json.dumps(state | values).encode()

    damages: list[tuple[str, bytes | None, str]] = [
        ("optimizer.safetensors", flipped("optimizer.safetensors"), "does not match its hash"),
        ("optimizer.safetensors", None, "lacks a file"),
        ("model.safetensors", None, "neither model.safetensors"),
        ("model.safetensors", b"", "not a safetensors file"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b'{"hidden_size": 64}', "The model config lacks"),
        ("state.json", None, r"no state\.json"),
        ("state.json", b"{}", "not the state of a checkpoint"),
        ("state.json", changed(step=2), "state.json is of step 2, the folder of another"),
        ("state.json", changed(step="1"), "not the state of a checkpoint"),
        ("state.json", changed(seed=9), "the checkpoint is of seed 9 in float"),
        ("state.json", changed(dtype="float16"), "in float16, not of this run"),
    ]
    for _, message in damaged(path, damages):
        refused_resume(tmp_path, path, message)
    assert len(train(tmp_path, "run", steps=2, resume=True).steps) == 1


def test_weights_that_cannot_be_written_are_an_error_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path)

    monkeypatch.setattr(SafetensorsFile, "write", no_space)
    with pytest.raises(DataError, match=r"cannot be written .*No space left") as error:
        train(tmp_path, "run", steps=1)
    assert error.value.where == str(tmp_path / "run" / "checkpoints" / "step-000001")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_resumed_run_says_what_is_missing(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_config(tmp_path)
    path = train(tmp_path, "run", steps=2).checkpoint
    warnings: list[str] = []
    options = RunOptions(
        plans=(tmp_path / "shared",),
        trees=(tmp_path / "tree.arrow",),
        config=tmp_path / "train.toml",
        out=tmp_path / "run",
        checkpoint=path,
        resume=True,
        steps=3,
    )
    (tmp_path / "run" / "metrics.jsonl").unlink()
    train_run(options, on_warning=warnings.append)
    assert warnings == [
        f"the run continues from {path}; --checkpoint is not used",
        f"{tmp_path / 'run' / 'metrics.jsonl'} has 0 of the 2 steps done",
    ]


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
