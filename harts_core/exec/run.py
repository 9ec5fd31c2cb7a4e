"""A training run: everything between ``harts train``'s options and the trainer's steps.

A run folder holds ``config.json`` (the resolved configuration), ``metrics.jsonl`` and ``checkpoints/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harts_core.errors import (
    ConfigError,
    CorruptFileError,
    DataError,
    HartsError,
    InvalidPlanError,
)
from harts_core.exec.config import TrainConfig
from harts_core.exec.load_model import at_file, check_backend, load_model
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model_section import COMPUTED, resolve_model_config
from harts_core.exec.objectives import Objective, build_objective, needs_whole_trajectories
from harts_core.exec.parallel.degrees import (
    check_model_degrees,
    check_plan_degrees,
    read_job_config,
)
from harts_core.exec.parallel.launch import Launch
from harts_core.exec.weights.load import StoredModel, read_stored_model
from harts_core.files import atomic_directory, atomic_file, check_parent, refuse_inputs, sha256_file
from harts_core.progress import Progress, no_progress

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.metrics import MetricsLog, StepMetrics
    from harts_core.exec.parallel.job import Job
    from harts_core.exec.step_data import StepData
    from harts_core.exec.trainer import Trainer

CONFIG = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to train, on what, and where to write.

    Attributes:
        plans: plan bundles in order, each one optimizer step or ``[optimizer] num_minibatches`` of them.
        trees: rollout-tree files; each plan finds its own by content hash.
        config: train.toml.
        out: the run folder.
        checkpoint: a Hugging Face checkpoint (or one of another run) to start from.
        resume: continue from the run's newest checkpoint; without one, start.
        steps: optimizer steps of the whole run, the plans repeated as often as needed; None: one pass.
    """

    plans: tuple[Path, ...]
    trees: tuple[Path, ...]
    config: Path
    out: Path
    checkpoint: Path | None = None
    resume: bool = False
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run.

    Attributes:
        steps: metrics of the steps taken by this call, in order.
        checkpoint: the newest checkpoint's folder.
        steps_before: steps that were done already.
        is_main: whether this process reports; of a job's processes one does.
    """

    steps: tuple[StepMetrics, ...]
    checkpoint: Path
    steps_before: int
    is_main: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What is known before torch is imported. ``resume_from`` is the run's newest checkpoint, if any."""

    config: TrainConfig
    objective: Objective
    model: ModelConfig
    weights: StoredModel | None
    launch: Launch
    resume_from: Path | None
    resolved: dict[str, Any]


def train_run(
    options: RunOptions,
    *,
    progress: Progress = no_progress,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_warning: Callable[[str], None] = lambda sentence: None,
) -> RunResult:
    """Train, logging each step and writing checkpoints. Nothing is written before everything was checked.

    Args:
        options: what to do.
        progress: called with the phases ``steps`` and ``units``.
        on_step: called with each step's metrics.
        on_warning: called with each sentence about a resumed run that its user should know.

    Raises:
        ConfigError: the configuration or the options are wrong, or the run folder holds another run.
        DataError: a file is missing, damaged or lacks a column; the weights do not fit the model.
        InvalidPlanError: a plan breaks a rule or belongs to another tree.
        MissingBackendError: torch or the asked-for device is absent.
        NonFiniteError: a step's loss or gradient is not finite; nothing was updated by it.
    """
    setup = _check_options(options)
    steps, plans = _read_steps(options, setup)
    check_backend(setup.config.runtime, "training")
    if setup.launch.is_main:
        for sentence in _resume_warnings(options, setup):
            on_warning(sentence)
    from harts_core.exec.parallel.job import importing_megatron, join_job

    if setup.config.sharded_checkpoints and setup.launch.world_size == 1:
        with importing_megatron('[runtime] checkpoint_format = "sharded"'):
            import_module("megatron.core.dist_checkpointing")
    with join_job(setup.config.parallel, setup.launch, setup.config.runtime.device) as job:
        if job.is_main:
            return _train(options, setup, steps, plans, job, progress, on_step)
        return _train(options, setup, steps, plans, job, no_progress, lambda metrics: None)


