"""Forward-only log-probabilities of a rollout tree, with the sharing of a plan: old and reference columns."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError, ExecError, HartsError, NonFiniteError
from harts_core.exec.load_model import at_file, check_backend, load_model
from harts_core.exec.model_section import resolve_model_config
from harts_core.exec.parallel.degrees import (
    check_model_degrees,
    check_plan_degrees,
    read_job_config,
)
from harts_core.exec.step_data import check_plan_fits
from harts_core.exec.weights.load import read_stored_model
from harts_core.files import check_parent, refuse_inputs
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.bundle_file import read_bundle
from harts_core.progress import Progress, no_progress
from harts_core.trees.ragged import Ragged, offsets_from_lengths
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import read_tree, write_tree

if TYPE_CHECKING:
    from harts_core.exec.blocks import CacheSettings
    from harts_core.exec.config import LinearCalls, TrainConfig
    from harts_core.exec.model.config import ModelConfig
    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.parallel.ranks import Ranks
    from harts_core.exec.windows import UnitForward

Int64 = npt.NDArray[np.int64]
LogprobColumn = Literal["old", "ref"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """What to evaluate, and where to write.

    Attributes:
        plan: the plan bundle whose sharing is used.
        tree: its rollout-tree file.
        config: train.toml; ``[model]``, ``[runtime]`` and ``[parallel]`` are used.
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
        seconds: of the forward passes, on all processes together.
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


def logprob_run(options: LogprobOptions, progress: Progress = no_progress) -> LogprobReport | None:
    """Evaluate every trained position of a plan and write the tree with that column filled.

    All other columns are written as they are. The new file has another content hash, so a plan of the old
    one does not run on it; planning it again gives the same tables.

    Args:
        options: what to do. Every process of a job calls this with the same; the first writes the file.
        progress: called with the phase ``units``, in the first process.

    Returns:
        The report; None in the other processes of a job.

    Raises:
        ConfigError: the configuration is wrong, or the output is the input.
        DataError: a file is missing or damaged, the weights do not fit, or the plan trains nothing.
        InvalidPlanError: the plan breaks a rule or belongs to another tree.
        MissingBackendError: torch or the asked-for device is absent.
        NonFiniteError: a log-probability is NaN or infinite; nothing was written.
        ExecError: another process of the job died or hangs; nothing was written.
    """
    config, launch = read_job_config(options.config)
    inputs = (options.tree, options.plan, options.config, options.checkpoint)
    refuse_inputs(options.out, (path for path in inputs if path is not None))
    check_parent(options.out)
    weights = None if options.checkpoint is None else read_stored_model(options.checkpoint)
    model_config = resolve_model_config(
        config.model, None if weights is None else weights.config, str(options.config)
    )
    check_model_degrees(config.parallel, model_config, str(options.config))
    bundle, tree = _read_plan(options, config, model_config)
    check_backend(config.runtime, "evaluating log-probabilities")
    from harts_core.exec.blocks import CacheSettings
    from harts_core.exec.checkpoint import check_files
    from harts_core.exec.parallel.job import join_job

    with join_job(config.parallel, launch, config.runtime.device) as job:
        if weights is not None:
            job.ranks.at("checking the files of the checkpoint")
            check_files(weights.path, job)
        job.ranks.at("loading the model")
        model, _ = load_model(
            model_config, weights, config.runtime, job.spec, num_processes=config.parallel.num_processes
        )
        start = time.perf_counter()
        column = tree_logprobs(
            model,
            bundle,
            tree,
            head_block_rows=config.runtime.head_block_rows,
            linear_calls=config.runtime.linear_calls,
            cache=CacheSettings.of(config.runtime),
            ranks=job.ranks,
            progress=progress if job.is_main else no_progress,
        )
        seconds = time.perf_counter() - start
    return _write(options, bundle, tree, column, seconds) if launch.is_main else None


def _read_plan(
    options: LogprobOptions, config: TrainConfig, model: ModelConfig
) -> tuple[PlanBundle, RolloutTree]:
    """The plan and its tree, which fit each other, the model and the parallel degrees."""
    bundle, tree = read_bundle(options.plan), read_tree(options.tree)
    check_plan_degrees(config.parallel, bundle.parameters, str(options.plan))
    try:
        check_plan_fits(bundle, tree, vocab_size=model.vocab_size)
    except HartsError as error:
        file = options.tree if isinstance(error, DataError) else options.plan
        raise type(error)(error.what, where=at_file(error.where, file), hint=error.hint) from None
    return bundle, tree


