"""Upper bounds on compression, which every plan reports beside what it reached.

Rows are in lexicographic order, so a set of rows costs the total length less a maximum spanning tree of
their mutual LCPs, and the spanning tree of sorted rows is the chain of neighbours. Splitting the rows into
k non-empty sets therefore costs at least C(all) + the sum of the k − 1 smallest lcp values (Kruskal).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.trees.segments import build_segment_tree


def least_tokens_in_sets(length: npt.NDArray[Any], lcp: npt.NDArray[Any], num_sets: int) -> int:
    """The fewest compact tokens of the rows split into ``num_sets`` non-empty sets, of any size.

    C(all) + Σ of the ``num_sets`` − 1 smallest neighbour LCPs. With D sets this is the least that D
    replicas compute between them, each token once per replica that needs it.

    Args:
        length: int [N], in lexicographic order.
        lcp: int [N], tokens shared with the row before; lcp[0] is ignored.
        num_sets: 1 ≤ num_sets ≤ N.
    """
    shared = lcp[1:].astype(np.int64)
    smallest = np.sort(shared)[: num_sets - 1]
    return int(length.astype(np.int64).sum() - shared.sum() + smallest.sum())


def least_tokens_within_capacity(
    length: npt.NDArray[Any], lcp: npt.NDArray[Any], *, capacity: int, dp: int
) -> int:
    """A lower bound on Σ C(consumer) of any plan whose consumers hold at most ``capacity`` tokens.

    Bottom-up over the segment tree: let L(v) bound the tokens below segment v. A consumer that holds any of
    them also holds v's whole path, so they need n(v) ≥ ⌈L(v) / (capacity − stop(v))⌉ consumers (and at least
    as many as any child needs), each of which holds v:
    L(parent) = Σ over children (len(v)·n(v) + L(v)). The number of consumers, at least ⌈L(root)/capacity⌉, is
    a multiple of ``dp``, which bounds the tokens a second time through :func:`least_tokens_in_sets`.

    Args:
        length, lcp: int [N], as above; every length ≤ capacity.
        capacity: T.
        dp: D.
    """
    tree = build_segment_tree(length, lcp)
    nested = int(_nested_tokens(tree.parent, tree.start, tree.stop, capacity)[0])
    num_consumers = dp * max(1, -(-nested // (capacity * dp)))
    return max(nested, least_tokens_in_sets(length, lcp, min(num_consumers, len(length))))


def least_shared_tokens(length: npt.NDArray[Any], lcp: npt.NDArray[Any], *, capacity: int) -> int:
    """A lower bound on the tokens of the prefix tree that two or more consumers of a plan hold.

    Those of the segments with n(v) ≥ 2, as above: what producers have to hold if no token is to be computed
    twice.

    Args:
        length, lcp: int [N], as above; every length ≤ capacity.
        capacity: T.
    """
    tree = build_segment_tree(length, lcp)
    return int(_nested_tokens(tree.parent, tree.start, tree.stop, capacity)[1])


@numba.njit(cache=True)
def _nested_tokens(parent: Any, start: Any, stop: Any, capacity: int) -> Any:
    """(L(root), tokens of the segments with n ≥ 2), children before parents."""
    v = len(parent)
    below = np.zeros(v, np.int64)
    copies = np.ones(v, np.int64)
    total, shared = 0, 0
    for i in range(v - 1, -1, -1):
        if below[i]:
            room = max(1, capacity - stop[i])  # positive in any feasible instance
            copies[i] = max(copies[i], (below[i] + room - 1) // room)
        tokens = (stop[i] - start[i]) * copies[i] + below[i]
        shared += stop[i] - start[i] if copies[i] > 1 else 0
        p = parent[i]
        if p < 0:
            total += tokens
        else:
            below[p] += tokens
            copies[p] = max(copies[p], copies[i])
    return total, shared
