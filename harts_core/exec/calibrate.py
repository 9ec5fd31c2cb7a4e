"""Time real units of a model on the device at hand and fit a cost model to them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harts_core.errors import ConfigError, DataError, ExecError
from harts_core.exec.config import RuntimeSection, read_config
from harts_core.exec.load_model import check_backend, load_model
from harts_core.exec.model_section import resolve_model_config
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
    from harts_core.exec.model.decoder import HybridModel

PHASE = "units"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What to time, and where to write.

    Attributes:
        config: train.toml; its ``[model]`` and ``[runtime]`` are used.
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
        timings: the units, in the order of the residuals.
        forward, backward: fits, in seconds.
    """

    output: str
    device: str
    dtype: str
    recompute: str
    timings: tuple[UnitTiming, ...]
    forward: CostFit
    backward: CostFit


def calibrate_run(options: CalibrateOptions, progress: Progress = no_progress) -> Calibration:
    """Time the decoder of the configured model, with initial weights, and write the fitted cost model.

    The head is not timed: its work is the same in every plan.

    Args:
        options: what to do.
        progress: told about the units.

    Raises:
        ConfigError: the configuration is wrong or names no model.
        DataError: the output cannot be written there.
        MissingBackendError: torch or the asked-for device is absent.
        ExecError: a unit does not fit the device's memory.
    """
    config = read_config(options.config)
    model_config = resolve_model_config(config.model, where=str(options.config))
    if model_config.vocab_size < ROWS:
        raise ConfigError(f"[model] vocab_size must be at least {ROWS}", where=str(options.config))
    if options.out.is_dir():
        raise DataError("the output is a folder", where=str(options.out))
    check_parent(options.out)
    refuse_inputs(options.out, [options.config])
    check_backend(config.runtime, "calibration")
    from harts_core.exec.layout import build_unit_layout

    model, _ = load_model(model_config, None, config.runtime)
    units = calibration_units(
        capacity=options.capacity, vocab_size=model_config.vocab_size, chunk=options.chunk
    )
    timings = []
    for done, unit in enumerate(units):
        progress(PHASE, done, len(units))
        layout = build_unit_layout(unit.bundle, unit.tree, 0)
        timings.append(_time_unit(model, unit, layout, config.runtime, options.repeats))
    progress(PHASE, len(units), len(units))
    forward, backward = fit_costs(timings)
    calibration = Calibration(
        output=str(options.out),
        device=_device_name(config.runtime),
        dtype=config.runtime.dtype,
        recompute=config.runtime.recompute,
        timings=tuple(timings),
        forward=forward,
        backward=backward,
    )
    comment = (
        f"seconds on {calibration.device}, {calibration.dtype}, units of up to {options.capacity} tokens; "
        f"R2 {forward.r_squared:.4f} forward, {backward.r_squared:.4f} backward"
    )
    with atomic_file(options.out) as temporary:
        text = cost_model_text(cost_model_of(options.out.stem, forward, backward), comment)
        temporary.write_text(text, encoding="utf-8")
    return calibration


def _time_unit(
    model: HybridModel, unit: CalibrationUnit, layout: UnitLayout, runtime: RuntimeSection, repeats: int
) -> UnitTiming:
    """The fastest forward and the fastest backward of a unit."""
    import torch

    try:
        runs = [_time_once(model, layout, runtime) for _ in range(1 + repeats)][1:]
    except torch.OutOfMemoryError as error:
        raise ExecError(
            f"a unit of {unit.tokens} tokens does not fit the device's memory", hint="lower --capacity"
        ) from error
    return UnitTiming(
        shape=unit.shape,
        tokens=unit.tokens,
        pairs=unit.pairs,
        backward_pairs=unit.backward_pairs,
        forward_s=min(forward for forward, _ in runs),
        backward_s=min(backward for _, backward in runs),
    )


def _time_once(model: HybridModel, layout: UnitLayout, runtime: RuntimeSection) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    import torch

    from harts_core.exec.unit import unit_hidden

    def clock() -> float:
        if runtime.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    model.zero_grad(set_to_none=True)
    layout.to(model.device)
    start = clock()
    hidden = unit_hidden(model, layout, recompute=runtime.recompute)
    middle = clock()
    torch.autograd.backward(hidden, torch.ones_like(hidden))
    return middle - start, clock() - middle


def _device_name(runtime: RuntimeSection) -> str:
    import torch

    if runtime.device == "cuda":
        return f"cuda ({torch.cuda.get_device_name()})"
    return f"cpu ({torch.get_num_threads()} threads)"