def _train(
    options: RunOptions,
    setup: _Setup,
    steps: list[StepData],
    plans: tuple[str, ...],
    job: Job,
    progress: Progress,
    on_step: Callable[[StepMetrics], None],
) -> RunResult:
    """The steps of one process of the job."""
    from harts_core.exec.checkpoint import RunState, checkpoint_name, save_checkpoint

    num_steps = len(steps) if options.steps is None else options.steps
    trainer, extra_tensors = _build_trainer(setup, plans, job)
    folder = options.out / CHECKPOINTS
    log = _open_run(options.out, setup.resolved, trainer.steps_done) if job.is_main else None
    job.wait()
    before, runtime = trainer.steps_done, setup.config.runtime
    taken = []
    while trainer.steps_done < num_steps:
        progress("steps", trainer.steps_done, num_steps)
        metrics = trainer.step_on(steps[trainer.steps_done % len(steps)], progress)
        if log is not None:
            log.append(metrics)
        on_step(metrics)
        taken.append(metrics)
        every = runtime.checkpoint_every
        if metrics.step == num_steps or (every and metrics.step % every == 0):
            job.ranks.at(f"the checkpoint of step {metrics.step}")
            state = RunState(step=metrics.step, seed=runtime.seed, dtype=runtime.dtype, plans=plans)
            save_checkpoint(
                folder,
                trainer.model,
                trainer.optimizer,
                state,
                sharded=setup.config.sharded_checkpoints,
                extra_tensors=extra_tensors,
                keep=runtime.keep_checkpoints,
                job=job,
            )
    progress("steps", trainer.steps_done, num_steps)
    newest = folder / checkpoint_name(trainer.steps_done)
    return RunResult(steps=tuple(taken), checkpoint=newest, steps_before=before, is_main=job.is_main)


def state_of_run(out: Path) -> str:
    """What a stopped run left in its folder, in words."""
    from harts_core.exec.checkpoint import list_checkpoints

    checkpoints = list_checkpoints(out / CHECKPOINTS)
    if checkpoints:
        return f"the newest checkpoint is {checkpoints[-1]}; --resume continues from it"
    return f"{out} has no checkpoint yet" if out.is_dir() else "nothing was written"


def _resume_warnings(options: RunOptions, setup: _Setup) -> list[str]:
    """What a resumed run does otherwise than its command line or its folder suggest."""
    from harts_core.exec.checkpoint import step_of
    from harts_core.exec.metrics import num_logged

    if setup.resume_from is None:
        return []
    done, logged = step_of(setup.resume_from), num_logged(options.out / METRICS)
    sentences = []
    if options.checkpoint is not None:
        sentences.append(f"the run continues from {setup.resume_from}; --checkpoint is not used")
    if logged < done:
        sentences.append(f"{options.out / METRICS} has {logged} of the {done} steps done")
    return sentences


def _check_options(options: RunOptions) -> _Setup:
    """Everything that needs neither torch nor the trees."""
    from harts_core.exec.checkpoint import check_same_config, falling_back, list_checkpoints

    config, launch = read_job_config(options.config)
    where = str(options.config)
    objective = build_objective(config.objective, where)
    if not options.plans or not options.trees:
        raise ConfigError("name at least one plan and one tree")
    if options.steps is not None and options.steps < 1:
        raise ConfigError("--steps must be at least 1")
    if options.out.exists() and not options.out.is_dir():
        raise DataError("the run folder is a file", where=str(options.out), hint="name another folder")
    check_parent(options.out)
    inputs = (options.config, *options.plans, *options.trees, options.checkpoint)
    refuse_inputs(options.out, (path for path in inputs if path is not None))
    if not options.resume and options.out.is_dir() and any(options.out.iterdir()):
        raise ConfigError(
            "the run folder is not empty",
            where=str(options.out),
            hint="continue that run with --resume, or name another folder",
        )
    checkpoints = list_checkpoints(options.out / CHECKPOINTS)
    source = checkpoints[-1] if checkpoints else options.checkpoint
    with falling_back(checkpoints[-1] if checkpoints else None):
        weights = None if source is None else read_stored_model(source)
    model = resolve_model_config(config.model, None if weights is None else weights.config, where)
    check_model_degrees(config.parallel, model, where)
    resolved = {
        **config.to_dict(),
        "model": {key: getattr(model, key) for key in COMPUTED},
        "objective": config.to_dict()["objective"] | asdict(objective),  # type: ignore[call-overload]
    }
    if (options.out / CONFIG).is_file():
        check_same_config(_read_resolved(options.out / CONFIG), resolved, where)
    elif options.resume and options.out.is_dir() and any(options.out.iterdir()):
        raise DataError(f"not a run folder: no {CONFIG}", where=str(options.out))
    return _Setup(
        config=config,
        objective=objective,
        model=model,
        weights=weights,
        launch=launch,
        resume_from=checkpoints[-1] if checkpoints else None,
        resolved=resolved,
    )


