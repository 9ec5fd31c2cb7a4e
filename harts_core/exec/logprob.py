"""Forward-only log-probabilities of a rollout tree, with the sharing of a plan: old and reference columns."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError, HartsError, NonFiniteError
from harts_core.exec.config import read_config
from harts_core.exec.load_model import at_file, check_backend, load_model
from harts_core.exec.model_section import resolve_model_config
from harts_core.exec.step_data import check_plan_fits
from harts_core.exec.weights.hf_checkpoint import read_hf_checkpoint
from harts_core.files import check_parent, refuse_inputs
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.bundle_file import read_bundle
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.progress import Progress, no_progress
from harts_core.trees.ragged import Ragged, offsets_from_lengths
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import read_tree, write_tree

if TYPE_CHECKING:
    from harts_core.exec.blocks import CacheSettings
    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.windows import UnitForward

LogprobColumn = Literal["old", "ref"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """What to evaluate, and where to write.

    Attributes:
        plan: the plan bundle whose sharing is used.
        tree: its rollout-tree file.
        config: train.toml; ``[model]`` and ``[runtime]`` are used.
        out: the rollout-tree file to write.
        column: ``old`` fills old_logprobs, ``ref`` ref_logprobs.
        checkpoint: weights (Hugging Face folder or a run's checkpoint); None: initialised from the seed.
    """

    plan: Path
    tree: Path
    config: Path
    out: Path
    column: LogprobColumn
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobReport:
    """What a forward-only pass evaluated and wrote.

    Attributes:
        output: the file.
        column: the column that was filled.
        content_sha256: of the new tree; plans name it.
        rows, rows_not_in_plan: rows filled; rows that the plan leaves out, which are null in the column.
        positions: log-probabilities evaluated.
        mean_logprob: their mean.
        original_tokens, computed_tokens: token occurrences evaluated; tokens that ran through the model.
        seconds: of the forward passes.
        tokens_per_s: original tokens per second.
    """

    output: str
    column: str
    content_sha256: str
    rows: int
    rows_not_in_plan: int
    positions: int
    mean_logprob: float
    original_tokens: int
    computed_tokens: int
    seconds: float
    tokens_per_s: float


def logprob_run(options: LogprobOptions, progress: Progress = no_progress) -> LogprobReport:
    """Evaluate every trained position of a plan and write the tree with that column filled.

    All other columns are written as they are. The new file has another content hash, so a plan of the old
    one does not run on it; planning it again gives the same tables.

    Raises:
        ConfigError: the configuration is wrong, or the output is the input.
        DataError: a file is missing or damaged, the weights do not fit, or the plan trains nothing.
        InvalidPlanError: the plan breaks a rule or belongs to another tree.
        MissingBackendError: torch or the asked-for device is absent.
        NonFiniteError: a log-probability is NaN or infinite; nothing was written.
    """
    config = read_config(options.config)
    inputs = (options.tree, options.plan, options.config, options.checkpoint)
    refuse_inputs(options.out, (path for path in inputs if path is not None))
    check_parent(options.out)
    weights = None if options.checkpoint is None else read_hf_checkpoint(options.checkpoint)
    model_config = resolve_model_config(
        config.model, None if weights is None else weights.config, str(options.config)
    )
    bundle, tree = read_bundle(options.plan), read_tree(options.tree)
    try:
        check_plan_fits(bundle, tree, vocab_size=model_config.vocab_size)
    except HartsError as error:
        file = options.tree if isinstance(error, DataError) else options.plan
        raise type(error)(error.what, where=at_file(error.where, file), hint=error.hint) from None
    check_backend(config.runtime, "evaluating log-probabilities")
    from harts_core.exec.blocks import CacheSettings

    model, _ = load_model(model_config, weights, config.runtime)
    start = time.perf_counter()
    column = tree_logprobs(
        model,
        bundle,
        tree,
        head_block_rows=config.runtime.head_block_rows,
        cache=CacheSettings.of(config.runtime),
        progress=progress,
    )
    seconds = time.perf_counter() - start
    name = f"{options.column}_logprobs"
    written = write_tree(options.out, replace(tree, **{name: column}))  # type: ignore[arg-type]
    filled = tree.num_rows if column.valid is None else int(column.valid.sum())
    table = bundle.assignments
    original = int((table.stop.astype(np.int64) - table.start).sum())
    return LogprobReport(
        output=str(options.out),
        column=name,
        content_sha256=written.content_sha256,
        rows=filled,
        rows_not_in_plan=tree.num_rows - filled,
        positions=len(column.values),
        mean_logprob=float(column.values.mean(dtype=np.float64)),
        original_tokens=original,
        computed_tokens=int(bundle.units.computed_tokens.sum()),
        seconds=seconds,
        tokens_per_s=original / seconds,
    )


def tree_logprobs(
    model: HybridModel,
    bundle: PlanBundle,
    tree: RolloutTree,
    *,
    head_block_rows: int = 1024,
    cache: CacheSettings | None = None,
    progress: Progress = no_progress,
) -> Ragged:
    """λ of every trained position of a plan's rows, without keeping any graph.

    Args:
        model: gives the weights.
        bundle: a validated plan.
        tree: its rollout tree.
        head_block_rows: rows of vocabulary logits held at a time.
        cache: how blocks are kept that units import from earlier ones; None: without a limit.
        progress: called with the phase ``units``.

    Returns:
        float32, one value per trained position of each row; null for rows that the plan leaves out.

    Raises:
        DataError: no row of the plan has a trained position.
        NonFiniteError: a value is NaN or infinite; its trajectory is named.
    """
    from harts_core.exec.blocks import CacheSettings
    from harts_core.exec.head import unit_logprobs
    from harts_core.exec.windows import UnitExecutor

    placed = np.zeros(tree.num_rows, np.bool_)
    placed[bundle.assignments.row] = True
    offsets = offsets_from_lengths(np.where(placed, tree.trained_counts, 0))
    if not offsets[-1]:
        raise DataError(
            "no trajectory of the plan has a trained position", hint="check loss_spans in the tree"
        )
    values: npt.NDArray[np.float32] = np.full(int(offsets[-1]), np.nan, np.float32)

    def collect(forward: UnitForward) -> None:
        layout = forward.layout
        if len(layout.trained_row):
            found = unit_logprobs(
                model,
                forward.hidden,
                layout,
                block_rows=head_block_rows,
                imported_hidden=forward.imported_hidden,
            )
            values[offsets[layout.trained_row] + layout.trained_index] = found.float().cpu().numpy()

    order = np.lexsort((bundle.units.order, bundle.units.replica)).tolist()
    links = unit_links(bundle)
    events = unit_events(links, order, training=False)
    executor = UnitExecutor(model, bundle, tree, collect, events, links=links, cache=cache or CacheSettings())
    done = 0
    for event in events:
        executor.run(event)
        if event.kind == "forward":
            done += 1
            progress("units", done, bundle.num_units)
    odd = np.flatnonzero(~np.isfinite(values))
    if len(odd):
        row = int(np.searchsorted(offsets, odd[0], side="right")) - 1
        raise NonFiniteError(
            f"{len(odd)} log-probabilities are not finite; nothing was written",
            where=f"trajectory {tree.trajectory_id[row]}, trained position {int(odd[0] - offsets[row])}",
            hint="check the checkpoint, or use another dtype",
        )
    return Ragged(offsets=offsets, values=values, valid=None if placed.all() else placed)
