"""The committed schemas are what the code says, and what HARTS writes fits them."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harts_core.exec.checkpoint import FORMAT, VERSION, RunState
from harts_core.exec.config import TrainConfig
from harts_core.exec.metrics import StepMetrics
from harts_core.plan.bundle_file import SCHEMAS, write_bundle
from harts_core.plan.diff import diff_plans
from harts_core.plan.report import plan_report
from harts_core.trees.statistics import TreeStatistics, tree_statistics
from harts_core.trees.tree_file import read_tree, write_tree
from schemas.from_code import arrow_fields, attribute_texts, type_schema
from schemas.generate import FOLDER, generate
from tests.cli.program import run_harts
from tests.unit.plan.plans import random_plan, windowed_plan


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((FOLDER / f"{name}.schema.json").read_text()))


def check(name: str, instance: Any) -> None:
    validator(name).validate(json.loads(json.dumps(instance)))  # tuples become arrays, as in files


def test_committed_schemas_equal_the_code() -> None:
    generated = generate()
    committed = {p.name: p.read_text(encoding="utf-8") for p in FOLDER.glob("*.json")}
    assert committed.keys() == generated.keys(), "run python -m schemas.generate"
    for name, text in generated.items():
        assert committed[name] == text, f"{name}: run python -m schemas.generate"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.schema.json")), ids=lambda p: p.name)
def test_schemas_are_valid_json_schemas(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder with rows.parquet, tree.arrow, again.parquet, and the commands' JSON reports by schema."""
    folder = tmp_path_factory.mktemp("ingested")
    rows, tree, again = (folder / name for name in ("rows.parquet", "tree.arrow", "again.parquet"))
    plan = folder / "plan"
    reports = {}
    for name, arguments in {
        "synth-report": ("synth", "-o", rows),
        "ingest-report": ("ingest", rows, "-o", tree),
        "export-report": ("export", tree, "-o", again),
        "plan-report": ("plan", tree, "-o", plan, "--planner", "harts-l1", "--dp", "2", "--capacity", "1024"),
        "compare-report": (
            "compare",
            tree,
            *("--planners", "psrl,expanded", "--dp", "2,400", "--capacity", "1024"),
        ),
        "inspect-tree-report": ("inspect", "tree", tree),
        "inspect-plan-report": ("inspect", "plan", plan, "--tree", tree),
        "inspect-diff-report": ("inspect", "diff", plan, plan),
        "inspect-schedule-report": ("inspect", "schedule", plan),
        "inspect-memory-report": ("inspect", "memory", plan),
    }.items():
        result = run_harts(*arguments, "--json")
        assert result.returncode == 0, result.stderr
        reports[name] = json.loads(result.stdout)
    return folder, reports


