"""Writing and reading files: nothing partial, nothing of the user's lost, every failure a HartsError."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from harts_core.errors import ConfigError, CorruptFileError, DataError, HartsError
from harts_core.files import (
    FolderKind,
    atomic_directory,
    atomic_file,
    read_arrow,
    refuse_inputs,
    write_arrow,
)
from harts_core.plan.bundle_file import write_bundle
from harts_core.trees.tree_file import read_tree, write_tree
from tests.unit.plan.plans import random_plan

KIND = FolderKind(marker="mark.json", format="thing", names=("mark.json", "*.arrow"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def replace_folder(path: Path, kind: FolderKind | None = KIND) -> None:
    with atomic_directory(path, replaces=kind) as temporary:
        (temporary / "mark.json").write_text('{"format": "thing", "new": true}')


def test_a_folder_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    folder = fill(tmp_path / "out", mark_json='{"format": "thing"}', a_arrow="old")
    replace_folder(folder)
    assert content(tmp_path) == {"out/mark.json": b'{"format": "thing", "new": true}'}


@pytest.mark.parametrize("kind", [KIND, None])
def test_an_empty_folder_is_replaced(tmp_path: Path, kind: FolderKind | None) -> None:
    replace_folder(fill(tmp_path / "out"), kind)
    assert list(content(tmp_path)) == ["out/mark.json"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"mark_json": "my notes"}, "not a thing"),
        ({"mark_json": '{"format": "other"}'}, "not a thing"),
        ({"mark_json": "[1]"}, "not a thing"),
        ({"mark_json": '{"format": "thing"}', "thesis_tex": "x"}, "more than a thing: thesis.tex"),
        ({"a_arrow": "x"}, "not a thing"),
    ],
)
def test_other_folders_are_left_alone(tmp_path: Path, files: dict[str, str], message: str) -> None:
    fill(tmp_path / "out", **files)
    before = content(tmp_path)
    with pytest.raises(DataError, match=message):
        replace_folder(tmp_path / "out")
    assert content(tmp_path) == before


def test_a_folder_with_a_folder_inside_is_left_alone(tmp_path: Path) -> None:
    folder = fill(tmp_path / "out", mark_json='{"format": "thing"}')
    fill(folder / "deep.arrow", precious_txt="x")
    with pytest.raises(DataError, match="holds more than a thing"):
        replace_folder(folder)
    assert (folder / "deep.arrow" / "precious.txt").is_file()


def test_no_kind_means_only_empty_folders(tmp_path: Path) -> None:
    fill(tmp_path / "out", mark_json='{"format": "thing"}')
    with pytest.raises(DataError, match="not empty"):
        replace_folder(tmp_path / "out", None)


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(DataError, match="not a folder"):
        replace_folder(tmp_path / "out")
    assert content(tmp_path) == {"out": b"x"}


def test_the_current_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "out", mark_json='{"format": "thing"}')
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match="the current folder"):
        replace_folder(Path())
    assert content(tmp_path) == {"out/mark.json": b'{"format": "thing"}'}


def test_links_are_written_through(tmp_path: Path) -> None:
    fill(tmp_path / "real", mark_json='{"format": "thing"}')
    fill(tmp_path, real_txt="old")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "link.txt").symlink_to("real.txt")
    (tmp_path / "dangling").symlink_to("new.txt")
    replace_folder(tmp_path / "link")
    for name in ("link.txt", "dangling"):
        with atomic_file(tmp_path / name) as temporary:
            temporary.write_text("new")
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "mark.json").read_text() == '{"format": "thing", "new": true}'
    assert (tmp_path / "real.txt").read_text() == (tmp_path / "new.txt").read_text() == "new"
    names = {"real", "real.txt", "link", "link.txt", "dangling", "new.txt"}
    assert {p.name for p in tmp_path.iterdir()} == names  # nothing left behind


def test_a_pipe_is_not_an_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"), atomic_file(tmp_path / "pipe"):
        pass
    with pytest.raises(DataError, match="not a folder"):
        replace_folder(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_pipe_is_not_an_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        read_arrow(tmp_path / "pipe")


def write_half(path: Path, error: BaseException) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text("half")
        raise error


def fill_half(path: Path, error: BaseException) -> None:
    with atomic_directory(path) as temporary:
        (temporary / "a").write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "No")])
def test_what_the_system_refuses_names_the_output_and_leaves_the_old_file(
    tmp_path: Path, error: OSError
) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(DataError, match="cannot be written") as caught:
        write_half(tmp_path / "out", error)
    assert caught.value.where == str(tmp_path / "out")
    with pytest.raises(DataError, match="cannot be written"):
        fill_half(tmp_path / "folder", error)
    assert content(tmp_path) == {"out": b"old"}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_a_data_error(tmp_path: Path) -> None:
    folder = fill(tmp_path / "locked")
    folder.chmod(0o500)
    try:
        with pytest.raises(DataError, match="Permission denied"), atomic_file(folder / "out"):
            pass
    finally:
        folder.chmod(0o700)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "out", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fill_half(tmp_path / "folder", KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_not_inputs(tmp_path: Path) -> None:
    fill(tmp_path, a_txt="a")
    fill(tmp_path / "folder", b_txt="b")
    (tmp_path / "link").symlink_to("a.txt")
    os.link(tmp_path / "a.txt", tmp_path / "hard")
    inputs = [tmp_path / "a.txt", tmp_path / "folder"]
    for name in ("a.txt", "link", "hard", "folder", "folder/b.txt", "folder/../a.txt"):
        with pytest.raises(ConfigError, match="the input"):
            refuse_inputs(tmp_path / name, inputs)
    for name in ("c.txt", "folder/new.txt"):
        refuse_inputs(tmp_path / name, inputs)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """One of three kinds of damage."""
    copy = bytearray(data)
    kind, start = int(rng.integers(3)), int(rng.integers(len(data)))
    if kind == 0:
        for at in rng.integers(len(data), size=int(rng.integers(1, 9))):
            copy[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        copy = copy[:start]
    else:
        stop = min(len(data), start + int(rng.integers(1, 64)))
        copy[start:stop] = bytes(stop - start)
    return bytes(copy)


def test_damaged_arrow_files_are_harts_errors(tmp_path: Path) -> None:
    tree, bundle = random_plan(0)
    write_tree(tmp_path / "tree.arrow", tree)
    write_bundle(tmp_path / "plan", bundle)
    rng = np.random.default_rng(7)
    refused = 0
    for source in (tmp_path / "tree.arrow", tmp_path / "plan" / "spans.arrow"):
        data = source.read_bytes()
        for case in range(150):
            file = tmp_path / "damaged.arrow"
            file.write_bytes(damaged(data, rng))
            try:
                read_tree(file) if source.name == "tree.arrow" else read_arrow(file)
            except HartsError:
                refused += 1
            except BaseException as error:
                pytest.fail(f"{source.name}, case {case}: {error!r}")
    assert refused > 100


def test_column_names_that_are_not_text_are_refused(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", pa.table({"suffix": [1]}), compression=None)
    data = (tmp_path / "a.arrow").read_bytes().replace(b"suffix", b"suf\xff\xfex")
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(CorruptFileError, match="not a readable Arrow IPC file"):
        read_arrow(tmp_path / "a.arrow")
