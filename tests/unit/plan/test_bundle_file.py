"""Damaged plan.json and runtime.json: every wrong value of every key is refused with its place."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harts_core.errors import CorruptFileError, DataError, HartsError, InvalidPlanError, SchemaMismatchError
from harts_core.plan.bundle_file import read_bundle, read_manifest, write_bundle
from harts_core.plan.diff import diff_plans
from harts_core.plan.manifest import COUNT_METRICS, MANIFEST_SCHEMA, RATIO_METRICS
from harts_core.plan.report import plan_report
from harts_core.plan.schedule.report import pipeline_report
from harts_core.plan.validate import validate_plan
from tests.unit.plan.plans import random_plan, windowed_plan

TREE, PLAN = random_plan(0)
OPTIONS: dict[str, Any] = {
    "producer_capacity": 500,
    "max_live_producers": 2,
    "effort": 2,
    "on_too_long": "error",
    "dropped_rows": [],
    "token_wise_from_slot": 3,
}
BAD: tuple[Any, ...] = (None, True, "x", -1, 1.5, 10**30, float("nan"), [], [True], ["x"], {}, {"a": 1})


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with every known parameter."""
    write_bundle(tmp_path / "plan", PLAN)
    manifest = json.loads((tmp_path / "plan" / "plan.json").read_text())
    manifest["parameters"] |= OPTIONS
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(manifest))
    return tmp_path / "plan"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    for key, item in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(item, (*path, key))


def with_value(manifest: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    broken = copy.deepcopy(manifest)
    target = broken
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return broken


def test_the_description_names_the_metrics_of_plans() -> None:
    assert {name: type(value) for name, value in PLAN.metrics.items()} == (
        dict.fromkeys(COUNT_METRICS, int) | dict.fromkeys(RATIO_METRICS, float)
    )


def refusal(bundle: Path) -> HartsError | None:
    """Why the bundle cannot be read; None: it can, and the reports and the validator take it as it is."""
    try:
        plan = read_bundle(bundle)
    except HartsError as error:
        return error
    plan_report(plan)
    diff_plans(plan, plan)
    with contextlib.suppress(HartsError):
        pipeline_report(plan, num_stages=2)
    with contextlib.suppress(HartsError):
        validate_plan(plan, TREE)
    return None


def test_every_wrong_value_is_refused_by_name_or_harmless(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    described = jsonschema.Draft202012Validator(MANIFEST_SCHEMA)
    refused = 0
    for path in places(manifest):
        for value in BAD:
            broken = with_value(manifest, path, value)
            (bundle / "plan.json").write_text(json.dumps(broken))
            error = refusal(bundle)
            if error is None:
                assert described.is_valid(broken), path
                continue
            refused += 1
            assert isinstance(error, DataError)
            assert path[0] in ("format", "version") or ".".join(path) in str(error), path
    assert refused > 9 * len(list(places(manifest)))


@pytest.mark.parametrize("path", [("parameters", "dp"), ("metrics", "balance"), ("activation_tokens",)])
def test_missing_keys_are_named(bundle: Path, path: tuple[str, ...]) -> None:
    manifest = read_manifest(bundle)
    target = manifest
    for key in path[:-1]:
        target = target[key]
    del target[path[-1]]
    (bundle / "plan.json").write_text(json.dumps(manifest))
    with pytest.raises(SchemaMismatchError, match=".".join(path) + " is missing"):
        read_manifest(bundle)


def test_more_replicas_than_units_are_refused(bundle: Path) -> None:
    manifest = with_value(read_manifest(bundle), ("parameters", "dp"), 2**31 - 1)
    (bundle / "plan.json").write_text(json.dumps(manifest))
    with pytest.raises(SchemaMismatchError, match="but the plan has 6 units"):
        read_bundle(bundle)


@pytest.mark.parametrize("text", ["[1]", '{"plan_s": "fast"}', '{"plan_s": NaN}', "3"])
def test_wrong_clock_times_are_refused(bundle: Path, text: str) -> None:
    (bundle / "runtime.json").write_text(text)
    with pytest.raises(SchemaMismatchError, match="must be"):
        read_bundle(bundle)


@pytest.mark.parametrize("name", ["plan.json", "runtime.json"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\udcff"])
def test_what_is_no_json_is_refused(bundle: Path, name: str, text: str) -> None:
    (bundle / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptFileError, match="not JSON"):
        read_bundle(bundle)


@pytest.mark.parametrize(
    ("table", "column", "value", "message"),
    [
        ("units", "slot", 99, "slots are not dense"),
        ("units", "replica", 9, "replica is not in"),
        ("units", "window", 7, "no such window"),
        ("windows", "slot_stop", 50, "not a run of the slots"),
        ("spans", "owner", 60, "no such owner"),
        ("spans", "unit", 60, "no such unit"),
    ],
)
def test_what_is_no_plan_is_not_written(
    tmp_path: Path, table: str, column: str, value: int, message: str
) -> None:
    plan = windowed_plan()
    lines = getattr(plan, table)
    values = getattr(lines, column).copy()
    values[-1] = value
    broken = replace(plan, **{table: replace(lines, **{column: values})})
    with pytest.raises(InvalidPlanError, match=message):
        write_bundle(tmp_path / "broken", broken)
    assert not any(tmp_path.iterdir())
