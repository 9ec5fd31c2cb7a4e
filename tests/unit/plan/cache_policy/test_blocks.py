"""Blocks and their lifetimes against bookkeeping token by token, where a token is its whole prefix."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.plan.cache_policy.blocks import Block, CacheBlocks, cache_blocks
from harts_core.plan.cache_policy.rows import CONV_CONTEXT, TOKENS, point_rows
from harts_core.plan.cache_policy.simulate import CacheRun, simulate
from harts_core.plan.cache_policy.trace import CacheTrace, block_sizes, cache_trace
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.trees.rollout_tree import RolloutTree
from tests.support_train import random_tree
from tests.support_windows import chain_bundle, nested_bundle, window_bundle

TREE = random_tree(3, num_rows=16, max_extend=30)
PLANS = {
    "chain": chain_bundle(TREE, units=6, chunk=4),
    "nested": nested_bundle(TREE, dp=1, slots=5, levels=2, chunk=4, seed=3),
    "window": window_bundle(TREE, chunk=4, consumers=3, seed=1),
    "replicas": nested_bundle(TREE, dp=2, slots=3, levels=2, chunk=4, seed=2),
}
SIZES = (1, 2, 3, 16, 64)
Token = tuple[int, ...]


@dataclass
class Reads:
    """What one unit imports and computes, as sets of prefixes."""

    imported: set[Token] = field(default_factory=set)
    computed: set[Token] = field(default_factory=set)


def span_tokens(bundle: PlanBundle, tree: RolloutTree, line: int, start: int, stop: int) -> list[Token]:
    path = tree.tokens(int(bundle.spans.row[line]), 0, stop).tolist()
    return [tuple(path[: i + 1]) for i in range(start, stop)]


def naive_reads(bundle: PlanBundle, tree: RolloutTree) -> tuple[dict[int, Reads], dict[Token, int]]:
    reads = {u: Reads() for u in range(bundle.num_units)}
    owner: dict[Token, int] = {}
    s = bundle.spans
    for line in range(len(s)):
        unit = int(s.unit[line])
        tokens = span_tokens(bundle, tree, line, int(s.start[line]), int(s.stop[line]))
        mine = s.owner[line] == unit
        (reads[unit].computed if mine else reads[unit].imported).update(tokens)
        if mine and bundle.dp == 1:
            owner |= dict.fromkeys(tokens, unit)
    return reads, owner


def block_tokens(bundle: PlanBundle, block: Block) -> list[Token]:
    return [t for run in block.runs for t in span_tokens(bundle, TREE, *run)]


def run_of(bundle: PlanBundle, blocks: CacheBlocks, *, training: bool) -> tuple[CacheTrace, CacheRun]:
    units = np.lexsort((bundle.units.order, bundle.units.replica)).tolist()
    events = unit_events(unit_links(bundle), units, training=training)
    trace = cache_trace(blocks, block_sizes(bundle, blocks, TOKENS, None), events)
    return trace, simulate(trace)


@pytest.mark.parametrize("plan", PLANS)
def test_adaptive_blocks_are_the_reusable_spans(plan: str) -> None:
    bundle = PLANS[plan]
    reads, _ = naive_reads(bundle, TREE)
    blocks = cache_blocks(bundle)
    held: dict[tuple[int, Token], tuple[int, ...]] = {}
    for block in blocks.blocks:
        assert block.allocated_tokens == block.own_tokens
        for token in block_tokens(bundle, block):
            assert (block.owner, token) not in held
            held[block.owner, token] = block.readers
    for unit, found in reads.items():
        mine = {t for (_, t), readers in held.items() if unit in readers}
        assert mine == found.imported
    assert blocks.cached_tokens == len(held)
    assert blocks.imported_tokens == sum(len(r.imported) for r in reads.values())
    assert blocks.copied_tokens == blocks.recomputed_tokens == blocks.fragmentation == 0
    by_end = {(b.runs[-1][0], b.runs[-1][2]): b for b in blocks.blocks}
    for block in blocks.blocks:  # none could be longer
        before = by_end.get((block.runs[0][0], block.runs[0][1]))
        assert before is None or (before.readers, before.keys) != (block.readers, block.keys)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_fixed_blocks_hold_what_every_reader_imports(plan: str, size: int) -> None:
    bundle = PLANS[plan]
    reads, _ = naive_reads(bundle, TREE)
    blocks = cache_blocks(bundle, size)
    stored: list[tuple[int, Token]] = []
    seen: dict[int, set[Token]] = {u: set() for u in reads}
    for block in blocks.blocks:
        tokens = block_tokens(bundle, block)
        first, last = len(tokens[0]) - 1, len(tokens[-1]) - 1
        assert all(b[: len(a)] == a and len(b) == len(a) + 1 for a, b in itertools.pairwise(tokens))
        assert block.copied_tokens == first % size
        assert last // size - first // size + 1 == block.num_blocks
        assert block.num_blocks == 1 or block.own_tokens == block.allocated_tokens
        assert block.allocated_tokens == block.num_blocks * size
        stored += [(block.owner, t) for t in tokens]
        for unit in block.readers:
            seen[unit].update(tokens)
    for unit, found in reads.items():
        assert found.imported <= seen[unit]
    copied_in = sum(b.copied_tokens for b in blocks.blocks)
    assert blocks.copied_tokens == copied_in + len(stored) - len(set(stored))
    assert blocks.cached_tokens == len(set(stored)) == cache_blocks(bundle).cached_tokens
    assert (size > 1) or blocks.copied_tokens == blocks.recomputed_tokens == blocks.fragmentation == 0
    assert blocks.recomputed_tokens == sum(len(naive_partial(r, size)) for r in reads.values())


def naive_partial(reads: Reads, size: int) -> set[Token]:
    everything = reads.imported | reads.computed
    left = set()
    for token in reads.imported:
        children = {t for t in everything if len(t) == len(token) + 1 and t[:-1] == token}
        if not children or children & reads.computed:
            stop = len(token)
            left |= {token[:n] for n in range(stop // size * size + 1, stop + 1)}
    return left


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("plan", ["chain", "nested", "window"])
def test_lifetimes(plan: str, training: bool) -> None:
    """Just-in-time: a token is held from its owner's forward to its last reader's, its gradient after."""
    bundle = PLANS[plan]
    reads, owner = naive_reads(bundle, TREE)
    trace, run = run_of(bundle, cache_blocks(bundle), training=training)
    at = {(e.kind, e.unit): i for i, e in enumerate(trace.passes)}
    live = np.zeros(len(trace.passes), np.int64)
    attended = naive_attended(bundle)
    for token, unit in owner.items():
        readers = [u for u, r in reads.items() if token in r.imported]
        if not any((u, token) in attended for u in readers):
            continue
        live[at["forward", unit] : max(at["forward", u] for u in readers) + 1] += 1
        if training:
            live[min(at["backward", u] for u in readers) : at["backward", unit] + 1] += 1
    assert list(run.resident_bytes) == live.tolist()
    assert run.counters.peak_bytes == live.max() > 0
    assert run.counters.hit_rate == 1


def naive_attended(bundle: PlanBundle) -> set[tuple[int, Token]]:
    """(unit, imported token) with a computed token of the unit below."""
    reads, _ = naive_reads(bundle, TREE)
    return {
        (u, t[:n])
        for u, r in reads.items()
        for t in r.computed
        for n in range(1, len(t))
        if t[:n] in r.imported
    }


@pytest.mark.parametrize("plan", PLANS)
def test_adaptive_is_never_above_a_fixed_size(plan: str) -> None:
    bundle = PLANS[plan]
    adaptive = cache_blocks(bundle)
    for training in (True, False):
        trace, run = run_of(bundle, adaptive, training=training)
        kept = simulate(trace, release=False).counters.peak_bytes
        assert run.counters.peak_bytes <= kept == trace.total_bytes
        for size in SIZES:
            blocks = cache_blocks(bundle, size)
            _, fixed = run_of(bundle, blocks, training=training)
            pairs = zip(run.resident_bytes, fixed.resident_bytes, strict=True)
            assert all(a <= b for a, b in pairs)
            assert adaptive.copied_tokens <= blocks.copied_tokens
            if size == 1:
                assert run.resident_bytes == fixed.resident_bytes


@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_sequences(plan: str) -> None:
    """Convolution and replay rows, and states, by walking each sequence's path token by token."""
    bundle = PLANS[plan]
    s, offsets = bundle.spans, bundle.span_offsets
    want: dict[str, set[tuple[int, int]]] = {"conv": set(), "replay": set(), "states": set()}
    table = bundle.sequences
    for i in range(len(table)):
        unit = int(table.unit[i])
        line = int(offsets[unit]) + int(table.spans[i][0])
        path = []
        at = int(s.parent[line])
        while at != NONE:
            above = int(offsets[unit]) + at
            source = int(offsets[s.owner[above]]) + int(s.owner_span[above])
            path += [(source, p, int(s.owner[above])) for p in range(s.start[above], s.stop[above])]
            at = int(s.parent[above])
        start = int(s.start[line])
        for source, p, owner in path:
            if owner != unit and p >= start - CONV_CONTEXT:
                want["conv"].add((source, p))
            if owner != unit and p >= table.replay_start[i]:
                want["replay"].add((source, p))
        if table.state_unit[i] not in (NONE, unit):
            source = int(offsets[table.state_unit[i]]) + int(table.state_span[i])
            want["states"].add((source, int(table.state_position[i]) - 1))
    found = point_rows(bundle, None)
    for name, tokens in want.items():
        codes = found[name].tolist()  # type: ignore[index]
        assert codes == sorted(codes)
        assert {(code >> 32, code & 0xFFFFFFFF) for code in codes} == tokens
    assert len(found["hidden"]) == 0
