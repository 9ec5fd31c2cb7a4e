from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harts_core.files import sha256_file, write_arrow
from harts_core.plan.bundle_file import bundle_to_tables, write_bundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.tree_file import write_tree
from tests.cli.program import run_harts
from tests.support import tree_from_sequences
from tests.unit.plan.plans import random_plan, with_table

TREE, PLAN = random_plan(0)
_, OTHER = random_plan(0, slots=2)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """tree.arrow, plan/ (of it), another/ (of another tree)."""
    write_tree(tmp_path / "tree.arrow", TREE)
    write_bundle(tmp_path / "plan", PLAN)
    write_bundle(tmp_path / "another", OTHER)
    return tmp_path


def test_tree(files: Path) -> None:
    result = run_harts("inspect", "tree", files / "tree.arrow")
    assert result.returncode == 0, result.stderr
    assert f"{TREE.trie_tokens:,}" in result.stdout
    assert "Fork position" in result.stdout
    data = json.loads(run_harts("inspect", "tree", files / "tree.arrow", "--json").stdout)
    assert data["trie_tokens"] == TREE.trie_tokens
    assert sum(data["length"]["counts"]) == TREE.num_rows
    assert [c["chunk"] for c in data["chunks"]] == [16, 32, 64, 128]


def test_plan_with_and_without_its_tree(files: Path) -> None:
    plain = run_harts("inspect", "plan", files / "plan", "--json")
    assert plain.returncode == 0, plain.stderr
    data = json.loads(plain.stdout)
    assert data["validated"] is False
    assert data["metrics"] == PLAN.metrics
    assert len(data["units"]) == PLAN.num_units
    assert len(data["slots"]) == 3
    text = run_harts("inspect", "plan", files / "plan").stdout
    assert "not checked" in text
    assert "within_compression" in text


def test_a_plan_of_another_tree_is_refused(files: Path) -> None:
    result = run_harts("inspect", "plan", files / "another", "--tree", files / "tree.arrow")
    assert result.returncode == 4
    assert "another rollout tree" in result.stderr
    assert result.stdout == ""


def test_a_plan_with_broken_references_is_refused(files: Path) -> None:
    unit = np.array(PLAN.assignments.unit)
    unit[0] = 999
    write_bundle(files / "broken", with_table(PLAN, "assignments", unit=unit))
    result = run_harts("inspect", "plan", files / "broken")
    assert result.returncode == 4
    assert "no such unit" in result.stderr
    assert "assignments, line 0" in result.stderr


def test_html_is_written_beside_the_report(files: Path) -> None:
    page = files / "report.html"
    for arguments in (["tree", "tree.arrow"], ["plan", "plan"], ["diff", "plan", "plan"]):
        names = [arguments[0], *(files / name for name in arguments[1:])]
        result = run_harts("inspect", *names, "--html", page)
        assert result.returncode == 0, result.stderr
        assert page.read_text().startswith("<!DOCTYPE html>")
        page.unlink()


def test_limits_decide_the_exit_code(files: Path) -> None:
    tree, plan = files / "tree.arrow", files / "plan"
    met = run_harts("inspect", "tree", tree, "--fail-under", "compression=1", "--fail-under", "rows=24")
    assert met.returncode == 0
    missed = run_harts(
        "inspect", "plan", plan, "--json", "--fail-under", "balance=2", "--fail-under", "num_slots=9"
    )
    assert missed.returncode == 1
    assert json.loads(missed.stdout)["planner"] == "test"
    assert [line.split(" is ")[0] for line in missed.stderr.splitlines()] == [
        "fail: balance",
        "fail: num_slots",
    ]
    unknown = run_harts("inspect", "tree", tree, "--fail-under", "speed=1")
    assert unknown.returncode == 2
    assert "group_compression" in unknown.stderr
    assert unknown.stdout == ""


def test_diff_exits_1_only_when_plans_differ(files: Path) -> None:
    same = run_harts("inspect", "diff", files / "plan", files / "plan", "--json")
    assert same.returncode == 0
    assert json.loads(same.stdout)["same"] is True
    differ = run_harts("inspect", "diff", files / "plan", files / "another", "--json")
    assert differ.returncode == 1
    data = json.loads(differ.stdout)
    assert (data["same_tree"], data["num_moved"]) == (False, None)
    assert [u["slot"] for u in data["units_removed"]] == [2, 2]
    text = run_harts("inspect", "diff", files / "plan", files / "another")
    assert text.returncode == 1
    assert "tree_sha256" in text.stdout


