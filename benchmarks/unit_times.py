"""Runs a plan's units on one CPU, the workers in turn, and times each worker's part of the step."""

from __future__ import annotations

import itertools
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
from harts_core.plan.recompute import Recompute
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
        recompute: activations to compute again.
    """

    bundle: PlanBundle
    tree: RolloutTree
    cache: CacheSettings = ADAPTIVE
    recompute: Recompute = "none"


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
    """Every worker's units, forward and backward; the loss is the sum of the log-probabilities.

    The workers take turns event by event, so that what else the machine does meets all alike.
    """

    def loss(forward: UnitForward) -> Tensor | None:
        if not len(forward.layout.trained_row):
            return None
        return unit_logprobs(
            model, forward.hidden, forward.layout, imported_hidden=forward.imported_hidden
        ).sum()

    bundle, links = step.bundle, unit_links(step.bundle)
    events = [unit_events(links, bundle.units_of_replica(d).tolist()) for d in range(bundle.dp)]
    workers = [
        UnitExecutor(
            model,
            bundle,
            step.tree,
            loss,
            mine,
            links=links,
            cache=step.cache,
            recompute=step.recompute,
        )
        for mine in events
    ]
    seconds = np.zeros(bundle.dp)
    for turn in itertools.zip_longest(*(worker.events for worker in workers)):
        for worker, event in enumerate(turn):
            if event is not None:
                start = time.process_time()
                workers[worker].run(event)
                seconds[worker] += time.process_time() - start
    model.zero_grad()
    return StepRun(seconds=seconds, cache=tuple(worker.counts.cache for worker in workers))


def alternate(model: HybridModel, steps: Mapping[str, Step], repeats: int) -> dict[str, list[StepRun]]:
    """All steps in turn, ``repeats`` times, every time from another one on.

    So what else the machine does, and what the step before leaves in caches, meets all alike.
    """
    runs: dict[str, list[StepRun]] = {name: [] for name in steps}
    names = list(steps)
    for repeat in range(repeats):
        first = repeat * len(names) // repeats
        for name in names[first:] + names[:first]:
            runs[name].append(run_step(model, steps[name]))
    return runs
