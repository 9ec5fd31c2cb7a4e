"""Limits that keep the source readable, and things that must not be in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source import CODE, PACKAGES, ROOT, functions, imports, name_of, parsed, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
HARMLESS_PICKLE = ("pickle.UnpicklingError", "pickle.PickleError")
"""What may be used of pickle: the errors of readers that refuse pickled code."""
INERT_UNPICKLER = "torch_dist_index.py"
"""Has an unpickler that knows no classes; tests/unit/exec/weights shows that it runs nothing."""
CODE_FILES = python_files(*CODE)
ALL_FILES = python_files(*CODE, "tests", "docs")


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_FILE_LINES


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body; its signature and its documentation do not count."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", CODE_FILES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    lengths = {f.name: body_lines(f) for f, _ in functions(path)}
    assert {name: n for name, n in lengths.items() if n >= MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", python_files(*PACKAGES, "schemas"), ids=name_of)
def test_public_functions_are_documented_and_typed(path: Path) -> None:
    missing = []
    for function, public in functions(path):
        if not public:
            continue
        a = function.args
        arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        untyped = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls")]
        overload = any(ast.unparse(d).endswith(("overload", ".setter")) for d in function.decorator_list)
        if not ast.get_docstring(function) and not overload:
            missing.append(f"{function.name}: no docstring")
        if untyped or function.returns is None:
            missing.append(f"{function.name}: {', '.join(untyped) or 'return'} not annotated")
    assert missing == []


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=name_of)
def test_public_classes_and_modules_are_documented(path: Path) -> None:
    tree = parsed(path)
    assert path.stat().st_size == 0 or ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("path", CODE_FILES, ids=name_of)
def test_nothing_can_unpickle(path: Path) -> None:
    for name, line in imports(path):
        unsafe = name.split(".")[0] in ("cloudpickle", "dill", "joblib", "marshal", "shelve")
        unsafe |= name.startswith("pickle.") and name not in HARMLESS_PICKLE
        assert not unsafe, f"line {line}: {name}"
    harmless = (*HARMLESS_PICKLE, *(["pickle.Unpickler"] if path.name == INERT_UNPICKLER else []))
    for node in ast.walk(parsed(path)):
        used = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        assert not used.startswith("pickle.") or used in harmless, used
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert keywords.get("allow_pickle", "False") == "False", f"line {node.lineno}"
        if ast.unparse(node.func) == "torch.load":
            assert keywords.get("weights_only") == "True", f"line {node.lineno}: torch.load"


def test_there_is_no_utils_module() -> None:
    names = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [name_of(p) for p in ALL_FILES if p.name in names] == []


def text_files() -> list[Path]:
    """Source, documents and configuration that are part of the project."""
    suffixes = {".py", ".md", ".toml", ".json", ".yaml", ".yml", ".sh", ".txt", ".cfg"}
    folders = (*CODE, "tests", "docs", ".ci", ".github")
    nested = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    top = [p for p in ROOT.iterdir() if p.is_file()]
    named = {"Makefile", "run"}
    return sorted(p for p in [*nested, *top] if p.suffix in suffixes or p.name in named)


@pytest.mark.parametrize("path", text_files(), ids=name_of)
def test_no_machine_paths_and_no_unfinished_work(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    forbidden = [f"/{name}/" for name in ("work", "root", "home", "Users")] + ["TO" + "DO", "FIX" + "ME"]
    assert [word for word in forbidden if word in text] == []
