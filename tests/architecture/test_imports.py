"""Imports go one way: harts_cli → exec → plan (the bundle, not the planners) → trees → errors, files, …

``trees`` and ``plan`` run without torch, and the program starts without numpy.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGES, ROOT, imports, module_of, name_of, python_files

HEAVY = {"torch", "megatron", "fla", "transformers", "triton", "safetensors"}
BASE = tuple(f"harts_core.{name}" for name in ("distribution", "errors", "files", "headers", "progress"))
BUNDLE = tuple(
    f"harts_core.plan.{name}"
    for name in ("bundle", "bundle_file", "cache_policy", "recompute", "schedule", "validate")
)
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "harts_core.trees": (*BASE, "harts_core.trees"),
    "harts_core.plan": (*BASE, "harts_core.trees", "harts_core.plan"),
    "harts_core.exec": (
        *BASE,
        "harts_core.trees",
        *BUNDLE,
        "harts_core.plan.calibration",
        "harts_core.exec",
        "harts_core.__version__",
    ),
    "harts_core": BASE,
    "harts_cli": ("harts_core", "harts_cli"),
}
"""Longest matching prefix decides; names a package may import from the project."""


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    module = module_of(path)
    layer = max((p for p in MAY_IMPORT if within(module, p)), key=len)
    for name, line in imports(path):
        if name.split(".")[0] not in PACKAGES or name in PACKAGES or name.startswith("harts_core.__"):
            continue
        if name in ("harts_core.plan", "harts_core.trees", "harts_core.exec"):
            continue  # "from harts_core.plan import bundle" also yields harts_core.plan.bundle
        assert any(within(name, allowed) for allowed in MAY_IMPORT[layer]), (
            f"{name_of(path)}:{line}: {layer} must not import {name}"
        )


@pytest.mark.parametrize("path", python_files("harts_core/trees", "harts_core/plan"), ids=name_of)
def test_trees_and_plan_import_no_torch(path: Path) -> None:
    found = [f"line {line}: {name}" for name, line in imports(path) if name.split(".")[0] in HEAVY]
    assert not found


@pytest.mark.parametrize("path", python_files("harts_cli/commands"), ids=name_of)
def test_command_modules_import_only_typer_at_the_top(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"typer"}
    for name, line in imports(path, top_level_only=True):
        assert name.split(".")[0] in allowed or within(name, "harts_core.errors"), (
            f"{name_of(path)}:{line}: {name} slows every start of the program; import it in the function"
        )


def loaded_packages(tmp_path: Path, *arguments: str) -> set[str]:
    """Run the program on the arguments in a fresh interpreter: the top-level packages that it imported."""
    listing = tmp_path / "modules"
    code = (
        "import pathlib, sys\n"
        "from harts_cli.main import main\n"
        f"sys.argv = ['harts', *{list(arguments)!r}]\n"
        "code = 0\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    code = stop.code\n"
        f"pathlib.Path({str(listing)!r}).write_text(' '.join({{m.split('.')[0] for m in sys.modules}}))\n"
        "sys.exit(code)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(listing.read_text().split())


HELP = [
    [],
    ["synth"],
    ["ingest"],
    ["plan"],
    ["compare"],
    ["inspect"],
    ["inspect", "tree"],
    ["inspect", "plan"],
]
HELP += [
    ["inspect", "diff"],
    ["inspect", "schedule"],
    ["inspect", "memory"],
    ["train"],
    ["logprob"],
    ["export"],
    ["export-weights"],
]


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_loads_nothing_heavy(tmp_path: Path, command: list[str]) -> None:
    loaded = loaded_packages(tmp_path, *command, "--help")
    assert not loaded & (HEAVY | {"numpy", "pyarrow", "numba", "zstandard"})


def test_working_without_training_never_loads_torch(tmp_path: Path) -> None:
    rows, tree, plan = (str(tmp_path / name) for name in ("rows.parquet", "tree.arrow", "plan"))
    runs = [
        ["synth", "-o", rows, "--rows", "12"],
        ["ingest", rows, "-o", tree],
        ["plan", tree, "-o", plan, "--planner", "harts-l1", "--dp", "2", "--capacity", "1024"],
        ["inspect", "tree", tree],
        ["inspect", "plan", plan, "--tree", tree],
        ["inspect", "diff", plan, plan],
        ["inspect", "schedule", plan],
        ["inspect", "memory", plan],
        ["export", tree, "-o", str(tmp_path / "again.parquet")],
    ]
    for arguments in runs:
        assert not loaded_packages(tmp_path, *arguments) & HEAVY, arguments
