"""Reading and writing plan bundles: a directory with plan.json, five Arrow tables and runtime.json.

The bytes are a pure function of the plan: Arrow tables are written uncompressed (so they do not depend on a
compressor's version), plan.json with sorted keys.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harts_core.errors import CorruptFileError, DataError, SchemaMismatchError
from harts_core.files import (
    FolderKind,
    arrow_failures,
    atomic_directory,
    read_arrow,
    sha256_file,
    write_arrow,
)
from harts_core.headers import parse_header, parse_json
from harts_core.plan.bundle import (
    KINDS,
    NONE,
    AssignmentTable,
    PlanBundle,
    SequenceTable,
    SpanTable,
    UnitTable,
    WindowTable,
)
from harts_core.plan.manifest import FORMAT, MANIFEST_SCHEMA, RUNTIME_SCHEMA, VERSION, check_described
from harts_core.plan.memory import activation_tokens
from harts_core.plan.validate.spans import check_span_units
from harts_core.plan.validate.units import check_units
from harts_core.trees.ragged import Ragged

MANIFEST = "plan.json"
RUNTIME = "runtime.json"


def _schema(
    required: dict[str, pa.DataType], nullable: dict[str, pa.DataType], order: list[str]
) -> pa.Schema:
    kinds = required | nullable
    return pa.schema([pa.field(name, kinds[name], nullable=name in nullable) for name in order])


_I32, _I64, _F64 = pa.int32(), pa.int64(), pa.float64()
SCHEMAS: dict[str, pa.Schema] = {
    "units": _schema(
        {"unit": _I32, "replica": _I32, "kind": pa.string(), "order": _I32}
        | {"complete_tokens": _I64, "computed_tokens": _I64, "padded_tokens": _I64}
        | {"cost_forward": _F64, "cost_backward": _F64},
        {"window": _I32, "slot": _I32},
        [
            *("unit", "replica", "kind", "window", "slot", "order"),
            *("complete_tokens", "computed_tokens", "padded_tokens", "cost_forward", "cost_backward"),
        ],
    ),
    "windows": _schema(
        {"window": _I32, "slot_start": _I32, "slot_stop": _I32}, {}, ["window", "slot_start", "slot_stop"]
    ),
    "spans": _schema(
        dict.fromkeys(("unit", "span", "start", "stop", "row", "owner", "owner_span"), _I32),
        {"parent": _I32},
        ["unit", "span", "parent", "start", "stop", "row", "owner", "owner_span"],
    ),
    "assignments": _schema(
        dict.fromkeys(("row", "replica", "slot", "unit", "start", "stop", "span"), _I32),
        {},
        ["row", "replica", "slot", "unit", "start", "stop", "span"],
    ),
    "sequences": _schema(
        {"unit": _I32, "round": _I32, "index": _I32, "replay_start": _I32}
        | {"spans": pa.list_(pa.field("item", _I32, False))},
        {"state_unit": _I32, "state_span": _I32, "state_position": _I32},
        ["unit", "round", "index", "spans", "replay_start", "state_unit", "state_span", "state_position"],
    ),
}
TABLES: dict[str, Any] = {
    "units": UnitTable,
    "windows": WindowTable,
    "spans": SpanTable,
    "assignments": AssignmentTable,
    "sequences": SequenceTable,
}


FOLDER = FolderKind(
    marker=MANIFEST, format=FORMAT, names=(MANIFEST, RUNTIME, *(f"{name}.arrow" for name in TABLES))
)


def bundle_to_tables(bundle: PlanBundle) -> dict[str, pa.Table]:
    """The five Arrow tables of a bundle."""
    tables = {}
    for name, schema in SCHEMAS.items():
        table = getattr(bundle, name)
        columns = []
        for column in schema:
            if column.name in ("unit", "window") and column.name == name[:-1]:
                columns.append(pa.array(np.arange(len(table), dtype=np.int32)))  # ids are line numbers
                continue
            value = getattr(table, column.name)
            if isinstance(value, Ragged):
                offsets = pa.array(value.offsets.astype(np.int32))
                columns.append(
                    pa.ListArray.from_arrays(offsets, pa.array(value.values, _I32), type=column.type)
                )
            elif column.name == "kind":
                columns.append(pa.array([KINDS[k] for k in value.tolist()], pa.string()))
            else:
                mask = (value == NONE) if column.nullable else None
                columns.append(pa.array(value, column.type, mask=mask))
        tables[name] = pa.table(columns, schema=schema)
    return tables


def write_bundle(path: Path, bundle: PlanBundle) -> dict[str, Any]:
    """Write a bundle directory atomically and return its manifest. The caller has validated the plan.

    Raises:
        InvalidPlanError: units, slots or windows are not those of a plan; nothing was written.
        DataError: the folder cannot be written, or is not one to replace.
    """
    check_units(bundle)
    check_span_units(bundle)
    with atomic_directory(Path(path), replaces=FOLDER) as folder:
        hashes = {}
        for name, table in bundle_to_tables(bundle).items():
            write_arrow(folder / f"{name}.arrow", table, compression=None)
            hashes[name] = sha256_file(folder / f"{name}.arrow")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "planner": bundle.planner,
            "parameters": bundle.parameters,
            "cost_model": bundle.cost_model,
            "tree_sha256": bundle.tree_sha256,
            "metrics": bundle.metrics,
            "activation_tokens": activation_tokens(bundle).tolist(),
            "tables": hashes,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, sort_keys=True, indent=2, allow_nan=False) + "\n")
        (folder / RUNTIME).write_text(json.dumps(bundle.runtime, sort_keys=True, indent=2) + "\n")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """plan.json of a bundle, checked against its description.

    Raises:
        DataError: not a bundle directory.
        CorruptFileError: plan.json is not JSON.
        SchemaMismatchError: another format or version, or a key is missing, unknown or of the wrong kind.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise DataError("not a plan bundle: no plan.json", where=str(path), hint="make one with harts plan")
    manifest = parse_header(file.read_bytes(), format=FORMAT, version=VERSION, name=MANIFEST, where=file)
    check_described(manifest, MANIFEST_SCHEMA, str(file))
    return manifest


