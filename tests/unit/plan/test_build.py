"""The bundle of a given partition, against a naive reading of DESIGN §5."""

from __future__ import annotations

import numpy as np
import pytest

from harts_core.plan.build import build_bundle
from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.plan.cost_model import PRESETS, CostModel
from harts_core.trees.neighbours import range_minimum
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences

EXAMPLE = [[5] * 5 + [1], [5] * 5 + [1, 2, 2, 2, 2], [5] * 5 + [3] * 3, [5, 5, 7, 7]]


def bundle_of(
    tree: RolloutTree,
    replica: list[int],
    slot: list[int],
    *,
    sharing: str = "tree",
    dp: int = 2,
    chunk: int = 4,
    pad: int = 1,
    cost: CostModel = PRESETS["tokens"],
) -> PlanBundle:
    parameters = {"dp": dp, "capacity": 2**20, "pad": pad, "chunk": chunk, "seed": 0}
    return build_bundle(
        tree,
        planner="test",
        parameters=parameters,
        cost_model=cost,
        replica=np.array(replica),
        slot=np.array(slot),
        sharing=sharing,
    )


def test_example_of_the_format() -> None:
    bundle = bundle_of(tree_from_sequences(EXAMPLE), [0, 0, 1, 1], [0, 0, 0, 0])
    s = bundle.spans
    assert list(zip(s.unit, s.parent, s.start, s.stop, strict=True)) == [
        (0, NONE, 0, 10),
        (1, NONE, 0, 2),
        (1, 0, 2, 8),
        (1, 0, 2, 4),
    ]
    assert bundle.metrics["complete_tokens"] == 20
    assert bundle.metrics["within_compression"] == pytest.approx(1.4)
    assert bundle.metrics["trie_tokens"] == 15
    assert bundle.metrics["num_rounds"] == 2
    # One child of the fork continues its parent; the other replays [0, 2) from the zero state.
    assert [bundle.sequences.spans[i].tolist() for i in range(3)] == [[0], [0, 1], [2]]
    assert bundle.sequences.round.tolist() == [0, 0, 0]
    assert bundle.sequences.index.tolist() == [0, 0, 1]
    assert bundle.metrics["replay_tokens"] == 2


@pytest.mark.parametrize("sharing", ["tree", "none", "group"])
@pytest.mark.parametrize("seed", range(5))
def test_tables_against_naive_sets(sharing: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_rows=20)
    groups = [f"g{i % 3}" for i in range(len(sequences))]
    tree = tree_from_sequences(sequences, groups=groups)
    replica, slot = rng.integers(0, 2, 20).tolist(), rng.integers(0, 3, 20).tolist()
    bundle = bundle_of(tree, replica, slot, sharing=sharing, pad=16)
    rows = [tuple(tree.tokens(i).tolist()) for i in range(20)]
    units = sorted({(j, d) for d, j in zip(replica, slot, strict=True)})
    assert list(zip(bundle.units.slot, bundle.units.replica, strict=True)) == units
    for u, (j, d) in enumerate(units):
        mine = [i for i in range(20) if (slot[i], replica[i]) == (j, d)]
        if sharing == "tree":
            expected = len({r[: k + 1] for r in (rows[i] for i in mine) for k in range(len(r))})
        elif sharing == "none":
            expected = sum(len(rows[i]) for i in mine)
        else:
            expected = 0
            for g in set(groups):
                members = [rows[i] for i in mine if tree.group_id[i] == g]
                shared = 0
                while members and all(len(m) > shared and m[shared] == members[0][shared] for m in members):
                    shared += 1
                expected += sum(len(m) - shared for m in members) + (shared if members else 0)
        assert bundle.units.complete_tokens[u] == expected
        assert bundle.units.padded_tokens[u] == -(-expected // 16) * 16
        lines = range(bundle.span_offsets[u], bundle.span_offsets[u + 1])
        for i in lines:
            p = bundle.spans.parent[i]
            if p == NONE:
                assert bundle.spans.start[i] == 0
            else:
                parent = lines[p]
                assert parent < i
                assert bundle.spans.stop[parent] == bundle.spans.start[i]
                a, b = rows[bundle.spans.row[parent]], rows[bundle.spans.row[i]]
                assert a[: bundle.spans.start[i]] == b[: bundle.spans.start[i]]
    for k in range(20):
        a = bundle.assignments
        i = bundle.span_offsets[a.unit[k]] + a.span[k]
        assert a.row[k] == k
        assert bundle.spans.start[i] < tree.length[k] <= bundle.spans.stop[i]
        assert rows[bundle.spans.row[i]][: tree.length[k]] == rows[k]


def test_no_sharing_repeats_every_row() -> None:
    tree = tree_from_sequences([[1, 2], [1, 2], [1, 2, 3]])
    bundle = bundle_of(tree, [0, 0, 0], [0, 0, 0], sharing="none", dp=1)
    assert bundle.spans.stop.tolist() == [2, 2, 3]
    assert bundle.spans.parent.tolist() == [NONE] * 3
    assert len(bundle.sequences) == 3


def test_dropped_rows_leave_no_trace() -> None:
    tree = tree_from_sequences(EXAMPLE)
    bundle = bundle_of(tree, [0, -1, 1, 1], [0, -1, 0, 0])
    assert bundle.assignments.row.tolist() == [0, 2, 3]
    assert bundle.metrics["original_tokens"] == 18
    assert 1 not in bundle.spans.row
    assert bundle.metrics["trie_tokens"] == 11  # of the kept rows: 8 + 1 + 2


def test_states_come_from_the_span_that_holds_the_anchor() -> None:
    sequences = [[1] * 9 + [2] * 3, [1] * 9 + [3, 4, 4], [1] * 9 + [3, 5], [1] * 9 + [3, 6]]
    tree = tree_from_sequences(sequences)
    bundle = bundle_of(tree, [0] * 4, [0] * 4, dp=1)
    assert bundle.spans.stop.tolist()[0] == 9
    q = bundle.sequences
    late = np.flatnonzero(q.replay_start > 0)
    assert len(late) == 3  # three side children of the two forks, all past position 8
    assert q.state_position[late].tolist() == [8, 8, 8]
    assert q.state_span[late].tolist() == [0, 0, 0]
    assert q.round[late].tolist() == [1, 1, 1]
    assert bundle.metrics["num_rounds"] == 2


def test_costs_against_token_sums() -> None:
    cost = CostModel(name="c", alpha_forward=3, beta_forward=5, alpha_backward=7, beta_backward=11)
    tree = tree_from_sequences(EXAMPLE)
    bundle = bundle_of(tree, [1, 0, 1, 1], [0, 0, 0, 0], cost=cost, pad=4)
    for u in range(2):
        pairs = blocks = 0
        for i in range(bundle.span_offsets[u], bundle.span_offsets[u + 1]):
            a, b = int(bundle.spans.start[i]), int(bundle.spans.stop[i])
            pairs += sum(t + 1 for t in range(a, b))
            blocks += (b - a) * b
        padded = int(bundle.units.padded_tokens[u])
        assert bundle.units.cost_forward[u] == 3 * padded + 5 * pairs
        assert bundle.units.cost_backward[u] == 7 * padded + 11 * blocks


def test_range_minimum(rng: np.random.Generator) -> None:
    values = rng.integers(0, 100, 37).astype(np.int32)
    low = rng.integers(0, 37, 200).astype(np.int32)
    high = np.array([rng.integers(a + 1, 38) for a in low], np.int32)
    expected = [values[a:b].min() for a, b in zip(low, high, strict=True)]
    assert range_minimum(values, low, high).tolist() == expected
