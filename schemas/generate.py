"""Write the schemas beside this file from the code: ``python -m schemas.generate``.

``*.arrow.json`` describe Arrow and Parquet tables, ``*.schema.json`` are JSON Schemas (draft 2020-12). A test
compares the committed files with what this module generates.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from harts_core.exec import checkpoint, config, logprob, metrics
from harts_core.exec.calibrate import Calibration
from harts_core.exec.export_weights import ExportedWeights
from harts_core.exec.model.config import ALIASES, ModelConfig
from harts_core.exec.model_section import NOT_COMPUTED
from harts_core.exec.objectives import OBJECTIVES
from harts_core.plan import bundle_file
from harts_core.plan.cache_policy.report import MemoryReport
from harts_core.plan.compare import Comparison
from harts_core.plan.diff import PlanDiff
from harts_core.plan.manifest import MANIFEST_SCHEMA, RUNTIME_SCHEMA
from harts_core.plan.report import PlanReport
from harts_core.plan.schedule.report import PipelineReport
from harts_core.trees import tree_file
from harts_core.trees.export import ROWS_SCHEMA
from harts_core.trees.ingest_report import IngestReport
from harts_core.trees.statistics import TreeStatistics
from harts_core.trees.synth import ROW_SCHEMA, SynthSummary
from schemas.from_code import Schema, arrow_fields, dataclass_properties, object_schema, type_schema

FOLDER = Path(__file__).parent
SHA256: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number"}


def tree_metadata() -> Schema:
    """The JSON under ``harts`` in a rollout-tree file's schema metadata."""
    source = object_schema({"name": STRING, "sha256": SHA256, "records": COUNT})
    optional = {
        "vocab_size": type_schema(int | None),
        "tokenizer": type_schema(str | None),
        "sampling": type_schema(str | None),
        "sources": {"type": "array", "items": source},
        "dropped": {"type": "object", "additionalProperties": COUNT},
    }
    fixed = {
        "format": {"const": tree_file.FORMAT},
        "version": {"const": tree_file.VERSION},
        "content_sha256": SHA256,
    }
    schema = object_schema(fixed | optional, extra=True)
    return schema | {"required": sorted(fixed)}


def plan_manifest() -> Schema:
    """plan.json of a bundle."""
    return copy.deepcopy(MANIFEST_SCHEMA)


def plan_runtime() -> Schema:
    """runtime.json of a bundle: clock times by name; not hashed."""
    return copy.deepcopy(RUNTIME_SCHEMA)


def plan_report() -> Schema:
    """``harts plan --json``: plan.json, the bundle's folder and the clock times."""
    schema = plan_manifest()
    schema["properties"] |= {"output": STRING, "runtime": plan_runtime()}
    return schema | {"required": sorted(schema["properties"])}


def ingest_report() -> Schema:
    """``harts ingest --json``."""
    ratios = {"compression": NUMBER, "group_compression": NUMBER, "output": STRING}
    return object_schema(dataclass_properties(IngestReport) | ratios)


def train_config() -> Schema:
    """train.toml as JSON, and config.json of a run folder (every default filled in)."""
    sections = {}
    for name, cls in config.SECTIONS.items():
        properties = dataclass_properties(cls, required=False)
        properties.pop(config.OPEN_KEYS.get(name, ""), None)
        if name == "model":
            own = dataclass_properties(ModelConfig, required=False)
            own.pop("extra")
            aliases = {alias: own[target] for alias, target in ALIASES.items()}
            properties |= own | aliases | {key: {} for key in NOT_COMPUTED}
        extra = name == "objective"  # an own objective has own options
        for objective in OBJECTIVES.values() if extra else ():
            properties |= dataclass_properties(objective, required=False)
        sections[name] = object_schema(properties, required=False, extra=extra)
    return object_schema(sections, required=False)


def metrics_line() -> Schema:
    """One line of metrics.jsonl; the objective's own metrics are further numbers, null if not finite."""
    properties = dataclass_properties(metrics.StepMetrics)
    properties.pop("objective")
    return object_schema(properties, extra=type_schema(float | None))


def train_report() -> Schema:
    """``harts train --json``."""
    lines = {"type": "array", "items": metrics_line()}
    return object_schema({"run": STRING, "checkpoint": STRING, "steps_before": COUNT, "steps": lines})


def checkpoint_state() -> Schema:
    """state.json of a checkpoint."""
    fixed = {"format": {"const": checkpoint.FORMAT}, "version": {"const": checkpoint.VERSION}}
    files = {"files": {"type": "object", "additionalProperties": SHA256}}
    return object_schema(fixed | dataclass_properties(checkpoint.RunState) | files)


def _report(cls: Any) -> Callable[[], Schema]:
    return lambda: object_schema(dataclass_properties(cls))


ARROW: dict[str, pa.Schema] = {
    "rollout-tree": tree_file.TREE_SCHEMA,
    "synth-rows": ROW_SCHEMA,
    "export-rows": ROWS_SCHEMA,
    **{f"plan-{name}": schema for name, schema in bundle_file.SCHEMAS.items()},
}
JSON: dict[str, Callable[[], Schema]] = {
    "rollout-tree-metadata": tree_metadata,
    "plan": plan_manifest,
    "plan-runtime": plan_runtime,
    "synth-report": _report(SynthSummary),
    "ingest-report": ingest_report,
    "plan-report": plan_report,
    "compare-report": _report(Comparison),
    "calibrate-report": _report(Calibration),
    "export-report": lambda: object_schema({"output": STRING, "rows": POSITIVE, "tokens": POSITIVE}),
    "inspect-tree-report": _report(TreeStatistics),
    "inspect-plan-report": _report(PlanReport),
    "inspect-diff-report": _report(PlanDiff),
    "inspect-schedule-report": _report(PipelineReport),
    "inspect-memory-report": _report(MemoryReport),
    "train-config": train_config,
    "train-metrics": metrics_line,
    "train-report": train_report,
    "logprob-report": _report(logprob.LogprobReport),
    "export-weights-report": _report(ExportedWeights),
    "checkpoint-state": checkpoint_state,
}


def generate() -> dict[str, str]:
    """File name to content, of every schema."""
    documents: dict[str, Any] = {
        f"{name}.arrow.json": {"title": name, "columns": arrow_fields(schema)}
        for name, schema in ARROW.items()
    }
    for name, make in JSON.items():
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name}
        documents[f"{name}.schema.json"] = head | make()
    return {
        name: json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        for name, document in documents.items()
    }


def main() -> None:
    """Write the schemas and remove those that are no longer generated."""
    documents = generate()
    for old in FOLDER.glob("*.json"):
        if old.name not in documents:
            old.unlink()
    for name, text in documents.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