def _read_steps(options: RunOptions, setup: _Setup) -> tuple[list[StepData], tuple[str, ...]]:
    """The plans' optimizer steps, joined with their trees, and the hashes of their plan.json."""
    from harts_core.exec.step_data import build_minibatches, check_whole_trajectories
    from harts_core.plan.bundle_file import MANIFEST, read_bundle
    from harts_core.trees.tree_file import read_tree

    read = [(read_tree(path), path) for path in options.trees]
    trees = {tree.content_sha256: (tree, path) for tree, path in read}
    steps: list[StepData] = []
    for path in options.plans:
        bundle = read_bundle(path)
        check_plan_degrees(setup.config.parallel, bundle.parameters, str(path))
        tree, tree_path = trees.get(bundle.tree_sha256, read[0])
        try:
            found = build_minibatches(
                bundle,
                tree,
                setup.objective.columns,
                vocab_size=setup.model.vocab_size,
                num_minibatches=setup.config.optimizer.num_minibatches,
            )
            if needs_whole_trajectories(setup.objective):
                for step in found:
                    check_whole_trajectories(step, setup.config.objective.name)
            steps += found
        except HartsError as error:
            file = tree_path if isinstance(error, DataError) else path
            raise type(error)(error.what, where=at_file(error.where, file), hint=error.hint) from None
    return steps, tuple(sha256_file(path / MANIFEST) for path in options.plans)


def _build_trainer(setup: _Setup, plans: tuple[str, ...], job: Job) -> tuple[Trainer, dict[str, Tensor]]:
    """The model with its weights, the optimizer with its state; and the weights that the model ignores."""
    from harts_core.exec.blocks import CacheSettings
    from harts_core.exec.checkpoint import check_files, falling_back, state_in_run
    from harts_core.exec.checkpoint_tensors import restore_optimizer
    from harts_core.exec.model.moe_losses import RouterTerms
    from harts_core.exec.trainer import Trainer

    runtime = setup.config.runtime
    with falling_back(setup.resume_from):
        state = None if setup.resume_from is None else state_in_run(setup.resume_from)
        if state is not None and (state.seed, state.dtype) != (runtime.seed, runtime.dtype):
            raise CorruptFileError(
                f"the checkpoint is of seed {state.seed} in {state.dtype}, not of this run",
                where=str(setup.resume_from),
            )
    if state is not None and state.plans != plans:
        raise InvalidPlanError(
            "the plans are not those of the run",
            where=str(setup.resume_from),
            hint="resume with the same plans in the same order",
        )
    with falling_back(setup.resume_from):
        if setup.weights is not None:
            job.ranks.at("checking the files of the checkpoint")
            check_files(setup.weights.path, job)
        job.ranks.at("loading the model")
        model, extra_tensors = load_model(
            setup.model,
            setup.weights,
            runtime,
            job.spec,
            training=True,
            num_processes=setup.config.parallel.num_processes,
        )
        sharded = setup.config.parallel.shares_optimizer(runtime.dtype)
        optimizer = job.optimizer(model, setup.config.optimizer, sharded=sharded)
        if setup.resume_from is not None:
            restore_optimizer(setup.resume_from, optimizer, job.spec)
    terms = setup.config.objective
    trainer = Trainer(
        model,
        setup.objective,
        optimizer,
        router=RouterTerms(z_loss_coef=terms.router_z_loss_coef, balance_loss_coef=terms.balance_loss_coef),
        recompute=runtime.recompute,
        linear_calls=runtime.linear_calls,
        head_block_rows=runtime.head_block_rows,
        cache=CacheSettings.of(runtime),
        steps_done=0 if state is None else state.step,
        ranks=job.ranks,
    )
    return trainer, extra_tensors


def _open_run(out: Path, resolved: dict[str, Any], steps_done: int) -> MetricsLog:
    """Make the run folder with its configuration, or tidy it up to go on; return its log."""
    from harts_core.exec.checkpoint import remove_debris
    from harts_core.exec.metrics import MetricsLog

    text = json.dumps(resolved, indent=2, sort_keys=True) + "\n"
    if (out / CONFIG).is_file():
        with atomic_file(out / CONFIG) as temporary:
            temporary.write_text(text, encoding="utf-8")
    else:  # appears complete, so that a job killed here can be resumed
        with atomic_directory(out) as folder:
            (folder / CONFIG).write_text(text, encoding="utf-8")
            (folder / CHECKPOINTS).mkdir()
    remove_debris(out / CHECKPOINTS)
    return MetricsLog(out / METRICS, after_step=steps_done)


def _read_resolved(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise CorruptFileError(f"not JSON ({error})", where=str(file)) from error
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise CorruptFileError("not the configuration of a run", where=str(file))
    return values
