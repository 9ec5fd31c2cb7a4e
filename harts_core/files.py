"""Files on disk: atomic writes, checked reads, hashes.

Everything HARTS writes goes to a temporary name beside its target, is fsynced and renamed, so that a
reader (or an interrupted run) sees the old file, the new one, or none; never a part.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from harts_core.errors import CorruptFileError, DataError


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise DataError(
            "the output folder does not exist", where=str(path.parent), hint=f"mkdir -p {path.parent}"
        )


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; on success it replaces ``path``, on any error it is removed.

    Raises:
        DataError: the parent folder does not exist, or ``path`` is a directory.
    """
    path = Path(path)
    _check_parent(path)
    if path.is_dir():
        raise DataError("the output is a directory", where=str(path), hint="name a file")
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, *, replaces: str) -> Iterator[Path]:
    """Yield a temporary directory to fill; on success it becomes ``path``.

    An existing directory is replaced only if it is empty or holds a file named ``replaces`` (the marker of
    the same kind of output), so that a mistyped path never deletes something else.

    Raises:
        DataError: the parent does not exist, or ``path`` exists and is something else.
    """
    path = Path(path)
    _check_parent(path)
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / replaces).is_file())):
        raise DataError(
            f"the output exists and is not a folder with {replaces}; it is left alone",
            where=str(path),
            hint="name another folder, or remove it",
        )
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    old = temporary.with_suffix(".old")
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        for file in sorted(temporary.rglob("*")):
            fsync_path(file)
        fsync_path(temporary)
        if path.exists():
            os.rename(path, old)  # a directory with content cannot be replaced in one call
        os.rename(temporary, path)
        fsync_path(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex; streamed."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_arrow(path: Path, table: pa.Table, *, compression: str | None) -> None:
    """Write one Arrow IPC file. ``compression``: ``"zstd"`` or ``None``. Not atomic by itself."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)


def read_arrow(path: Path) -> pa.Table:
    """Read a whole Arrow IPC file (memory-mapped, fully validated).

    Raises:
        DataError: no such file.
        CorruptFileError: not an Arrow IPC file, truncated, or internally inconsistent.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError("no such file", where=str(path))
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowIOError, pa.ArrowNotImplementedError, OSError) as error:
        raise CorruptFileError(f"not a readable Arrow IPC file ({error})", where=str(path)) from error
    return table
