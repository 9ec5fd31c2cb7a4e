"""The project's source files, parsed once for the tests of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harts_core", "harts_cli")
CODE = (*PACKAGES, "schemas", "benchmarks", "examples")


def python_files(*folders: str) -> list[Path]:
    """Every Python file under the named top-level folders (those that exist), sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Path from the project's root, for messages and test ids."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Dotted module name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, those inside functions included; ``from a import b`` gives a and a.b.

    Imports under ``if TYPE_CHECKING:`` are skipped: they are never run.
    """
    tree = parsed(path)
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden.update(inner for statement in node.body for inner in ast.walk(statement))
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            module = node.module or ""
            yield module, node.lineno
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


def functions(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """(function, public) of every function; public: reachable by name from the module without underscores."""

    def walk(node: ast.AST, public: bool) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, public and not child.name.startswith("_")
                yield from walk(child, False)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, public and not child.name.startswith("_"))
            else:
                yield from walk(child, public)

    yield from walk(parsed(path), True)
