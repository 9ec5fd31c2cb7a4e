"""Runs a plan's units on one CPU, worker after worker, and times each worker's part of the step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from harts_core.exec.blocks import CacheSettings
from harts_core.exec.head import unit_logprobs
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.windows import UnitExecutor, UnitForward
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cache_policy.simulate import CacheCounters
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.trees.rollout_tree import RolloutTree

Float64 = npt.NDArray[np.float64]
ADAPTIVE = CacheSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One way to run a step.

    Attributes:
        bundle: the plan.
        tree: its rollout tree.
        cache: how blocks are kept.
    """

    bundle: PlanBundle
    tree: RolloutTree
    cache: CacheSettings = ADAPTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """An executed step.

    Attributes:
        seconds: float64 [D], CPU seconds of each worker's forwards and backwards.
        cache: what each worker's blocks did.
    """

    seconds: Float64
    cache: tuple[CacheCounters, ...]


def run_step(model: HybridModel, step: Step) -> StepRun:
    """Every worker's units, forward and backward; the loss is the sum of the log-probabilities."""

    def loss(forward: UnitForward) -> Tensor | None:
        if not len(forward.layout.trained_row):
            return None
        return unit_logprobs(
            model, forward.hidden, forward.layout, imported_hidden=forward.imported_hidden
        ).sum()

    links = unit_links(step.bundle)
    seconds, counters = np.zeros(step.bundle.dp), []
    for worker in range(step.bundle.dp):
        events = unit_events(links, step.bundle.units_of_replica(worker).tolist())
        executor = UnitExecutor(model, step.bundle, step.tree, loss, events, links=links, cache=step.cache)
        start = time.process_time()
        for event in events:
            executor.run(event)
        seconds[worker] = time.process_time() - start
        counters.append(executor.counts.cache)
    model.zero_grad()
    return StepRun(seconds=seconds, cache=tuple(counters))


def alternate(model: HybridModel, steps: Mapping[str, Step], repeats: int) -> dict[str, list[StepRun]]:
    """All steps in turn, ``repeats`` times, so that what else the machine does meets all alike."""
    runs: dict[str, list[StepRun]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            runs[name].append(run_step(model, step))
    return runs
