"""Sharded checkpoints in one process: exact, exported to the bytes of whole ones, refused when damaged."""

from __future__ import annotations

import json
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harts_core.errors import CorruptFileError, DataError, HartsError
from harts_core.exec.export_weights import export_weights
from harts_core.exec.weights import hf_checkpoint
from harts_core.exec.weights.load import read_stored_model
from harts_core.exec.weights.regions import whole_region
from harts_core.exec.weights.safetensors_file import write_safetensors
from harts_core.exec.weights.sharded_checkpoint import read_sharded_checkpoint
from tests.cli.program import run_harts
from tests.numerics.test_checkpoint import contents, damaged, no_space, refused_resume, train
from tests.support_train import TOML, write_inputs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""Megatron-core is imported, which uses what torch has renamed."""


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def configure(folder: Path, form: str, *, dtype: str = "float32", every: int = 0, keep: int = 2) -> None:
    text = TOML.format(dtype=dtype, every=every, keep=keep)
    (folder / "train.toml").write_text(f'{text}checkpoint_format = "{form}"\n')


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_runs_and_other_formats_give_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    write_inputs(tmp_path)
    configure(tmp_path, "sharded", dtype=dtype, every=1, keep=1)
    straight = train(tmp_path, "sharded", steps=3).checkpoint
    assert sorted(contents(straight)) == [
        *(".metadata", "__0_0.distcp", "common.pt", "config.json", "metadata.json", "state.json")
    ]
    assert [p.name for p in straight.parent.iterdir()] == ["step-000003"]  # older ones are pruned
    whole = ""
    for steps, form in enumerate(("whole", "sharded", "whole"), 1):
        configure(tmp_path, form, dtype=dtype, keep=1)
        torch.manual_seed(123)  # the random state comes from the checkpoint too
        result = train(tmp_path, "turns", steps=steps, resume=True)
        whole = str(result.checkpoint)
    configure(tmp_path, "sharded", dtype=dtype)
    debris = tmp_path / "cut" / "checkpoints" / ".step-000002.abc.tmp"
    train(tmp_path, "cut", steps=1)
    debris.mkdir()
    (debris / "__0_0.distcp").write_bytes(b"half")
    cut = train(tmp_path, "cut", steps=3, resume=True).checkpoint
    assert not debris.exists()
    assert contents(cut) == contents(straight)
    for source, name in ((straight, "from-sharded"), (Path(whole), "from-whole")):
        exported = export_weights(source, tmp_path / name)
        assert (exported.step, exported.dtype) == (3, dtype)
        found = contents(tmp_path / name)
        assert found == {
            key: (Path(whole) / key).read_bytes() for key in ("config.json", "model.safetensors")
        }


def with_extra_layer(source: Path, target: Path) -> None:
    """A copy of a checkpoint with two tensors of a layer beyond the model's."""
    tensors = {name: torch.ones(3, 2) * i for i, name in enumerate(("b.weight", "a.weight"))}
    extra = {f"model.layers.2.{name}": t.bfloat16() for name, t in tensors.items()}
    stored = read_stored_model(source)
    reader = stored.reader()
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    write_safetensors(target / "model.safetensors", {n: reader.read(n) for n in stored.tensors} | extra)


def test_tensors_beyond_the_model_and_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_checkpoint, "MAX_SHARD_BYTES", 100_000)
    write_inputs(tmp_path)
    configure(tmp_path, "whole")
    with_extra_layer(train(tmp_path, "first", steps=1).checkpoint, tmp_path / "start")
    made = {}
    for form in ("whole", "sharded"):
        configure(tmp_path, form)
        made[form] = train(tmp_path, form, steps=1, checkpoint=tmp_path / "start").checkpoint
    export_weights(made["sharded"], tmp_path / "exported")
    expected = {n: raw for n, raw in contents(made["whole"]).items() if n not in ("state.json",)}
    expected.pop("optimizer.safetensors")
    assert len(expected) > 3  # config.json, the index, and several files
    assert contents(tmp_path / "exported") == expected
    assert "model.layers.2.a.weight" in read_stored_model(tmp_path / "exported").tensors
    again = train(tmp_path, "again", steps=1, checkpoint=made["sharded"]).checkpoint
    assert "model.layers.2.b.weight" in read_stored_model(again).tensors


