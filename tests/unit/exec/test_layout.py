"""Unit layouts against naive prefix bookkeeping."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from harts_core.errors import ExecError, InvalidPlanError
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.plan.bundle import PlanBundle
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences
from tests.support_model import simple_bundle
from tests.support_windows import window_bundle

Prefix = tuple[int, ...]


def forest(seed: int, rows: int = 14) -> RolloutTree:
    rng = np.random.default_rng(seed)
    return tree_from_sequences(random_sequences(rng, num_rows=rows, max_extend=12))


def prefixes(bundle: PlanBundle, tree: RolloutTree, layout: UnitLayout) -> dict[Prefix, int]:
    """Row of every own token of a unit that shares, by its token prefix."""
    found = {}
    for line in range(bundle.span_offsets[layout.unit], bundle.span_offsets[layout.unit + 1]):
        span = int(bundle.spans.span[line])
        if bundle.spans.owner[line] == layout.unit:
            tokens = tree.tokens(int(bundle.spans.row[line])).tolist()
            for p in range(bundle.spans.start[line], bundle.spans.stop[line]):
                found[tuple(tokens[: p + 1])] = layout.row_of(span, p)
    return found


def cases() -> list[tuple[PlanBundle, RolloutTree, UnitLayout]]:
    result = []
    for seed in range(12):
        tree = forest(seed)
        bundle = simple_bundle(tree, chunk=(1, 3, 4, 16)[seed % 4], units=1 + seed % 3, seed=seed)
        result += [(bundle, tree, build_unit_layout(bundle, tree, u)) for u in range(bundle.num_units)]
    return result


CASES = cases()


def test_the_format_example() -> None:
    """The second unit of the formats' tiny instance (B = 4), every array written out by hand."""
    tree = tree_from_sequences([[5, 5, 5, 5, 5, 3, 3, 3], [5, 5, 7, 7]], vocab=8)
    layout = build_unit_layout(simple_bundle(tree, chunk=4, units=1), tree, 0)
    assert layout.num_rows == 10
    # one sequence continues the root with row 2; the side branch 7 7 replays the two tokens before it
    assert layout.tokens.tolist() == [5, 5, 5, 5, 5, 3, 3, 3, 7, 7]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 2, 3]
    assert layout.occurrences.tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert layout.conv_ancestors[[0, 2, 8, 9]].tolist() == [[10, 10, 10], [10, 0, 1], [10, 0, 1], [0, 1, 8]]
    assert layout.packed_rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 8, 9]
    assert layout.packed_own.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]
    assert [entry.call.lengths for entry in layout.rounds] == [(8, 4)]
    assert [entry.initial_state.tolist() for entry in layout.rounds] == [[-1, -1]]
    assert [(s.start, s.stop, s.ancestors) for s in layout.attention] == [(0, 8, ()), (8, 10, ((0, 2),))]
    assert layout.head.rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert layout.head.labels.tolist() == [5, 5, 7, 5, 5, 3, 3, 3, 7]
    assert layout.trained_row.tolist() == [0] * 7 + [1] * 3
    assert layout.trained_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_tokens_positions_and_ancestors() -> None:
    for bundle, tree, layout in CASES:
        rows = prefixes(bundle, tree, layout)
        assert sorted(rows.values()) == list(range(layout.num_rows))
        for prefix, row in rows.items():
            assert (layout.tokens[row], layout.positions[row]) == (prefix[-1], len(prefix) - 1)
            ancestors = [rows[prefix[:-d]] if len(prefix) > d else layout.num_rows for d in (3, 2, 1)]
            assert layout.conv_ancestors[row].tolist() == ancestors


def test_attention_paths_and_replayed_rows() -> None:
    for bundle, tree, layout in CASES:
        rows = prefixes(bundle, tree, layout)
        prefix_of = {row: prefix for prefix, row in rows.items()}
        packed = iter(
            np.split(layout.packed_rows, np.cumsum([n for r in layout.rounds for n in r.call.lengths]))
        )
        covered = 0
        for span in layout.attention:
            first = prefix_of[span.start]
            path = [rows[first[:n]] for n in range(1, len(first))]
            assert [r for a, b in span.ancestors for r in range(a, b)] == path
            assert all(b != c for (_, b), (c, _) in zip(span.ancestors, span.ancestors[1:], strict=False))
            anchor = (len(first) - 1) // bundle.chunk * bundle.chunk
            assert next(packed).tolist() == path[anchor:] + list(range(span.start, span.stop))
            assert span.start == covered
            covered = span.stop
        assert covered == layout.num_rows
        assert layout.packed_rows[layout.packed_own].tolist() == list(range(layout.num_rows))


def test_states_come_from_the_right_prefix_of_an_earlier_round() -> None:
    """Follow every sequence's initial state back to the call that returns it, and compare token prefixes."""
    seen = 0
    for bundle, tree, layout in CASES:
        prefix_of = {row: prefix for prefix, row in prefixes(bundle, tree, layout).items()}
        returned: list[Prefix] = []
        sequences = iter(layout.attention)
        for entry in layout.rounds:
            mine = [next(sequences) for _ in entry.call.lengths]
            for span, slot in zip(mine, entry.initial_state.tolist(), strict=True):
                first = prefix_of[span.start]
                anchor = (len(first) - 1) // bundle.chunk * bundle.chunk
                assert (slot < 0) == (anchor == 0)
                if slot >= 0:
                    assert returned[slot] == first[:anchor]
                    seen += 1
            for n, c in entry.call.boundaries:
                last = prefix_of[mine[n].stop - 1]
                anchor = (
                    mine[n].stop - mine[n].start - entry.call.lengths[n] + layout.positions[mine[n].start]
                )
                returned.append(last[: anchor + c * bundle.chunk])
    assert seen > 40