@pytest.mark.parametrize("what", ["tree", "plan"])
def test_missing_and_foreign_files_are_named(tmp_path: Path, what: str) -> None:
    missing = run_harts("inspect", what, tmp_path / "none")
    assert missing.returncode == 3
    assert str(tmp_path / "none") in missing.stderr
    junk = tmp_path / "junk"
    junk.write_text("hello")
    result = run_harts("inspect", what, junk)
    assert result.returncode == 3
    assert "Traceback" not in result.stderr


def test_group_names_are_shown_as_they_are(tmp_path: Path) -> None:
    tree = tree_from_sequences([[1, 2], [1, 3]], groups=["[red]x", "[/]"])
    write_tree(tmp_path / "tree.arrow", tree)
    result = run_harts("inspect", "tree", tmp_path / "tree.arrow")
    assert result.returncode == 0
    assert "[red]x" in result.stdout
    assert "[/]" in result.stdout


def test_memory(files: Path) -> None:
    html = files / "page.html"
    options = PlanOptions(planner="psrl", dp=1, capacity=12, chunk=4, on_too_long="split")
    write_bundle(files / "chain", plan_tree(TREE, options))
    result = run_harts("inspect", "memory", files / "chain", "--html", html)
    assert result.returncode == 0, result.stderr
    for part in ("adaptive, no-release", "16 tokens", "lru", "hit rate", "recomputed", "█"):
        assert part in result.stdout
        assert part in html.read_text()
    data = json.loads(run_harts("inspect", "memory", files / "chain", "--json", "--budget", "3").stdout)
    first = data["policies"][0]
    assert (first["policy"], first["block_tokens"]) == ("just-in-time", None)
    assert len(first["timeline"]) == len(data["passes"]) > 0
    assert {p["budget"] for p in data["policies"]} == {None, 3}
    assert data["unit"] == "tokens"
    config = files / "train.toml"
    config.write_text(
        '[model]\npreset = "cpu-moe"\n[runtime]\nrecompute = "layer"\nmemory_budget_bytes = 9\n'
    )
    more = ("--config", config, "--tree", files / "tree.arrow", "--forward-only", "--json")
    data = json.loads(run_harts("inspect", "memory", files / "chain", *more).stdout)
    assert (data["unit"], data["recompute"], data["forward_only"]) == ("bytes", "layer", True)
    assert {p["budget"] for p in data["policies"]} == {None, 9}
    assert data["policies"][0]["peak"] > first["peak"]


def test_memory_of_bad_input(files: Path) -> None:
    page = files / "page.html"
    plan = with_table(PLAN, "spans", owner_span=PLAN.spans.owner_span + 100)
    write_bundle(files / "broken", plan)
    result = run_harts("inspect", "memory", files / "broken", "--html", page)
    assert result.returncode == 4
    assert "the owner has no such span" in result.stderr
    assert not page.exists()
    assert run_harts("inspect", "memory", files / "plan", "--budget", "-1").returncode == 2
    (files / "train.toml").write_text("[runtime]\nmemory_budget = 1\n")
    result = run_harts("inspect", "memory", files / "plan", "--config", files / "train.toml")
    assert result.returncode == 2
    assert "memory_budget_bytes" in result.stderr


def test_schedules(files: Path) -> None:
    result = run_harts("inspect", "schedule", files / "plan", "--pp", "3", "--html", files / "page.html")
    assert result.returncode == 0, result.stderr
    for name in ("harts", "non-overlapping", "backward-first"):
        assert f"\n{name}, replica" in result.stdout
    assert "stage 2 " in result.stdout
    assert "<pre>stage 0 " in (files / "page.html").read_text()
    one = run_harts(
        "inspect", "schedule", files / "plan", "--schedule", "backward-first", "--replica", "1", "--json"
    )
    data = json.loads(one.stdout)
    assert [s["kind"] for s in data["schedules"]] == ["backward-first"]
    assert (data["stages"], data["replica"], data["slots"]) == (2, 1, 3)


def test_schedules_of_bad_input(files: Path) -> None:
    page = files / "page.html"
    result = run_harts("inspect", "schedule", files / "plan", "--replica", "5", "--html", page)
    assert result.returncode == 2
    assert "no replica 5: the plan has 2" in result.stderr
    owner = np.array(PLAN.spans.owner)
    owner[0] = 99
    file = files / "plan" / "spans.arrow"
    write_arrow(file, bundle_to_tables(with_table(PLAN, "spans", owner=owner))["spans"], compression=None)
    manifest = json.loads((files / "plan" / "plan.json").read_text())
    manifest["tables"]["spans"] = sha256_file(file)
    (files / "plan" / "plan.json").write_text(json.dumps(manifest))
    result = run_harts("inspect", "schedule", files / "plan", "--html", page)
    assert result.returncode == 4
    assert "no such owner" in result.stderr
    assert not page.exists()
    assert run_harts("inspect", "schedule", files / "plan", "--pp", "0").returncode == 2
