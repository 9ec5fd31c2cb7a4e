"""Planners side by side on one rollout tree: what each reaches, what is possible, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harts_core.errors import ConfigError, HartsError, InfeasiblePlanError, MissingBackendError
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cache_policy.report import memory_report
from harts_core.plan.cache_policy.rows import TOKENS, RowBytes
from harts_core.plan.cache_policy.whole_blocks import whole_block_tokens
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS
from harts_core.plan.work import WorkReport, work_report
from harts_core.progress import Progress, no_progress
from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.rollout_tree import RolloutTree

PLANS = "plans"
BOUNDED = {
    "within_compression": "bound_within",
    "decoder_compression": "bound_decoder",
    "effective_compression": "bound_decoder",
}
"""Metrics that have an upper bound, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """A plan's cache in blocks of one kind, freed after their last use.

    Attributes:
        block_tokens: their fixed size; None: adaptive.
        peak: the most on a replica at once, in the comparison's unit.
        allocated: of all blocks, on all replicas.
        hit_rate: share of the imported tokens that are in whole shared blocks.
        copied_tokens: stored once more than needed, so that blocks can be shared.
        computed_tokens: what the step computes if nothing is copied: all sharing, inside microbatches too, in
            whole blocks only.
        decoder_compression: original tokens over those.
    """

    block_tokens: int | None
    peak: int
    allocated: int
    hit_rate: float
    copied_tokens: int
    computed_tokens: int
    decoder_compression: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """What a plan keeps between units, in training without recomputation.

    Attributes:
        release_saving: 1 − the adaptive blocks' peak / their peak if nothing is freed before the step ends.
        blocks: adaptive ones, then those of each fixed size.
    """

    release_saving: float
    blocks: tuple[BlockResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """One planner in one setting.

    Attributes:
        planner, dp, seed: the setting.
        metrics: of its plan, which the validator accepted, as in plan.json; None: there is no plan.
        gaps: metric to 1 − value / bound, for the compressions that have a bound; None likewise.
        work: how even its estimated work is; None likewise.
        cache: what it keeps between units; None likewise.
        planning_s: seconds for placement, call plan, metrics and validation; None likewise.
        failure: why there is no plan; None if there is one.
    """

    planner: str
    dp: int
    seed: int
    metrics: dict[str, int | float] | None
    gaps: dict[str, float] | None
    work: WorkReport | None
    cache: CacheResult | None
    planning_s: float | None
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Planners on one tree.

    Attributes:
        tree_sha256: of the tree's content.
        rows: trajectories of the tree.
        capacity: T.
        cache_unit: of the caches' sizes: ``bytes``, or ``tokens``: one for a token's values, one for its
            gradient.
        results: by replicas, then planner, then seed, in the order asked for.
    """

    tree_sha256: str
    rows: int
    capacity: int
    cache_unit: str
    results: tuple[PlannerResult, ...]

    @property
    def num_plans(self) -> int:
        """How many of the results have a plan."""
        return sum(result.failure is None for result in self.results)


def compare_planners(
    tree: RolloutTree,
    *,
    planners: Sequence[str],
    dp: Sequence[int],
    seeds: Sequence[int],
    options: PlanOptions,
    block_tokens: Sequence[int] = (),
    row_bytes: RowBytes = TOKENS,
    progress: Progress = no_progress,
) -> Comparison:
    """Plan a tree with every planner, number of replicas and seed.

    A planner that finds no plan, or lacks its optional package, gives a result with the reason. Each planner
    plans a toy tree first, so that no time includes loading compiled code.

    Args:
        tree: the rollout tree.
        planners: names in ``harts_core.plan.planners.PLANNERS``.
        dp: numbers of replicas.
        seeds: of randomised searches.
        options: everything else; its planner, dp and seed are replaced.
        block_tokens: fixed block sizes to compare the adaptive cache blocks with.
        row_bytes: sizes of what units keep for others; ``TOKENS`` counts tokens.
        progress: told about the plans.

    Raises:
        ConfigError: no such planner, a value out of range, or nothing to compare.
        InvalidPlanError: a planner broke a rule (a bug).
    """
    unknown = [name for name in planners if name not in PLANNERS]
    if unknown:
        raise ConfigError(f"no such planner: {unknown[0]}", hint=f"one of {', '.join(PLANNERS)}")
    if not (planners and dp and seeds):
        raise ConfigError("name at least one planner, one number of replicas and one seed")
    if any(size < 1 for size in block_tokens):
        raise ConfigError(f"a block holds at least one token, not {min(block_tokens)}")
    sizes = tuple(dict.fromkeys(block_tokens))
    settings = [
        replace(options, planner=planner, dp=replicas, seed=seed)
        for replicas in dict.fromkeys(dp)
        for planner in dict.fromkeys(planners)
        for seed in dict.fromkeys(seeds)
    ]
    for planner in dict.fromkeys(planners):
        _warm_up(replace(options, planner=planner, dp=2, capacity=40))
    results = []
    for done, setting in enumerate(settings):
        progress(PLANS, done, len(settings))
        results.append(_result(tree, setting, sizes, row_bytes))
    progress(PLANS, len(settings), len(settings))
    return Comparison(
        tree_sha256=tree.content_sha256,
        rows=tree.num_rows,
        capacity=options.capacity,
        cache_unit="tokens" if row_bytes == TOKENS else "bytes",
        results=tuple(results),
    )


def medians(results: Sequence[PlannerResult]) -> tuple[dict[str, float], float] | None:
    """(metrics, planning seconds): medians over the results that have a plan; None if none has.

    The gaps are among the metrics, as ``gap_within_compression`` and so on.
    """
    metrics = [
        r.metrics | {f"gap_{k}": v for k, v in r.gaps.items()} for r in results if r.metrics and r.gaps
    ]
    if not metrics:
        return None
    seconds = [r.planning_s for r in results if r.planning_s is not None]
    middle = {name: statistics.median(m[name] for m in metrics) for name in metrics[0]}
    return middle, statistics.median(seconds)


def _result(
    tree: RolloutTree, options: PlanOptions, block_tokens: Sequence[int], row_bytes: RowBytes
) -> PlannerResult:
    try:
        bundle = plan_tree(tree, options)
    except (InfeasiblePlanError, MissingBackendError) as error:
        return PlannerResult(
            planner=options.planner,
            dp=options.dp,
            seed=options.seed,
            metrics=None,
            gaps=None,
            work=None,
            cache=None,
            planning_s=None,
            failure=_reason(error),
        )
    metrics: dict[str, Any] = bundle.metrics
    return PlannerResult(
        planner=options.planner,
        dp=options.dp,
        seed=options.seed,
        metrics=metrics,
        gaps={name: 1 - metrics[name] / metrics[bound] for name, bound in BOUNDED.items()},
        work=work_report(bundle),
        cache=cache_result(bundle, tree, block_tokens=block_tokens, row_bytes=row_bytes),
        planning_s=bundle.runtime["planning_s"],
        failure=None,
    )


def cache_result(
    bundle: PlanBundle, tree: RolloutTree, *, block_tokens: Sequence[int], row_bytes: RowBytes = TOKENS
) -> CacheResult:
    """Simulate a plan's cache in adaptive blocks and in blocks of fixed sizes.

    Args:
        bundle: a valid plan.
        tree: its rollout tree.
        block_tokens: the fixed sizes.
        row_bytes: sizes of the rows; ``TOKENS`` counts tokens.
    """
    report = memory_report(bundle, row_bytes=row_bytes, tree=tree, fixed_sizes=block_tokens)
    adaptive = next(p for p in report.policies if p.policy == "just-in-time" and p.block_tokens is None)
    blocks = []
    for policy in (adaptive, *(p for p in report.policies if p.block_tokens is not None)):
        computed = whole_block_tokens(bundle, policy.block_tokens or 1)
        blocks.append(
            BlockResult(
                block_tokens=policy.block_tokens,
                peak=policy.peak,
                allocated=policy.allocated,
                hit_rate=policy.hit_rate,
                copied_tokens=policy.copied_tokens,
                computed_tokens=computed,
                decoder_compression=bundle.metrics["original_tokens"] / computed,
            )
        )
    return CacheResult(release_saving=report.release_saving, blocks=tuple(blocks))


def _reason(error: HartsError) -> str:
    return "; ".join(filter(None, (error.what, error.where, error.hint)))


def _warm_up(options: PlanOptions) -> None:
    """Plan a toy tree, to load what the planner has compiled."""
    tree = build_tree(
        Trajectory(
            trajectory_id=str(i),
            group_id=str(i % 2),
            tokens=np.array([i % 2, *range(i), i]),
            loss_spans=np.array([[1, 2]]),
        )
        for i in range(12)
    )
    _result(tree, options, (), TOKENS)