def test_occurrences_and_log_probabilities() -> None:
    for bundle, tree, layout in CASES:
        rows = prefixes(bundle, tree, layout)
        mine = [int(r) for r in np.flatnonzero(bundle.assignments.unit == layout.unit)]
        counts: Counter[Prefix] = Counter()
        expected = []
        for row in bundle.assignments.row[mine].tolist():
            tokens = tuple(tree.tokens(row).tolist())
            counts.update(tokens[:n] for n in range(1, len(tokens) + 1))
            expected += [(row, i, rows[tokens[:t]], tokens[t]) for i, t in enumerate(range(1, len(tokens)))]
        assert {p: layout.occurrences[r] for p, r in rows.items()} == counts
        head = layout.head
        row_of_label = np.repeat(head.rows, np.diff(head.label_offsets))
        found = zip(
            layout.trained_row.tolist(),
            layout.trained_index.tolist(),
            row_of_label[head.trained_label].tolist(),
            head.labels[head.trained_label].tolist(),
            strict=True,
        )
        assert list(found) == expected
        assert len(set(zip(row_of_label.tolist(), head.labels.tolist(), strict=True))) == len(head.labels)
        assert len(head.labels) == len({(r, t) for _, _, r, t in expected})


def test_imports_name_the_owner_and_only_what_is_read() -> None:
    for seed in range(6):
        tree = forest(seed, rows=20)
        bundle = window_bundle(tree, chunk=4, consumers=2, seed=seed)
        layouts = [build_unit_layout(bundle, tree, u) for u in range(3)]
        held = prefixes(bundle, tree, layouts[0])
        for layout in layouts[1:]:
            own = prefixes(bundle, tree, layout)
            need = layout.imported
            token = [layouts[0].row_of(int(s), int(p)) for s, p in zip(need.span, need.position, strict=True)]
            prefix_of = {row: prefix for prefix, row in held.items()}
            names = {row: prefix for prefix, row in own.items()}
            keys = names | {layout.num_rows + i: prefix_of[token[j]] for i, j in enumerate(need.keys)}
            for span in layout.attention:
                first = names[span.start]
                path = [keys[r] for a, b in span.ancestors for r in range(a, b)]
                assert path == [first[:n] for n in range(1, len(first))]
            used = {r for span in layout.attention for a, b in span.ancestors for r in range(a, b)}
            assert sum(r >= layout.num_rows for r in used) == len(need.keys)
            hidden = names | {layout.num_rows + i: prefix_of[token[j]] for i, j in enumerate(need.hidden)}
            assert {len(hidden[r]) for r in layout.head.rows} or not len(layout.trained_row)
            assert set(need.states) <= set(layouts[0].state_slots)
            assert np.all(need.unit == 0)


def test_expanded_units_repeat_shared_tokens() -> None:
    tree = forest(1)
    bundle = simple_bundle(tree, sharing="none", chunk=4, units=1)
    layout = build_unit_layout(bundle, tree, 0)
    assert layout.num_rows == tree.original_tokens
    assert layout.occurrences.tolist() == [1] * layout.num_rows
    assert len(layout.rounds) == 1
    assert len(layout.packed_rows) == layout.num_rows


def test_other_cuts_into_calls_refuse_imports_and_run_by_depth_or_node() -> None:
    tree = forest(2)
    plain = simple_bundle(tree, chunk=4, units=1)
    layout = build_unit_layout(plain, tree, 0, linear_calls="no-replay")
    assert len(layout.packed_rows) == layout.num_rows == tree.trie_tokens
    spans = plain.spans
    depth = {int(s): 0 for s in spans.span[spans.parent < 0]}
    for s, p in zip(spans.span.tolist(), spans.parent.tolist(), strict=True):
        depth.setdefault(s, depth.get(p, -1) + 1)
    assert len(layout.rounds) == max(depth.values()) + 1
    assert len(build_unit_layout(plain, tree, 0, linear_calls="levels").rounds) == len(layout.rounds)
    assert len(build_unit_layout(plain, tree, 0, linear_calls="nodes").rounds) == len(depth)
    window = window_bundle(tree, chunk=4, consumers=2, seed=0)
    for calls in ("no-replay", "levels", "nodes"):
        with pytest.raises(ExecError, match="without imports"):
            build_unit_layout(window, tree, 1, linear_calls=calls)


def test_device_tensors_are_made_once() -> None:
    _, _, layout = CASES[0]
    device = layout.to("cpu")
    assert layout.to(torch.device("cpu")) is device
    assert device.to("cpu") is device
    assert device.tokens.tolist() == layout.tokens.tolist()


def test_row_of_an_imported_span_is_refused() -> None:
    tree = forest(0, rows=20)
    bundle = window_bundle(tree, chunk=4, consumers=2, seed=0)
    layout = build_unit_layout(bundle, tree, 1)
    imported = int(np.flatnonzero(layout.span_row < 0)[0])
    with pytest.raises(KeyError):
        layout.row_of(imported, 0)


def test_a_state_that_nothing_returns_is_an_invalid_plan() -> None:
    bundle, tree, _ = next(case for case in CASES if np.any(case[0].sequences.state_unit >= 0))
    unit = int(bundle.sequences.state_unit.max())
    at_once = replace(bundle.sequences, round=np.zeros(len(bundle.sequences), np.int32))
    with pytest.raises(InvalidPlanError, match="no earlier round"):
        build_unit_layout(replace(bundle, sequences=at_once), tree, unit)
