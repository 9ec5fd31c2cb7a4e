"""harts ingest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harts_core.errors import ConfigError

if TYPE_CHECKING:
    from harts_core.trees.ingest_report import IngestReport

NUM_GROUPS_SHOWN = 8


def ingest(
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC…", help="Rollout files, directories or globs.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The rollout-tree file (.arrow).")],
    format: Annotated[
        str | None, typer.Option(help="Format of the files; sniffed from their content otherwise.")
    ] = None,
    map: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=NAME", help="Where HARTS rows have a field.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Token ids must be below it.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer's name; for messages, its file or directory.")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(help="How rollouts were sampled; for messages: trajectory, step, tree or tree-step."),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Consecutive blocks of so many rollouts of a file are a group.")
    ] = None,
    group_key: Annotated[str | None, typer.Option(help="The record's field that names the group.")] = None,
    group_by_prompt: Annotated[
        bool, typer.Option("--group-by-prompt", help="Trajectories with the same prompt are a group.")
    ] = False,
    advantages: Annotated[
        str | None, typer.Option(metavar="grpo|dr_grpo", help="Compute advantages from rewards.")
    ] = None,
    reward_key: Annotated[
        str | None, typer.Option(help="Which entry counts where rewards are a dict.")
    ] = None,
    on_bad_record: Annotated[
        str, typer.Option(metavar="error|skip", help="Stop at a bad record, or count it.")
    ] = "error",
    on_nonfinite: Annotated[
        str, typer.Option(metavar="error|drop", help="Refuse NaN values, or leave their positions untrained.")
    ] = "error",
    duplicate_ids: Annotated[
        str, typer.Option(metavar="error|suffix", help="Refuse repeated ids, or rename them id~2, ….")
    ] = "error",
    max_record_mib: Annotated[float, typer.Option(help="Longest JSON line or document, in MiB.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Read rollouts into a rollout tree and report what they share."""
    from harts_cli.output import compiling_shown, print_json, progress_bar
    from harts_core.files import refuse_inputs
    from harts_core.trees.ingest import ingest as run
    from harts_core.trees.ingest_options import IngestOptions
    from harts_core.trees.sources.paths import expand_sources
    from harts_core.trees.tree_file import write_tree

    refuse_inputs(output, (source.path for source in expand_sources(sources)[0]))
    choices: dict[str, Any] = {
        "advantages": advantages,
        "on_bad_record": on_bad_record,
        "on_nonfinite": on_nonfinite,
        "duplicate_ids": duplicate_ids,
    }
    options = IngestOptions(
        format=format,
        fields=_parse_map(map or []),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        sampling=sampling,
        group_key=group_key,
        group_size=group_size,
        group_by_prompt=group_by_prompt,
        reward_key=reward_key,
        max_record_mib=max_record_mib,
        **choices,
    )
    with progress_bar() as progress, compiling_shown(progress):
        tree, report = run(sources, options, progress)
        write_tree(output, tree)
    if as_json:
        print_json({"output": str(output), **report.as_dict()})
    else:
        _print_report(report, output)


def _parse_map(pairs: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name or not value:
            raise ConfigError(f"{pair!r} is not FIELD=NAME", where="--map", hint="--map tokens=my_ids")
        fields[name] = value
    return fields


def _print_report(report: IngestReport, output: Path) -> None:
    from rich.markup import escape
    from rich.table import Table

    from harts_cli.output import stdout

    console = stdout()
    table = Table(title=escape(f"{output}"), title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in _summary(report):
        table.add_row(name, value)
    console.print(table)
    groups = Table(title=f"groups ({len(report.groups)})", title_justify="left")
    for name in ("group", "rows", "tokens", "trie tokens", "compression"):
        groups.add_column(name, justify="left" if name == "group" else "right", overflow="fold")
    for g in report.groups[:NUM_GROUPS_SHOWN]:
        numbers = (f"{g.rows:,}", f"{g.tokens:,}", f"{g.trie_tokens:,}")
        groups.add_row(escape(g.group_id), *numbers, f"{g.compression:.2f}×")
    if len(report.groups) > NUM_GROUPS_SHOWN:
        groups.add_row("…")
    console.print(groups)
    for title, found in (("dropped", report.dropped), ("warnings", report.warnings)):
        if not found:
            continue
        table = Table(title=title, title_justify="left")
        for name in ("why", "count", "first"):
            table.add_column(name, justify="right" if name == "count" else "left")
        for reason, finding in found.items():
            table.add_row(escape(reason), f"{finding.count:,}", escape(finding.first))
        console.print(table)
    for example in report.lost_sharing.examples:
        console.print(
            escape(
                f"lost sharing ({example.kind}): {example.first_id} and {example.second_id} part at position"
                f" {example.position:,} ({example.lost_tokens:,} tokens computed twice);"
                f" ids from {example.context_start:,}: {list(example.first_tokens)}"
                f" and {list(example.second_tokens)}"
            )
        )


def _summary(report: IngestReport) -> list[tuple[str, str]]:
    lost = report.lost_sharing
    return [
        ("rows", f"{report.rows:,}"),
        ("distinct rollouts", f"{report.rollouts:,}"),
        ("step-wise rows", f"{report.stepwise_rows:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("tokens per row, mean (longest)", f"{report.tokens / report.rows:,.0f} ({report.max_tokens:,})"),
        ("trained positions", f"{report.trained_positions:,}"),
        ("trie tokens", f"{report.trie_tokens:,}"),
        ("compression", f"{report.compression:.2f}×"),
        ("trie tokens, cut at group bounds", f"{report.group_trie_tokens:,}"),
        ("compression within groups", f"{report.group_compression:.2f}×"),
        ("duplicates", f"{report.duplicates:,}"),
        ("prefix rows", f"{report.prefix_rows:,}"),
        ("roots, forks", f"{report.roots:,}, {report.forks:,}"),
        ("lost sharing between steps", f"{lost.step_tokens:,} tokens in {lost.step_pairs:,} pairs"),
        ("lost sharing in prompts", f"{lost.prompt_tokens:,} tokens in {lost.prompt_pairs:,} pairs"),
        ("content sha256", report.content_sha256[:16]),
    ]
