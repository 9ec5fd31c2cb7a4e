"""Damaged files: one error that names file and line, or one skipped record; never more, never a traceback."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from harts_core.errors import CorruptFileError, DataError
from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from tests.unit.trees.ingest_helpers import row, write_jsonl


def damaged_files(folder: Path) -> dict[str, tuple[bytes, str, str]]:
    """name → (content, message, place)."""
    good = json.dumps(row()).encode() + b"\n"
    second = json.dumps(row(trajectory_id="b")).encode()
    many = b"".join(json.dumps(row(trajectory_id=f"t{i}", x=i * 7919)).encode() + b"\n" for i in range(500))
    table = pa.table({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]})
    pq.write_table(table, folder / "whole.parquet")
    parquet = (folder / "whole.parquet").read_bytes()
    return {
        "truncated.jsonl": (good + second[:-9], "not valid JSON .* the file may be truncated", ", line 2"),
        "latin.jsonl": (good + b'{"id": "caf\xe9"}\n', "not UTF-8 text", ", line 2"),
        "utf16.jsonl": (good.decode().encode("utf-16"), "UTF-16 text", ", line 1"),
        "empty.jsonl": (b"", "the file is empty", ""),
        "list.jsonl": (good + b"3\n", "a JSON int, not an object", ", line 2"),
        "deep.jsonl": (good + b"[" * 200_000 + b"]" * 200_000 + b"\n", "nested too deeply", ", line 2"),
        "huge.jsonl": (
            good + b'{"x": "' + b"y" * 2**20 + b'"}\n' + second,
            "longer than 0.5 MiB",
            ", line 2",
        ),
        "cut.jsonl.gz": (gzip.compress(many)[:-400], "cannot be read beyond line", ", line "),
        "cut.jsonl.zst": (zstandard.compress(many)[:-40], "cannot be read beyond line", ", line "),
        "cut.parquet": (parquet[:-30], "not a readable Parquet file", ", row 0"),
        "cut.arrow": (b"ARROW1\0\0" + b"\1" * 40, "not a readable Arrow file", ", row 0"),
        "dump.pkl": (pickle.dumps([1, 2]), "a pickle file, which HARTS does not read", ""),
    }


@pytest.mark.parametrize(
    "name",
    [
        "truncated.jsonl",
        "latin.jsonl",
        "utf16.jsonl",
        "empty.jsonl",
        "list.jsonl",
        "deep.jsonl",
        "huge.jsonl",
        "cut.jsonl.gz",
        "cut.jsonl.zst",
        "cut.parquet",
        "cut.arrow",
        "dump.pkl",
    ],
)
def test_damaged_files_name_file_and_line_or_are_skipped(tmp_path: Path, name: str) -> None:
    content, message, place = damaged_files(tmp_path)[name]
    (tmp_path / name).write_bytes(content)
    good = write_jsonl(tmp_path / "good.jsonl", [row(trajectory_id="good")])
    with pytest.raises(DataError, match=message) as error:
        ingest([tmp_path / name, good], IngestOptions(max_record_mib=0.5))
    assert error.value.where is not None
    assert error.value.where.startswith(name + place)
    options = IngestOptions(max_record_mib=0.5, on_bad_record="skip")
    tree, report = ingest([tmp_path / name, good], options)
    assert "good" in tree.trajectory_id
    assert report.dropped["bad record"].count == 1
    if name == "huge.jsonl":  # what follows the long line is read
        assert sorted(tree.trajectory_id) == ["a", "b", "good"]


def test_truncated_container_is_a_corrupt_file(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    with pytest.raises(CorruptFileError):
        ingest([tmp_path / "x.parquet"])