def test_reports_fit(ingested: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    for name, report in ingested[1].items():
        check(name, report)


def test_the_tree_file_fits(ingested: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    file = ingested[0] / "tree.arrow"
    check("rollout-tree-metadata", read_tree(file).metadata)
    with pa.memory_map(str(file)) as source:
        schema = pa.ipc.open_file(source).schema
    assert arrow_fields(schema) == json.loads((FOLDER / "rollout-tree.arrow.json").read_text())["columns"]


@pytest.mark.parametrize(("file", "name"), [("rows", "synth-rows"), ("again", "export-rows")])
def test_parquet_files_fit(ingested: tuple[Path, dict[str, dict[str, Any]]], file: str, name: str) -> None:
    schema = pq.read_schema(ingested[0] / f"{file}.parquet")
    assert arrow_fields(schema) == json.loads((FOLDER / f"{name}.arrow.json").read_text())["columns"]


def test_bundles_fit(ingested: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path) -> None:
    write_bundle(tmp_path / "own", random_plan(0)[1])
    check("plan", json.loads((tmp_path / "own" / "plan.json").read_text()))
    plan = ingested[0] / "plan"
    check("plan", json.loads((plan / "plan.json").read_text()))
    check("plan-runtime", json.loads((plan / "runtime.json").read_text()))
    for table in SCHEMAS:
        with pa.memory_map(str(plan / f"{table}.arrow")) as source:
            columns = arrow_fields(pa.ipc.open_file(source).schema)
        assert columns == json.loads((FOLDER / f"plan-{table}.arrow.json").read_text())["columns"]


def test_plan_reports_and_differences_fit() -> None:
    tree, bundle = random_plan(0)
    _, other = random_plan(0, slots=2)
    check("inspect-plan-report", asdict(plan_report(bundle)))
    check("inspect-plan-report", asdict(plan_report(windowed_plan())))
    check("inspect-diff-report", asdict(diff_plans(bundle, bundle)))
    check("inspect-diff-report", asdict(diff_plans(bundle, other)))
    check("inspect-tree-report", asdict(tree_statistics(tree)))


def test_training_files_fit() -> None:
    check("train-config", {})
    tables = {
        "model": {"preset": "cpu-moe", "num_hidden_layers": 4, "q_lora_rank": None},
        "objective": {"name": "grpo", "clip_low": 0.2},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "decay_steps": 10},
    }
    check("train-config", tables)
    check("train-config", TrainConfig.from_dict({k: v for k, v in tables.items() if k != "model"}).to_dict())
    step = StepMetrics(
        step=1,
        loss=0.5,
        grad_norm=1.0,
        lr=1e-3,
        original_tokens=10,
        compact_tokens=5,
        trained_positions=4,
        units=1,
        rounds=2,
        interface_bytes=0,
        cache_allocated_bytes=0,
        cache_hit_rate=1.0,
        cache_offloaded_bytes=0,
        cache_over_budget_bytes=0,
        seconds=0.1,
        tokens_per_s=100.0,
        objective={"clip_fraction": 0.0, "kl": float("nan")},
    )
    check("train-metrics", step.to_dict())
    check(
        "train-report",
        {
            "run": "run",
            "checkpoint": "run/checkpoints/step-000001",
            "steps_before": 0,
            "steps": [step.to_dict()],
        },
    )
    state = RunState(step=1, seed=0, dtype="float32", plans=("0" * 64,))
    files = {"model.safetensors": "0" * 64}
    check("checkpoint-state", {"format": FORMAT, "version": VERSION, **asdict(state), "files": files})


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("plan", ("metrics", "balance"), "good"),
        ("plan", ("parameters", "dp"), 0),
        ("plan", ("tables", "units"), "abc"),
        ("plan", ("version",), 2),
        ("plan", ("host",), "node7"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path: Path, name: str, path: tuple[str, ...], value: object) -> None:
    write_bundle(tmp_path / "plan", random_plan(0)[1])
    manifest = json.loads((tmp_path / "plan" / "plan.json").read_text())
    broken = copy.deepcopy(manifest)
    target = broken
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    validator(name).validate(manifest)
    with pytest.raises(jsonschema.ValidationError):
        validator(name).validate(broken)


@pytest.mark.parametrize(
    "tables",
    [{"optimiser": {}}, {"optimizer": {"lr": 1}}, {"runtime": {"dtype": "float16"}}, {"model": {"x": 1}}],
)
def test_wrong_configurations_are_refused(tables: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator("train-config").validate(tables)


def test_descriptions_come_from_the_docstrings() -> None:
    texts = attribute_texts(StepMetrics)
    assert texts["step"] == "counted from 1."
    assert attribute_texts(TreeStatistics)["trie_tokens"] == "C(all)"


def test_a_type_without_json_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="no JSON schema"):
        type_schema(set[int])


def test_trees_without_metadata_still_fit(tmp_path: Path) -> None:
    tree, _ = random_plan(1)
    check("rollout-tree-metadata", write_tree(tmp_path / "tree.arrow", tree).metadata)