def test_megatron_reads_what_is_written(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    write_inputs(tmp_path)
    configure(tmp_path, "sharded", dtype="bfloat16")
    path = train(tmp_path, "run", steps=1).checkpoint
    stored = read_sharded_checkpoint(path)
    reader = stored.reader()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = dist_checkpointing.load_plain_tensors(str(path))
    finally:
        dist.destroy_process_group()
    names = stored.tensors.keys() | stored.state.keys()
    assert found.keys() == names
    assert all(torch.equal(found[name], reader.read(name)) for name in names)
    assert {"optimizer.state.param.lm_head.weight", "random_state.cpu"} <= names
    assert found["model.layers.1.mlp.experts.gate_proj"].dim() == 3


def test_damaged_checkpoints_are_refused_and_say_how_to_fall_back(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    configure(tmp_path, "sharded")
    path = train(tmp_path, "run", steps=1).checkpoint
    whole = contents(path)

    def flipped(name: str) -> bytes:
        middle = len(whole[name]) // 2
        return whole[name][:middle] + bytes([whole[name][middle] ^ 1]) + whole[name][middle + 1 :]

    damages: list[tuple[str, bytes | None, str]] = [
        ("__0_0.distcp", flipped("__0_0.distcp"), "does not match its hash"),
        ("__0_0.distcp", whole["__0_0.distcp"][:-9], "is truncated"),
        ("__0_0.distcp", None, r"there is no __0_0\.distcp"),
        (".metadata", None, "no such file"),
        (".metadata", whole[".metadata"][:-9], "not the index of a sharded checkpoint"),
        (".metadata", pickle.dumps(os.system), r"it names posix\.system"),
        ("common.pt", None, "the checkpoint lacks a file"),
        ("common.pt", b"", "does not match its hash"),
        ("metadata.json", b"{}", "does not match its hash"),
        ("config.json", b"{", "not JSON"),
        ("state.json", None, r"no state\.json"),
        ("state.json", b"{}", "not the state of a checkpoint"),
    ]
    for name, message in damaged(path, damages):
        assert refused_resume(tmp_path, path, message).exit_code == 3, name
        result = run_harts("export-weights", path, "-o", tmp_path / "hf")
        assert result.returncode == 3, name
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "hf").exists()
        with pytest.raises(HartsError):
            train(tmp_path, "other", steps=1, checkpoint=path)
        assert not (tmp_path / "other").exists()
    assert len(train(tmp_path, "run", steps=2, resume=True).steps) == 1


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    configure(tmp_path, "sharded", every=1)
    first = train(tmp_path, "run", steps=1).checkpoint

    monkeypatch.setattr("harts_core.exec.parallel.sharded_save._write_item", no_space)
    with pytest.raises(DataError, match=r"cannot be written .*No space left") as error:
        train(tmp_path, "run", steps=2, resume=True)
    assert error.value.where is not None
    assert error.value.where.endswith(", rank 0")
    assert list(first.parent.iterdir()) == [first]
    assert not dist.is_initialized()


@pytest.mark.parametrize("limit", [40_000, 99_990, 100_000])
def test_a_disk_that_is_full_in_the_middle_of_a_tensor(tmp_path: Path, limit: int) -> None:
    write_inputs(tmp_path)
    configure(tmp_path, "sharded")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # the system refuses the rest of a write
    try:
        with pytest.raises(DataError, match=r"cannot be written \(File too large\)"):
            train(tmp_path, "run", steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    from harts_core.exec.parallel.sharded_save import Part, save_parts

    part = Part(torch.zeros(2), whole_region((2,)), (2,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match=r"cannot be written .no space left") as error:
            save_parts(tmp_path, {"a": [part]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.where == str(tmp_path / "common.pt")
    assert not dist.is_initialized()


def test_the_command_writes_a_new_folder_only(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    configure(tmp_path, "sharded")
    path = train(tmp_path, "run", steps=1).checkpoint
    result = run_harts("export-weights", path, "-o", tmp_path / "hf", "--json")
    report = json.loads(result.stdout)
    assert (report["output"], report["step"]) == (str(tmp_path / "hf"), 1)
    assert report["bytes"] == sum(info.num_bytes for info in read_stored_model(path).tensors.values())
    for target, code, message in (
        (tmp_path / "hf", 3, "the output folder is not empty"),
        (path, 2, "the output is the input"),
        (path / "hf", 2, "the output lies in the checkpoint"),
        (tmp_path / "no" / "hf", 3, "the output folder does not exist"),
    ):
        result = run_harts("export-weights", path, "-o", target)
        assert result.returncode == code, result.stderr
        assert message in result.stderr
    result = run_harts("export-weights", tmp_path, "-o", tmp_path / "other")
    assert (result.returncode, "not a checkpoint of a run" in result.stderr) == (3, True)
    inputs = (tmp_path / "shared", "--tree", tmp_path / "tree.arrow", "--config", tmp_path / "train.toml")
    for arguments in (
        ("export-weights", tmp_path / "run", "-o", tmp_path / "other"),
        ("logprob", *inputs, "--checkpoint", tmp_path / "run", "-o", tmp_path / "other", "--as", "old"),
    ):
        result = run_harts(*arguments)
        assert (result.returncode, "the folder of a run, not a checkpoint" in result.stderr) == (3, True)
        assert f"such as {path}" in result.stderr
    (path / "config.json").write_bytes((path / "config.json").read_bytes() + b"\n")
    with pytest.raises(CorruptFileError, match="does not match its hash"):
        export_weights(path, tmp_path / "other")


def test_log_probs_of_either_format(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    configure(tmp_path, "sharded")
    path = train(tmp_path, "run", steps=1).checkpoint
    export_weights(path, tmp_path / "hf")
    hashes = []
    for source in (path, tmp_path / "hf"):
        files = (
            "--tree",
            tmp_path / "tree.arrow",
            "--config",
            tmp_path / "train.toml",
            "--checkpoint",
            source,
        )
        output = tmp_path / f"{source.name}.arrow"
        result = run_harts("logprob", tmp_path / "shared", *files, "-o", output, "--as", "old", "--json")
        assert result.returncode == 0, result.stderr
        hashes.append(json.loads(result.stdout)["content_sha256"])
    assert hashes[0] == hashes[1]
    (path / "common.pt").write_bytes(b"")
    result = run_harts("logprob", tmp_path / "shared", *files[:-1], path, "-o", output, "--as", "old")
    assert (result.returncode, "does not match its hash" in result.stderr) == (3, True)
