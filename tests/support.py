"""Shared by the tests: naive, independent builders of rollout trees and random forests of sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import finish_tree

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
"""Real rollouts, present beside some checkouts; tests that need them skip without (``shared_data``)."""


def naive_lcp(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def random_sequences(
    rng: np.random.Generator,
    *,
    num_rows: int = 12,
    vocab: int = 50,
    num_roots: int = 2,
    max_extend: int = 40,
    branch: float = 0.8,
    duplicates: float = 0.1,
    prefixes: float = 0.1,
    single_token: float = 0.1,
) -> list[list[int]]:
    """Random trees as token lists: each new row forks off a random position of an earlier one.

    Includes, with the given probabilities, exact duplicates, proper prefixes of earlier rows, and forks
    that add a single token.
    """
    rows: list[list[int]] = []
    while len(rows) < num_rows:
        kind = rng.random()
        if len(rows) < num_roots or kind > branch + duplicates + prefixes:
            base: list[int] = []
        else:
            base = rows[rng.integers(len(rows))]
            if kind < duplicates:
                rows.append(list(base))
                continue
            cut = int(rng.integers(1, len(base) + 1))
            if kind < duplicates + prefixes:
                rows.append(base[:cut])
                continue
            base = base[:cut]
        extend = 1 if rng.random() < single_token else int(rng.integers(1, max_extend + 1))
        rows.append(list(base) + rng.integers(0, vocab, extend).tolist())
    return rows


def tree_from_sequences(
    sequences: Sequence[Sequence[int]],
    *,
    groups: Sequence[str] | None = None,
    loss_spans: Sequence[Sequence[tuple[int, int]]] | None = None,
    rng: np.random.Generator | None = None,
    vocab: int = 50,
) -> RolloutTree:
    """A rollout tree by plain Python sorting. Without ``loss_spans``, every position from 1 on is trained
    (single-token rows: none). With ``rng``, random old and reference log-probs, advantages and rewards are
    attached."""
    ids = [f"t{i:05d}" for i in range(len(sequences))]
    order = sorted(range(len(sequences)), key=lambda i: (list(sequences[i]), ids[i]))
    rows = [list(sequences[i]) for i in order]
    lcp = [0] + [naive_lcp(a, b) for a, b in itertools.pairwise(rows)]
    if loss_spans is None:
        spans = [[1, len(r)] if len(r) > 1 else [] for r in rows]
    else:
        spans = [[x for pair in loss_spans[i] for x in pair] for i in order]
    trained = [sum(s[1::2]) - sum(s[::2]) for s in spans]
    extra: dict[str, Any] = {}
    if rng is not None:
        extra["old_logprobs"] = Ragged.from_rows([-rng.random(n) * 3 for n in trained], np.float32)
        extra["ref_logprobs"] = Ragged.from_rows([-rng.random(n) * 3 for n in trained], np.float32)
        extra["advantages"] = Ragged.from_rows([rng.standard_normal(1) for _ in trained], np.float32)
        extra["reward"] = rng.random(len(rows)).astype(np.float32)
    return finish_tree(
        RolloutTree(
            trajectory_id=tuple(ids[i] for i in order),
            group_id=tuple((groups[i] if groups else "g0") for i in order),
            length=np.array([len(r) for r in rows], np.int32),
            lcp=np.array(lcp, np.int32),
            suffix=Ragged.from_rows([r[l:] for r, l in zip(rows, lcp, strict=True)], np.int32),
            loss_spans=Ragged.from_rows(spans, np.int32),
            metadata={"vocab_size": vocab},
            **extra,
        ),
        "test",
    )
