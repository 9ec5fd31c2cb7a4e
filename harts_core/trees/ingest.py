"""Ingest: rollout files of any known format to one rollout tree and a report, streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harts_core.errors import ConfigError, DataError
from harts_core.files import sha256_file
from harts_core.progress import Progress, no_progress
from harts_core.trees.build import TreeBuilder
from harts_core.trees.check_record import CheckOptions, check_record
from harts_core.trees.findings import Findings
from harts_core.trees.formats import find_format, rows, sniff_format
from harts_core.trees.formats.record import Format, RawRecord, ReadOptions, lookup
from harts_core.trees.formats.text_tokenizer import tokenizer_name
from harts_core.trees.group_advantages import group_relative_advantages
from harts_core.trees.grouping import GroupBlocks, prompt_group
from harts_core.trees.ingest_options import IngestOptions, option_name
from harts_core.trees.ingest_report import IngestReport, make_report
from harts_core.trees.numbers import integer, name_string
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.sources import Item, read_records
from harts_core.trees.sources.paths import Source, expand_sources
from harts_core.trees.tree_file import finish_tree

PROGRESS_EVERY = 64
BAD_RECORD = "bad record"


def ingest(
    sources: Sequence[str | Path],
    options: IngestOptions | None = None,
    progress: Progress = no_progress,
) -> tuple[RolloutTree, IngestReport]:
    """Read rollout files into one rollout tree.

    Files are streamed: peak memory is the tree, its rows' metadata, a bounded buffer and one record.

    Args:
        sources: files, directories, globs.
        options: how to read and check.
        progress: told the records read.

    Returns:
        The checked tree (write it with ``write_tree``) and the report.

    Raises:
        ConfigError: options that contradict each other or name unknown things.
        DataError: a missing, unreadable or wrong file or record; file, record and field are named.
    """
    run = _Ingest(options or IngestOptions(), progress)
    files, aside = expand_sources(sources)
    for source in aside:
        run.findings.warn("files left aside (no known suffix)", source.name)
    for source in files:
        run.read(source)
    return run.finish()


class _Ingest:
    """The state of one ingest: the builder, what was found, what the files say of themselves."""

    def __init__(self, options: IngestOptions, progress: Progress) -> None:
        self.options = options
        self.findings = Findings()
        self._progress = progress
        self._builder = TreeBuilder(duplicate_ids=options.duplicate_ids)
        self._rollouts: list[str] = []  # of the added trajectories
        self._sources: list[dict[str, Any]] = []
        self._num_records = 0
        self._said: dict[str, tuple[Any, str]] = {}  # property → (value, where it was said)
        if options.tokenizer is not None:
            self._said["tokenizer"] = (tokenizer_name(options.tokenizer), option_name("tokenizer"))
        if options.vocab_size is not None:
            self._said["vocab_size"] = (options.vocab_size, option_name("vocab_size"))
        self._samplings: set[str] = set()
        self._read_options = ReadOptions(
            fields=options.fields,
            reward_key=options.reward_key,
            tokenizer=options.tokenizer,
            sampling=options.sampling,
            vocab_size=options.vocab_size,
        )

    def read(self, source: Source) -> None:
        """Add every trajectory of one file."""
        form = None if self.options.format is None else self._accept(find_format(self.options.format))
        size = self.options.group_size
        blocks = None if size is None else GroupBlocks(source.name, size)
        num_records = 0
        for item in read_records(
            source.path, max_record_bytes=self.options.max_record_bytes, columns=self._choose_columns(form)
        ):
            num_records += 1
            self._num_records += 1
            if self._num_records % PROGRESS_EVERY == 0:
                self._progress("reading records", self._num_records, None)
            name = _default_name(source, item)
            try:
                if isinstance(item.content, DataError):
                    raise item.content
                form = form or self._sniff(item.content)
                for raw in form.read(item.content, name, self._read_options):
                    where = item.where(source.name) + (f", {raw.part}" if raw.part else "")
                    self._set_group(raw, item.content, name, where, blocks)
                    self._add(raw, name, where)
            except DataError as error:
                self._bad_record(error, item.where(source.name))
                if blocks is not None:
                    blocks.group_of(name)  # what cannot be read keeps its place in the blocks
        if blocks is not None:
            blocks.check_complete()
        self._sources.append(
            {"name": source.name, "sha256": sha256_file(source.path), "records": num_records}
        )

    def finish(self) -> tuple[RolloutTree, IngestReport]:
        """The tree with its metadata, and the report."""
        if not len(self._builder):
            reasons = "; ".join(f"{reason}: {f.count}" for reason, f in self.findings.dropped.items())
            raise DataError("no trajectories are left", where=reasons or None)
        sampling = "mixed" if len(self._samplings) > 1 else next(iter(self._samplings), None)
        sources = sorted(self._sources, key=lambda s: str(s["name"]))
        metadata = {
            "vocab_size": self._said.get("vocab_size", (None,))[0],
            "tokenizer": self._said.get("tokenizer", (None,))[0],
            "sampling": self.options.sampling or sampling,
            "sources": sources,
            "dropped": {reason: f.count for reason, f in self.findings.dropped.items()},
        }
        self._progress("building the tree", 0, 1)
        tree = self._builder.finish(metadata)
        rollouts = [self._rollouts[i] for i in self._builder.order.tolist()]
        if self.options.advantages is not None:
            values = group_relative_advantages(tree, rollouts, self.findings, self.options.advantages)
            column = Ragged(offsets=np.arange(tree.num_rows + 1), values=values)
            tree = finish_tree(dataclasses.replace(tree, advantages=column), "rollout tree")
        report = make_report(tree, rollouts, self.findings, sources)
        self._progress("building the tree", 1, 1)
        return tree, report

    def _sniff(self, record: Mapping[str, Any]) -> Format:
        mapped_tokens = self.options.fields.keys() & {"tokens", "prompt", "response"}
        return self._accept(rows.FORMAT if mapped_tokens else sniff_format(record))

    def _accept(self, form: Format) -> Format:
        if self.options.fields and form is not rows.FORMAT:
            raise ConfigError(f"--map is for HARTS rows; this is {form.name}", hint="add --format rows")
        return form

    def _choose_columns(self, form: Format | None) -> Callable[[Sequence[str]], Sequence[str]]:
        """Of a columnar file of HARTS rows, only what is read: text columns stay on disk."""
        wanted = {name for names in rows.ALIASES.values() for name in names}
        for name in [*self.options.fields.values(), self.options.group_key or ""]:
            wanted |= {name, name.split(".")[0]}

        def choose(names: Sequence[str]) -> Sequence[str]:
            sniffed = form is None and (rows.sniff(dict.fromkeys(names)) or self.options.fields)
            return [n for n in names if n in wanted] if sniffed or form is rows.FORMAT else names

        return choose

    def _set_group(
        self, raw: RawRecord, record: Mapping[str, Any], name: str, where: str, blocks: GroupBlocks | None
    ) -> None:
        """The group that the options ask for, in place of the record's own."""
        if self.options.group_key is not None:
            raw.group_id = lookup(record, self.options.group_key)
            if name_string(raw.group_id, self.options.group_key, where) is None:
                raise DataError(f"{self.options.group_key} (the group key) is missing or empty", where=where)
        elif blocks is not None:
            raw.group_id = blocks.group_of(name_string(raw.rollout_id, "trajectory_id", where) or name)

    def _add(self, raw: RawRecord, name: str, where: str) -> None:
        self._note_file_properties(raw, where)
        limits = CheckOptions(
            vocab_size=self._said.get("vocab_size", (None,))[0], on_nonfinite=self.options.on_nonfinite
        )
        checked = check_record(raw, name, where, limits, self.findings)
        if checked is None:
            return
        trajectory = checked.trajectory
        if self.options.group_by_prompt:
            trajectory = dataclasses.replace(trajectory, group_id=prompt_group(trajectory))
        self._builder.add(trajectory)
        self._rollouts.append(checked.rollout_id)

    def _note_file_properties(self, raw: RawRecord, where: str) -> None:
        """Tokenizer and vocabulary size must be the same everywhere; mixing them is never skipped."""
        said = {
            "tokenizer": name_string(raw.tokenizer, "tokenizer", where),
            "vocab_size": integer(raw.vocab_size, "vocab_size", where, self.findings),
        }
        for name, value in said.items():
            if value is None:
                continue
            known, known_where = self._said.setdefault(name, (value, where))
            if known != value:
                what = f"{name} is {value!r} here, but {known!r} in {known_where}"
                raise _MixedError(what, where=where, hint="ingest them into separate trees")
        if (sampling := name_string(raw.sampling, "sampling", where)) is not None:
            self._samplings.add(sampling)

    def _bad_record(self, error: DataError, where: str) -> None:
        """Raise with the place, or count, as the options say."""
        if error.where and not error.where.startswith(where):
            where = f"{where}, {error.where}"
        elif error.where:
            where = error.where
        if self.options.on_bad_record == "error" or isinstance(error, _MixedError):
            raise type(error)(error.what, where=where, hint=error.hint) from error
        self.findings.drop(BAD_RECORD, f"{where}: {error.what}")


class _MixedError(DataError):
    """Files that cannot be in one tree; --on-bad-record does not apply."""


def _default_name(source: Source, item: Item) -> str:
    """The id of a record without one: "file.jsonl:7"."""
    return source.name if item.unit == "file" else f"{source.name}:{item.number}"
