"""A run under a memory budget: the counters that it logs are those that the plan's report predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from harts_core.exec.cache_bytes import cache_row_bytes
from harts_core.exec.config import read_config
from harts_core.exec.metrics import StepMetrics
from harts_core.exec.model_section import resolve_model_config
from harts_core.exec.run import RunOptions, train_run
from harts_core.plan.bundle_file import write_bundle
from harts_core.plan.cache_policy.report import MemoryReport, PolicyReport, memory_report
from harts_core.trees.tree_file import write_tree
from tests.support_train import random_tree, write_config
from tests.support_windows import nested_bundle

TREE = random_tree(5, num_rows=14)
PLAN = nested_bundle(TREE, dp=1, slots=5, levels=2, chunk=4, seed=3)


def run(folder: Path, name: str, runtime: str) -> tuple[StepMetrics, MemoryReport]:
    config = folder / f"{name}.toml"
    config.write_text(write_config(folder).read_text() + runtime)
    write_bundle(folder / "plan", PLAN)
    tree = folder / "tree.arrow"
    written = write_tree(tree, TREE)
    result = train_run(
        RunOptions(plans=(folder / "plan",), trees=(tree,), config=config, out=folder / name, steps=1)
    )
    read = read_config(config)
    report = memory_report(
        PLAN,
        row_bytes=cache_row_bytes(resolve_model_config(read.model), read.runtime.dtype),
        tree=written,
        budget=read.runtime.memory_budget_bytes or None,
        recompute=read.runtime.recompute,
    )
    return result.steps[0], report


def agrees(step: StepMetrics, policy: PolicyReport) -> bool:
    measured = (
        step.interface_bytes,
        step.cache_allocated_bytes,
        step.cache_offloaded_bytes,
        step.cache_over_budget_bytes,
        step.cache_hit_rate,
    )
    expected = (policy.peak, policy.allocated, policy.offloaded, policy.over_budget, policy.in_time_rate)
    return measured == expected


@pytest.mark.parametrize("recompute", ["none", "layer", "unit", "unit+layer"])
def test_predicted_and_logged(tmp_path: Path, recompute: str) -> None:
    base = f'recompute = "{recompute}"\n'
    step, report = run(tmp_path, "free", base)
    assert agrees(step, report.policies[0])
    limited, report = run(tmp_path, "limited", base + f"memory_budget_bytes = {step.interface_bytes // 2}\n")
    assert agrees(limited, report.policies[-2])
    assert limited.cache_offloaded_bytes > 0
    fixed, report = run(tmp_path, "fixed", base + "cache_block_tokens = 16\n")
    assert agrees(fixed, next(p for p in report.policies if p.block_tokens == 16))
    assert (limited.loss, limited.grad_norm) == (step.loss, step.grad_norm)
    assert fixed.loss == step.loss