def read_bundle(path: Path) -> PlanBundle:
    """Read a bundle; schemas and table hashes are checked (its rules are ``validate_plan``'s).

    Raises:
        DataError, CorruptFileError, SchemaMismatchError: as ``read_manifest``; a table's hash differs.
    """
    path = Path(path)
    manifest = read_manifest(path)
    tables = {}
    for name, schema in SCHEMAS.items():
        file = path / f"{name}.arrow"
        if not file.is_file():
            raise DataError("the bundle lacks a table", where=str(file))
        if sha256_file(file) != manifest["tables"].get(name):
            raise CorruptFileError(
                "the table does not match its hash in plan.json",
                where=str(file),
                hint="the bundle was damaged or edited; plan again",
            )
        table = read_arrow(file)
        with arrow_failures(file):
            tables[name] = _read_table(name, table, schema, file)
    runtime_file = path / RUNTIME
    raw = runtime_file.read_bytes() if runtime_file.is_file() else b"{}"
    runtime = parse_json(raw, name=RUNTIME, where=runtime_file)
    check_described(runtime, RUNTIME_SCHEMA, str(runtime_file))
    if manifest["parameters"]["dp"] > len(tables["units"]):
        raise SchemaMismatchError(
            f"parameters.dp is {manifest['parameters']['dp']}, but the plan has {len(tables['units'])} units",
            where=str(path / MANIFEST),
        )
    return PlanBundle(
        planner=manifest["planner"],
        parameters=manifest["parameters"],
        cost_model=manifest["cost_model"],
        tree_sha256=manifest["tree_sha256"],
        metrics=manifest["metrics"],
        runtime=runtime,
        **tables,
    )


def _read_table(name: str, table: pa.Table, schema: pa.Schema, file: Path) -> Any:
    for column in schema:
        if column.name not in table.schema.names:
            raise SchemaMismatchError(f"column {column.name} is missing", where=str(file))
        if table.schema.field(column.name).type != column.type:
            raise SchemaMismatchError(
                f"column {column.name} has type {table.schema.field(column.name).type}, not {column.type}",
                where=str(file),
            )
        if not column.nullable and table.column(column.name).null_count:
            raise SchemaMismatchError(f"column {column.name} has nulls", where=str(file))
    kind = TABLES[name]
    columns: dict[str, Any] = {}
    for f in fields(kind):
        array = table.column(f.name)
        if f.name == "kind":
            values = array.to_pylist()
            if not set(values) <= set(KINDS):
                raise SchemaMismatchError(f"column kind must be one of {', '.join(KINDS)}", where=str(file))
            columns["kind"] = np.array([KINDS.index(v) for v in values], np.int32)
        elif pa.types.is_list(array.type):
            lists = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
            lengths = lists.value_lengths().to_numpy()
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            columns[f.name] = Ragged(offsets=offsets, values=lists.flatten().to_numpy())
        else:
            columns[f.name] = array.fill_null(NONE).to_numpy() if array.null_count else array.to_numpy()
    own_id = name[:-1]
    if name in ("units", "windows") and not np.array_equal(
        table.column(own_id).to_numpy(), np.arange(len(table))
    ):
        raise SchemaMismatchError(f"column {own_id} must count 0, 1, 2, …", where=str(file))
    return kind(**columns)
