"""The cache of a plan under different policies, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.plan.cache_policy.blocks import CacheBlocks, cache_blocks
from harts_core.plan.cache_policy.rows import TOKENS, RowBytes
from harts_core.plan.cache_policy.simulate import CacheRun, Eviction, simulate
from harts_core.plan.cache_policy.trace import CacheTrace, block_sizes, cache_trace
from harts_core.plan.recompute import Recompute, recomputes_layers
from harts_core.plan.report import check_references
from harts_core.plan.schedule.second_forwards import peak_graphs, with_second_forwards
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.plan.validate.failure import require
from harts_core.trees.rollout_tree import RolloutTree

FIXED_SIZES = (1, 16, 32, 128, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """One policy. Sizes are in the report's unit; sums over the replicas, peaks of the worst one.

    Attributes:
        policy: ``just-in-time``, ``no-release``, ``farthest`` or ``lru`` (both under the budget).
        block_tokens: the fixed block size; None: adaptive.
        budget: on a replica; None: no limit.
        blocks: blocks made.
        allocated: of all values and gradients.
        peak: the most on a replica at once.
        mean: mean over the passes of the replica that is shown.
        hit_rate: share of the imported tokens that are in whole shared blocks.
        in_time_rate: share of what passes read that they found in fast memory.
        copied_tokens: stored once more than needed.
        recomputed_tokens: to be computed again if they are not copied.
        fragmentation: share of the allocated tokens that hold no token, or one once more than needed.
        offloaded: moved out to the host.
        over_budget: the most by which one pass needs more than the budget.
        timeline: in fast memory during each pass of the replica that is shown.
    """

    policy: str
    block_tokens: int | None
    budget: int | None
    blocks: int
    allocated: int
    peak: int
    mean: float
    hit_rate: float
    in_time_rate: float
    copied_tokens: int
    recomputed_tokens: int
    fragmentation: float
    offloaded: int
    over_budget: int
    timeline: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The cache of a plan.

    Attributes:
        planner: of the plan.
        unit: ``bytes``, or ``tokens``: one for a token's values, one for its gradient.
        forward_only: whether there are no backwards.
        recompute: activations that are computed again.
        activation_tokens: the most padded tokens on a replica whose graphs are alive at once.
        replica: the one that is shown, with the highest adaptive peak.
        passes: its forwards, second forwards and backwards: ``F``, ``R`` or ``B`` and the unit.
        imported_tokens: read of other units, counted for every reader.
        cached_tokens: different ones.
        release_saving: 1 − the just-in-time peak / the peak without release.
        policies: the adaptive just-in-time one first.
    """

    planner: str
    unit: str
    forward_only: bool
    recompute: Recompute
    activation_tokens: int
    replica: int
    passes: tuple[str, ...]
    imported_tokens: int
    cached_tokens: int
    release_saving: float
    policies: tuple[PolicyReport, ...]


