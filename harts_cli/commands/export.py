"""harts export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    tree: Annotated[Path, typer.Argument(metavar="TREE", help="A rollout-tree file (.arrow).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The rows to write (.parquet).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a rollout tree back as rows, every trajectory in full."""
    from harts_cli.output import print_json, progress_bar, stdout
    from harts_core.files import refuse_inputs
    from harts_core.trees.export import export_rows
    from harts_core.trees.tree_file import read_tree

    refuse_inputs(output, [tree])
    source = read_tree(tree)
    with progress_bar() as progress:
        export_rows(output, source, progress)
    if as_json:
        print_json({"output": str(output), "rows": source.num_rows, "tokens": source.original_tokens})
    else:
        stdout().print(f"{output}: {source.num_rows:,} rows, {source.original_tokens:,} tokens", markup=False)
