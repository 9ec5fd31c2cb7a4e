"""Time real units of a model on the device at hand and fit a cost model to them.

In a job of many processes every rank runs the same units on its part of the model at the same time, as the
replicas of a plan do. A stage of a pipeline takes as long as its slowest rank; a unit's seconds are the sum
over the stages, as a plan's costs are those of the whole model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harts_core.errors import ConfigError, DataError, ExecError
from harts_core.exec.config import RuntimeSection, TrainConfig
from harts_core.exec.load_model import check_backend, load_model
from harts_core.exec.model_section import resolve_model_config
from harts_core.exec.parallel.degrees import check_model_degrees, read_job_config
from harts_core.files import atomic_file, check_parent, refuse_inputs
from harts_core.plan.calibration import (
    LEAST_TOKENS,
    ROWS,
    CalibrationUnit,
    CostFit,
    UnitTiming,
    calibration_units,
    cost_model_of,
    cost_model_text,
    fit_costs,
)
from harts_core.progress import Progress, no_progress

if TYPE_CHECKING:
    from harts_core.exec.layout import UnitLayout
    from harts_core.exec.model.config import ModelConfig
    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.parallel.job import Job

Float64 = npt.NDArray[np.float64]
PHASE = "units"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What to time, and where to write.

    Attributes:
        config: train.toml; its ``[model]``, ``[runtime]`` and ``[parallel]`` are used.
        out: the cost-model file.
        capacity: tokens of the largest unit.
        repeats: timed runs of every unit, after one that is not timed; the fastest counts.
        chunk: B.
    """

    config: Path
    out: Path
    capacity: int = 2048
    repeats: int = 3
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.capacity < LEAST_TOKENS:
            raise ConfigError(f"capacity must be at least {LEAST_TOKENS}, not {self.capacity}")
        for name in ("repeats", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be a positive integer, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibrated cost model and what it was fitted to.

    Attributes:
        output: the file written.
        device: type and, for a GPU, name.
        dtype, recompute: as configured.
        dp, tp, pp, ep: the parallel degrees that were timed.
        timings: the units, in the order of the residuals.
        forward, backward: fits, in seconds.
    """

    output: str
    device: str
    dtype: str
    recompute: str
    dp: int
    tp: int
    pp: int
    ep: int
    timings: tuple[UnitTiming, ...]
    forward: CostFit
    backward: CostFit


def calibrate_run(options: CalibrateOptions, progress: Progress = no_progress) -> Calibration | None:
    """Time the decoder of the configured model, with initial weights, and write the fitted cost model.

    The head is not timed: its work is the same in every plan.

    Args:
        options: what to do. Every process of a job calls this with the same; the first writes the file.
        progress: told about the units, in the first process.

    Returns:
        The calibration; None in the other processes of a job.

    Raises:
        ConfigError: the configuration is wrong or names no model.
        DataError: the output cannot be written there.
        MissingBackendError: torch or the asked-for device is absent.
        ExecError: a unit does not fit the device's memory, the times do not grow with the units, or another
            process of the job died or hangs.
    """
    where = str(options.config)
    config, launch = read_job_config(options.config)
    model_config = resolve_model_config(config.model, where=where)
    check_model_degrees(config.parallel, model_config, where)
    if model_config.vocab_size < ROWS:
        raise ConfigError(f"[model] vocab_size must be at least {ROWS}", where=where)
    if options.out.is_dir():
        raise DataError("the output is a folder", where=str(options.out))
    check_parent(options.out)
    refuse_inputs(options.out, [options.config])
    check_backend(config.runtime, "calibration")
    from harts_core.exec.parallel.job import join_job

    with join_job(config.parallel, launch, config.runtime.device) as job:
        timings = _time_units(options, config, model_config, job, progress if job.is_main else no_progress)
    return _write(options, config, timings) if launch.is_main else None


def _time_units(
    options: CalibrateOptions, config: TrainConfig, model_config: ModelConfig, job: Job, progress: Progress
) -> list[UnitTiming]:
    """The same on every rank of the job."""
    from harts_core.exec.layout import build_unit_layout

    model, _ = load_model(
        model_config,
        None,
        config.runtime,
        job.spec,
        num_processes=config.parallel.num_processes,
    )
    units = calibration_units(
        capacity=options.capacity, vocab_size=model_config.vocab_size, chunk=options.chunk
    )
    timings = []
    for done, unit in enumerate(units):
        progress(PHASE, done, len(units))
        job.ranks.at(f"unit {done} of {unit.tokens} tokens")
        layout = build_unit_layout(unit.bundle, unit.tree, 0, linear_calls=config.runtime.linear_calls)
        timings.append(_time_unit(model, unit, layout, config.runtime, options.repeats, job))
    progress(PHASE, len(units), len(units))
    return timings


def _write(options: CalibrateOptions, config: TrainConfig, timings: list[UnitTiming]) -> Calibration:
    """Fit, write the cost model, and report."""
    runtime, parallel = config.runtime, config.parallel
    forward, backward = fit_costs(timings)
    for name, fit in (("forward", forward), ("backward", backward)):
        if not fit.alpha and not fit.beta:
            raise ExecError(
                f"the {name} times of the units do not grow with their tokens",
                hint="raise --capacity, or --repeats on a busy machine",
            )
    calibration = Calibration(
        output=str(options.out),
        device=_device_name(runtime),
        dtype=runtime.dtype,
        recompute=runtime.recompute,
        dp=parallel.dp,
        tp=parallel.tp,
        pp=parallel.pp,
        ep=parallel.ep,
        timings=tuple(timings),
        forward=forward,
        backward=backward,
    )
    degrees = f"dp {parallel.dp} tp {parallel.tp} pp {parallel.pp} ep {parallel.ep}, "
    comment = (
        f"seconds on {calibration.device}, {degrees if parallel.num_processes > 1 else ''}"
        f"{calibration.dtype}, units of up to {options.capacity} tokens; "
        f"R2 {forward.r_squared:.4f} forward, {backward.r_squared:.4f} backward"
    )
    with atomic_file(options.out) as temporary:
        text = cost_model_text(cost_model_of(options.out.stem, forward, backward), comment)
        temporary.write_text(text, encoding="utf-8")
    return calibration


def _time_unit(
    model: HybridModel,
    unit: CalibrationUnit,
    layout: UnitLayout,
    runtime: RuntimeSection,
    repeats: int,
    job: Job,
) -> UnitTiming:
    """The fastest forward and the fastest backward of a unit."""
    import torch

    try:
        runs = [_time_once(model, layout, runtime, job) for _ in range(1 + repeats)][1:]
    except torch.OutOfMemoryError as error:
        raise ExecError(
            f"a unit of {unit.tokens} tokens does not fit the device's memory", hint="lower --capacity"
        ) from error
    forward_s, backward_s = np.min(_of_job(runs, job), axis=0).tolist()
    return unit.timed(forward_s=forward_s, backward_s=backward_s)


def _time_once(
    model: HybridModel, layout: UnitLayout, runtime: RuntimeSection, job: Job
) -> tuple[float, float]:
    """Seconds of one forward and one backward on this rank; the ranks start together."""
    import torch

    def clock() -> float:
        if runtime.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    model.zero_grad(set_to_none=True)
    device = layout.to(model.device)
    received = None
    if not model.spec.stage.is_first:
        tokens = model.spec.local_rows(device.tokens)
        received = torch.randn(
            len(tokens), model.config.hidden_size, dtype=model.dtype, device=model.device, requires_grad=True
        )
    job.wait()
    start = clock()
    hidden = model(device, recompute=runtime.recompute, received=received).hidden
    middle = clock()
    torch.autograd.backward(hidden, torch.ones_like(hidden))
    return middle - start, clock() - middle


def _of_job(runs: list[tuple[float, float]], job: Job) -> Float64:
    """[runs, 2], the seconds of each run on the whole job."""
    num_stages = 1 if job.groups is None else job.groups.stage.count
    return over_stages(np.array(job.gather(runs)), num_stages)


def over_stages(ranks: Float64, num_stages: int) -> Float64:
    """Seconds [ranks, …] → […]: of each pipeline stage its slowest rank, summed over the stages.

    Args:
        ranks: in rank order, which is stage by stage.
        num_stages: P.
    """
    seconds: Float64 = ranks.reshape(num_stages, -1, *ranks.shape[1:]).max(axis=1).sum(axis=0)
    return seconds


def _device_name(runtime: RuntimeSection) -> str:
    import torch

    if runtime.device == "cuda":
        return f"cuda ({torch.cuda.get_device_name()})"
    return f"cpu ({torch.get_num_threads()} threads)"
