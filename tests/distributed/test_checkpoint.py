"""Checkpoints of many processes: saved in one layout, read in another, by one process, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from harts_core.exec.checkpoint import list_checkpoints
from harts_core.exec.checkpoint_tensors import stored_state
from harts_core.exec.weights.load import read_stored_model
from tests.cli.program import run_harts
from tests.distributed.launch import run
from tests.distributed.test_train import arguments, folder, metrics, train_alone
from tests.support_train import TOML

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""Megatron-core is imported, which uses what torch has renamed."""

LAYOUTS = {
    "one": "",
    "dp": "[parallel]\ndp = 2\nep = 2\ntimeout_s = 60\n",
    "tp": "[parallel]\ntp = 2\nsp = true\nep = 2\ntimeout_s = 60\n",
}


def configure(folder: Path, name: str, *, dtype: str, form: str = "") -> str:
    chosen = f'checkpoint_format = "{form}"\n' if form else ""
    text = TOML.format(dtype=dtype, every=1, keep=9) + chosen + "\n" + LAYOUTS[name]
    (folder / f"{name}.toml").write_text(text)
    return f"{name}.toml"


def train_in_two(folder: Path, *command: str, program: tuple[str, ...] = ("harts_cli.main",)) -> list[int]:
    return run(["-m", *program, *command], 2, folder=folder)


def logs(folder: Path) -> str:
    return "\n".join((folder / f"rank-{rank}.log").read_text() for rank in range(2))


def weights(path: Path) -> dict[str, Tensor]:
    """Of a checkpoint, with its experts one by one."""
    stored = read_stored_model(path)
    reader, found = stored.reader(), {}
    for name in stored.tensors:
        value = reader.read(name)
        if stored.fused_experts and ".mlp.experts." in name:
            layer, matrix = name.rsplit(".", 1)
            found |= {f"{layer}.{i}.{matrix}.weight": part for i, part in enumerate(value)}
        else:
            found[name] = value
    return found


def tensors(path: Path) -> dict[str, Tensor]:
    """All of a checkpoint but the random states: weights, moments and masters."""
    state, reader, _ = stored_state(path)
    moments = {name: reader.read(name) for name in state if not name.startswith("random_state.")}
    return weights(path) | moments


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert found[name].dtype == want.dtype
        error = float((found[name].double() - want.double()).abs().max())
        assert error <= tolerance * float(want.double().abs().max()), name


def test_every_step_in_another_layout(folder: Path) -> None:
    """One process, two data-parallel ranks that share the optimizer's state, two tensor-parallel ranks, one
    process; whole, sharded, whole, sharded. Metrics, weights and moments are those of one process."""
    configure(folder, "one", dtype="float32")
    train_alone(folder, "alone", 4)
    train_alone(folder, "run", 1)
    configure(folder, "dp", dtype="float32")
    assert train_in_two(folder, *arguments(folder, "dp.toml", "run", 2, "--resume")) == [0, 0], logs(folder)
    configure(folder, "tp", dtype="float32", form="whole")
    assert train_in_two(folder, *arguments(folder, "tp.toml", "run", 3, "--resume")) == [0, 0], logs(folder)
    configure(folder, "one", dtype="float32", form="sharded")
    train_alone(folder, "run", 4, "--resume")
    for found, want in zip(metrics(folder, "run"), metrics(folder, "alone"), strict=True):
        assert found == pytest.approx(want, rel=1e-5)
    made, expected = (list_checkpoints(folder / out / "checkpoints") for out in ("run", "alone"))
    assert [(path / ".metadata").exists() for path in made] == [False, True, False, True]
    for found, want in zip(made, expected, strict=True):
        assert_close(tensors(found), tensors(want), 1e-5)
    files = {path.name: path.stat().st_size for path in made[1].glob("*.distcp")}
    assert files.keys() == {"__0_0.distcp", "__1_0.distcp"}
    content = sum(t.nbytes for t in tensors(made[1]).values())
    # each part is written once (plus about 1.5 kB for every part), by either rank
    assert content < sum(files.values()) < content + 2000 * 2 * len(tensors(made[1]))
    assert max(files.values()) < 0.6 * sum(files.values())


def test_nothing_is_gathered_for_a_save(folder: Path) -> None:
    """The ranks tell one another what they have, and send no tensor."""
    configure(folder, "tp", dtype="float64")
    (folder / "run").mkdir()
    program = ("tests.distributed.saving", "counted")
    assert train_in_two(folder, *arguments(folder, "tp.toml", "run", 1), program=program) == [0, 0], logs(
        folder
    )
    sent = [json.loads((folder / "run" / f"sent-{rank}.json").read_text()) for rank in range(2)]
    assert sum(sent[0] + sent[1]) < 4096  # sizes of pickled objects and flags
    result = run_harts("export-weights", folder / "run/checkpoints/step-000001", "-o", folder / "hf")
    assert result.returncode == 0, result.stderr
    configure(folder, "one", dtype="float64")
    train_alone(folder, "alone", 1)
    assert_close(weights(folder / "hf"), weights(folder / "alone/checkpoints/step-000001"), 1e-9)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_killed_while_it_writes(folder: Path, rank: int) -> None:
    configure(folder, "dp", dtype="float32")
    program = ("tests.distributed.saving", f"killed-{rank}")
    codes = train_in_two(folder, *arguments(folder, "dp.toml", "run", 3), program=program)
    assert codes == ([5, -9] if rank else [-9, 5]), logs(folder)
    lost = "rank 1 was last in" if rank else "rank 0, which holds the job's store, is gone"
    assert lost in logs(folder)
    assert "Traceback" not in logs(folder)
    checkpoints = folder / "run" / "checkpoints"
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step-000001"]
    configure(folder, "one", dtype="float32")
    train_alone(folder, "run", 3, "--resume")
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{i:06d}" for i in (1, 2, 3)]
    train_alone(folder, "alone", 3)
    for found, want in zip(metrics(folder, "run"), metrics(folder, "alone"), strict=True):
        assert found == pytest.approx(want, rel=1e-5)
