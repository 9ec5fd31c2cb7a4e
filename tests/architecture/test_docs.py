"""The documentation names every option, every column and every metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from harts_cli.main import INTERRUPTED, PIPE_CLOSED, app
from harts_core import errors
from harts_core.errors import HartsError
from harts_core.plan.bundle_file import SCHEMAS
from harts_core.trees.statistics import tree_statistics
from harts_core.trees.synth import KINDS, ROW_SCHEMA
from harts_core.trees.tree_file import TREE_SCHEMA
from tests.architecture.source import ROOT
from tests.support import tree_from_sequences

PAGES = {
    ("synth",): "synth",
    ("ingest",): "ingest",
    ("plan",): "planning",
    ("compare",): "planners",
    ("calibrate",): "planners",
    ("inspect", "tree"): "inspect",
    ("inspect", "plan"): "inspect",
    ("inspect", "diff"): "inspect",
    ("inspect", "schedule"): "schedule",
    ("inspect", "memory"): "memory",
    ("train",): "training",
    ("logprob",): "training",
    ("export",): "ingest",
    ("export-weights",): "training",
}


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", PAGES, ids=" ".join)
def test_every_option_is_documented(command: tuple[str, ...]) -> None:
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    options = {o for p in found.params for o in p.opts if o.startswith("--") and o != "--help"}
    assert options
    text = page(PAGES[command])
    assert [
        option for option in sorted(options) if f"`{option}" not in text and f" {option}" not in text
    ] == []


def test_every_command_has_a_page() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {names[0] for names in PAGES} == set(commands)


def test_every_column_is_documented() -> None:
    formats = page("formats")
    tables = [*SCHEMAS.values(), TREE_SCHEMA]
    assert [f.name for schema in tables for f in schema if f"`{f.name}`" not in formats] == []
    synth = page("synth")
    assert [f.name for f in ROW_SCHEMA if f"`{f.name}`" not in synth] == []
    assert [kind for kind in KINDS if f"`{kind}`" not in synth] == []


def test_every_tree_metric_is_documented() -> None:
    metrics = tree_statistics(tree_from_sequences([[1, 2]])).metrics
    assert [name for name in metrics if f"`{name}`" not in page("inspect")] == []


PAGES_WITH_LINKS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


@pytest.mark.parametrize("path", sorted(PAGES_WITH_LINKS), ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    files = {t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:", t)}
    assert [file for file in sorted(files) if not (path.parent / file).exists()] == []


def test_every_exit_code_is_documented() -> None:
    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, HartsError)}
    documented = set(map(int, re.findall(r"^\| (\d+) \|", page("errors"), re.MULTILINE)))
    assert documented == codes | {0, INTERRUPTED, PIPE_CLOSED}