def _write(
    options: LogprobOptions, bundle: PlanBundle, tree: RolloutTree, column: Ragged, seconds: float
) -> LogprobReport:
    """Write the tree with the column filled, and report."""
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
    linear_calls: LinearCalls = "rounds",
    cache: CacheSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress = no_progress,
) -> Ragged:
    """``plan_logprobs`` as a column of the tree.

    Returns:
        float32, one value per trained position of each row; null for rows that the plan leaves out.

    Raises:
        DataError: no row of the plan has a trained position.
        NonFiniteError: a value is NaN or infinite; its trajectory is named.
        ExecError: see ``plan_logprobs``.
    """
    placed, offsets = _value_places(bundle, tree)
    if not offsets[-1]:
        raise DataError(
            "no trajectory of the plan has a trained position", hint="check loss_spans in the tree"
        )
    values = plan_logprobs(
        model,
        bundle,
        tree,
        head_block_rows=head_block_rows,
        linear_calls=linear_calls,
        cache=cache,
        ranks=ranks,
        progress=progress,
    ).astype(np.float32)
    odd = np.flatnonzero(~np.isfinite(values))
    if len(odd):
        row = int(np.searchsorted(offsets, odd[0], side="right")) - 1
        raise NonFiniteError(
            f"{len(odd)} log-probabilities are not finite; nothing was written",
            where=f"trajectory {tree.trajectory_id[row]}, trained position {int(odd[0] - offsets[row])}",
            hint="check the checkpoint, or use another dtype",
        )
    return Ragged(offsets=offsets, values=values, valid=None if placed.all() else placed)


def plan_logprobs(
    model: HybridModel,
    bundle: PlanBundle,
    tree: RolloutTree,
    *,
    head_block_rows: int = 1024,
    linear_calls: LinearCalls = "rounds",
    cache: CacheSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress = no_progress,
) -> npt.NDArray[np.float64]:
    """λ of every trained position of a plan's rows, without keeping any graph.

    Args:
        model: gives the weights; of a job's rank, its part.
        bundle: a validated plan.
        tree: its rollout tree.
        head_block_rows: rows of vocabulary logits held at a time.
        linear_calls: how linear attention is cut into packed calls.
        cache: how blocks are kept that units import from earlier ones; None: without a limit.
        ranks: the processes that share the pass; None: this one alone.
        progress: called with the phase ``units``.

    Returns:
        float64, the values of all rows that the plan holds, by (row, position); the same on every rank.

    Raises:
        ExecError: a position was not evaluated exactly once.
    """
    import torch

    from harts_core.exec.blocks import CacheSettings
    from harts_core.exec.head import unit_logprobs
    from harts_core.exec.parallel.ranks import ONE_PROCESS
    from harts_core.exec.windows import UnitExecutor

    _, offsets = _value_places(bundle, tree)
    found = np.zeros((2, int(offsets[-1])))  # values, and how often each was evaluated

    def collect(forward: UnitForward) -> None:
        layout = forward.layout
        if model.spec.stage.is_last and len(layout.trained_row):
            logprobs = unit_logprobs(
                model,
                forward.hidden,
                layout,
                block_rows=head_block_rows,
                imported_hidden=forward.imported_hidden,
            )
            index = offsets[layout.trained_row] + layout.trained_index
            found[0, index] = logprobs.double().cpu().numpy()
            np.add.at(found[1], index, 1)

    ranks = ONE_PROCESS if ranks is None else ranks
    order = np.lexsort((bundle.units.order, bundle.units.replica)).tolist()
    work = ranks.work(bundle, order)
    events = work.events(training=False)
    executor = UnitExecutor(
        model,
        work.bundle,
        tree,
        collect,
        events,
        linear_calls=linear_calls,
        links=work.links,
        cache=CacheSettings() if cache is None else cache,
        transfers=work.transfers,
    )
    done = 0
    for event in events:
        ranks.at(f"{event.kind} of unit {event.unit}")
        executor.run(event)
        if event.kind == "forward":
            done += 1
            progress("units", done, work.num_units)
    ranks.at("the sums over the ranks")
    values, counts = ranks.sum_values(torch.from_numpy(found))
    wrong = int((counts != 1).sum())
    if wrong:
        raise ExecError(f"{wrong} positions were not evaluated exactly once")
    return values.numpy()  # type: ignore[no-any-return]


def _value_places(bundle: PlanBundle, tree: RolloutTree) -> tuple[npt.NDArray[np.bool_], Int64]:
    """[N], which rows the plan holds; and [N + 1], where each row's values lie: none for the others."""
    placed = np.zeros(tree.num_rows, np.bool_)
    placed[bundle.assignments.row] = True
    return placed, offsets_from_lengths(np.where(placed, tree.trained_counts, 0))
