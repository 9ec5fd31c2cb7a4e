"""Source arguments (files, directories, globs) to a list of files with names fit for a record."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harts_core.errors import DataError
from harts_core.files import PIPE_HINT

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".feather", ".ipc", ".pt", ".traj")
COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file to read.

    Attributes:
        path: where it is.
        name: how messages, default ids and the tree's metadata name it: relative to what the user named,
            so that it does not depend on the machine.
    """

    path: Path
    name: str


def expand_sources(arguments: Sequence[str | Path]) -> tuple[list[Source], list[Source]]:
    """The files of the arguments in a stable order, and the files of directories that are left aside.

    A file is taken as it is; a glob (``*``, ``?``, ``[]``, ``**``) and a directory (searched recursively,
    hidden files left out) give their files in natural order (``step_2`` before ``step_10``). In a
    directory only files with a known suffix are rollouts.

    Raises:
        DataError: a path does not exist or is a pipe, nothing matches, or a file is named twice.
    """
    taken: list[Source] = []
    aside: list[Source] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            found = [
                Source(path=f, name=f"{path.resolve().name}/{f.relative_to(path).as_posix()}")
                for f in sorted(path.rglob("*"), key=_natural)
                if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)
            ]
            known = [s for s in found if _has_known_suffix(s.path)]
            if not known:
                raise DataError(
                    "the directory holds no rollout files",
                    where=str(path),
                    hint="known: " + " ".join(SUFFIXES),
                )
            taken += known
            aside += [s for s in found if not _has_known_suffix(s.path)]
        elif str(argument) == "-" or (path.exists() and not path.is_file()):
            raise DataError("not a regular file", where=str(argument), hint=PIPE_HINT)
        elif path.exists():
            taken.append(Source(path=path, name=path.name))
        elif glob.has_magic(str(argument)):
            matches = sorted((Path(m) for m in glob.glob(str(argument), recursive=True)), key=_natural)
            files = [Source(path=m, name=m.name) for m in matches if m.is_file()]
            if not files:
                raise DataError("no file matches", where=str(argument))
            taken += files
        else:
            raise DataError("no such file or directory", where=str(argument))
    _refuse_repeats(taken)
    return _unique_names(taken), aside


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sorts digits by value: file2 before file10."""
    parts = re.split(r"(\d+)", path.as_posix())
    return [(1, int(p), p) if p.isdigit() else (0, 0, p) for p in parts]


def _has_known_suffix(path: Path) -> bool:
    name = path.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return name.endswith(SUFFIXES)


def _refuse_repeats(sources: list[Source]) -> None:
    seen: set[Path] = set()
    for source in sources:
        resolved = source.path.resolve()
        if resolved in seen:
            raise DataError("the file is named twice", where=str(source.path))
        seen.add(resolved)


def _unique_names(sources: list[Source]) -> list[Source]:
    """Files of one name from different places: the parent folder is added until names differ."""
    depth = dict.fromkeys(range(len(sources)), 0)
    names = [s.name for s in sources]
    while True:
        clashing = [i for i, name in enumerate(names) if names.count(name) > 1]
        if not clashing:
            return [Source(path=s.path, name=n) for s, n in zip(sources, names, strict=True)]
        for i in clashing:
            depth[i] += 1
            parents = [p.name for p in sources[i].path.resolve().parents][: depth[i]]
            names[i] = "/".join([*reversed(parents), sources[i].path.name])