def memory_report(
    bundle: PlanBundle,
    *,
    row_bytes: RowBytes = TOKENS,
    tree: RolloutTree | None = None,
    budget: int | None = None,
    recompute: Recompute = "none",
    forward_only: bool = False,
    fixed_sizes: Sequence[int] = FIXED_SIZES,
) -> MemoryReport:
    """Simulate the cache of every replica under all policies.

    Args:
        bundle: the plan.
        row_bytes: sizes of the rows; ``TOKENS`` counts tokens.
        tree: its rollout tree, for the final hidden states that heads read of other units; None: without.
        budget: of ``farthest`` and ``lru``, on a replica; None: half of the adaptive peak.
        recompute: activations that backwards compute again, for which they read the values again.
        forward_only: without backwards.
        fixed_sizes: block sizes to compare with.

    Raises:
        InvalidPlanError: the tables refer to things that do not exist.
    """
    check_references(bundle)
    _check_spans(bundle)
    links = unit_links(bundle)
    events = [
        with_second_forwards(
            unit_events(links, bundle.units_of_replica(d).tolist(), training=not forward_only), recompute
        )
        for d in range(bundle.dp)
    ]

    def traces(blocks: CacheBlocks) -> list[CacheTrace]:
        sizes = block_sizes(bundle, blocks, row_bytes, tree)
        return [cache_trace(blocks, sizes, e, reread=recomputes_layers(recompute)) for e in events]

    adaptive = cache_blocks(bundle)
    exact = traces(adaptive)
    free = [simulate(t) for t in exact]
    shown = int(np.argmax([run.counters.peak_bytes for run in free]))
    limit = free[shown].counters.peak_bytes // 2 if budget is None else budget
    kept = [simulate(t, release=False) for t in exact]
    policies = [_policy("just-in-time", adaptive, free, shown), _policy("no-release", adaptive, kept, shown)]
    for size in fixed_sizes:
        blocks = cache_blocks(bundle, size)
        policies.append(_policy("just-in-time", blocks, [simulate(t) for t in traces(blocks)], shown))
    rules: tuple[Eviction, ...] = ("farthest", "lru")
    for rule in rules:
        runs = [simulate(t, budget=limit, eviction=rule) for t in exact]
        policies.append(_policy(rule, adaptive, runs, shown, budget=limit))
    most = policies[1].peak
    graphs = [0 if forward_only else peak_graphs(e, bundle.units.padded_tokens) for e in events]
    return MemoryReport(
        planner=bundle.planner,
        unit="tokens" if row_bytes == TOKENS else "bytes",
        forward_only=forward_only,
        recompute=recompute,
        activation_tokens=max(graphs),
        replica=shown,
        passes=tuple(f"{e.kind[0].upper()}{e.unit}" for e in exact[shown].passes),
        imported_tokens=adaptive.imported_tokens,
        cached_tokens=adaptive.cached_tokens,
        release_saving=1 - policies[0].peak / most if most else 0.0,
        policies=tuple(policies),
    )


def _policy(
    name: str, blocks: CacheBlocks, runs: list[CacheRun], shown: int, *, budget: int | None = None
) -> PolicyReport:
    counters = [run.counters for run in runs]
    hits, misses = sum(c.hit_bytes for c in counters), sum(c.miss_bytes for c in counters)
    imported = blocks.imported_tokens
    timeline = runs[shown].resident_bytes
    return PolicyReport(
        policy=name,
        block_tokens=blocks.block_tokens,
        budget=budget,
        blocks=blocks.num_blocks,
        allocated=sum(c.allocated_bytes for c in counters),
        peak=max(c.peak_bytes for c in counters),
        mean=sum(timeline) / len(timeline) if timeline else 0.0,
        hit_rate=1 - blocks.recomputed_tokens / imported if imported else 1.0,
        in_time_rate=hits / (hits + misses) if hits + misses else 1.0,
        copied_tokens=blocks.copied_tokens,
        recomputed_tokens=blocks.recomputed_tokens,
        fragmentation=blocks.fragmentation,
        offloaded=sum(c.offloaded_bytes for c in counters),
        over_budget=max(c.over_budget_bytes for c in counters),
        timeline=timeline,
    )


def _check_spans(bundle: PlanBundle) -> None:
    """What the blocks rely on beyond ``check_references``: parents, owners' spans, sources of states."""
    spans, table, counts = bundle.spans, bundle.sequences, np.diff(bundle.span_offsets)

    def span_line(i: int) -> str:
        return f"spans, line {i}"

    index = np.arange(len(spans)) - bundle.span_offsets[spans.unit]
    require(
        (spans.parent == NONE) | ((spans.parent >= 0) & (spans.parent < index)), "no such parent", span_line
    )
    owned = (spans.owner_span >= 0) & (spans.owner_span < counts[spans.owner])
    require(owned, "the owner has no such span", span_line)
    line = bundle.span_offsets[spans.owner] + spans.owner_span
    inside = (
        (spans.start[line] <= spans.start) & (spans.start < spans.stop) & (spans.stop <= spans.stop[line])
    )
    require(inside, "not inside its owner's span", span_line)
    source = table.state_unit
    exists = (source >= 0) & (source < bundle.num_units)
    span = np.where(exists, table.state_span, 0)
    exists &= (span >= 0) & (span < counts[np.where(exists, source, 0)])
    require((source == NONE) | exists, "no such state", lambda i: f"sequences, line {i}")
