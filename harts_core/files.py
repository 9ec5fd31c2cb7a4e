"""Files on disk: atomic writes, checked reads, hashes.

Everything HARTS writes goes to a temporary name beside its target, is fsynced and renamed, so that a
reader (or an interrupted run) sees the old file, the new one, or none; never a part. Symbolic links are
followed first: what a link points to is replaced, the link stays. Only regular files and folders are
written, and what the operating system refuses is a DataError that names the output.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa

from harts_core.errors import ConfigError, CorruptFileError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """What tells one kind of output folder from anything else.

    Attributes:
        marker: name of its JSON file that states the format.
        format: what that file has under ``format``.
        names: every name (or pattern such as ``*.arrow``) that such a folder holds.
    """

    marker: str
    format: str
    names: tuple[str, ...]


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


def os_reason(error: OSError) -> str:
    """What the operating system says: "No space left on device"."""
    return error.strerror or str(error) or type(error).__name__


@contextmanager
def naming_output(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses while writing into an error that names the output."""
    try:
        yield
    except OSError as error:
        raise DataError(f"the output cannot be written ({os_reason(error)})", where=str(path)) from error


def check_parent(path: Path) -> None:
    """Refuse an output whose folder does not exist.

    Raises:
        DataError: ``path.parent`` is not a folder.
    """
    if not path.parent.is_dir():
        raise DataError(
            "the output folder does not exist", where=str(path.parent), hint=f"mkdir -p {path.parent}"
        )


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write a command's output over what it reads.

    Args:
        output: the file or folder to write; it need not exist.
        inputs: the files and folders that the command reads; the files of such a folder are inputs too.

    Raises:
        ConfigError: the output is an input, or an existing file of an input folder.
    """
    target = Path(os.path.realpath(output))
    for path in inputs:
        source = Path(os.path.realpath(path))
        inside = source.is_dir() and target.parent == source and target.exists()
        if target == source or inside or (target.exists() and source.exists() and target.samefile(source)):
            raise ConfigError(
                f"the output is {'a file of ' if inside else ''}the input {path}",
                where=str(output),
                hint="name another output",
            )


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; on success it replaces ``path``, on any error it is removed.

    Raises:
        DataError: the parent folder does not exist, ``path`` is a directory, a device or a pipe, or the
            operating system refuses the write.
    """
    path = Path(path)
    with naming_output(path):
        if path.is_dir():
            raise DataError("the output is a directory", where=str(path), hint="name a file")
        if path.exists() and not path.is_file():
            raise DataError(
                "the output is not a regular file", where=str(path), hint="write to a file and copy it there"
            )
        target = Path(os.path.realpath(path))
        check_parent(target if path.is_symlink() else path)
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(fd)
        temporary = Path(name)
        try:
            yield temporary
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files
            fsync_path(temporary)
            os.replace(temporary, target)
            fsync_path(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, *, replaces: FolderKind | None = None) -> Iterator[Path]:
    """Yield a temporary directory to fill; on success it becomes ``path``.

    An existing directory is replaced only if it is empty or is an output of the same kind and nothing else,
    so that a mistyped path never deletes what HARTS did not write.

    Args:
        path: the directory.
        replaces: the kind of directory that may be replaced; None: only an empty one.

    Raises:
        DataError: the parent does not exist, ``path`` exists and is something else, or the operating system
            refuses the write.
    """
    path = Path(path)
    with naming_output(path):
        target = Path(os.path.realpath(path))
        check_parent(target if path.is_symlink() else path)
        if path.exists():
            check_replaceable(path, replaces)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        old = temporary.with_suffix(".old")
        try:
            yield temporary
            os.chmod(temporary, 0o777 & ~_umask())
            for file in sorted(temporary.rglob("*")):
                fsync_path(file)
            fsync_path(temporary)
            if target.exists():
                os.rename(target, old)  # a directory with content cannot be replaced in one call
            os.rename(temporary, target)
            fsync_path(target.parent)
        except BaseException:
            if old.exists() and not target.exists():
                os.rename(old, target)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def check_replaceable(path: Path, kind: FolderKind | None) -> None:
    """Refuse to replace anything but an empty directory or one of the kind.

    Args:
        path: an existing file or folder.
        kind: see ``atomic_directory``.

    Raises:
        DataError: it is something else.
    """
    wrong = None
    found = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    if not path.is_dir():
        wrong = "the output exists and is not a folder"
    elif path.samefile(os.curdir):
        wrong = "the output is the current folder, which cannot be replaced"
    elif found and kind is None:
        wrong = "the output folder is not empty"
    elif found and kind is not None:
        other = [n for n in found if not any(fnmatchcase(n, pattern) for pattern in kind.names)]
        if not states_format(path / kind.marker, kind.format):
            wrong = f"the output folder is not empty, and not a {kind.format}"
        elif other or any((path / n).is_dir() for n in found):
            wrong = f"the output folder holds more than a {kind.format}: {', '.join(other[:3])}"
    if wrong is not None:
        raise DataError(f"{wrong}; it is left alone", where=str(path), hint="name another folder")


def states_format(marker: Path, name: str) -> bool:
    """Whether a JSON file has that ``format``."""
    try:
        values = json.loads(marker.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("format") == name


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
        DataError: no such file, or it cannot be opened.
        CorruptFileError: not an Arrow IPC file, truncated, or internally inconsistent.
    """
    path = Path(path)
    check_file(path)
    with arrow_failures(path):
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        table.validate(full=True)
        list(table.schema.names)  # raises where a name is not UTF-8
    return table


@contextmanager
def arrow_failures(path: Path) -> Iterator[None]:
    """Turn what Arrow raises on a damaged file, when reading or converting it, into a CorruptFileError."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, UnicodeError) as error:
        text = str(error).splitlines() or [type(error).__name__]
        raise CorruptFileError(f"not a readable Arrow IPC file ({text[0]})", where=str(path)) from error


def check_file(path: Path) -> None:
    """Refuse to read what is not a regular, readable file.

    Raises:
        DataError: no such file, a folder, a pipe or device, or it may not be read.
    """
    if not path.exists():
        raise DataError("no such file", where=str(path))
    if path.is_dir():
        raise DataError("a folder, not a file", where=str(path))
    if not path.is_file():
        raise DataError("not a regular file", where=str(path), hint=PIPE_HINT)
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise DataError(f"the file cannot be read ({os_reason(error)})", where=str(path)) from error


PIPE_HINT = "pipes and devices cannot be read twice; write the data to a file first"
