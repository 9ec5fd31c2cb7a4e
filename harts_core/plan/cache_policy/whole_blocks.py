"""What a plan would compute if tokens were shared only in whole blocks of a fixed size, without copies.

That is how serving systems share a prefix: a block is the unit of a match, so a path that leaves another one
inside a block computes the block's tokens before the fork once more. It holds for forks inside a microbatch
and for imports from other units alike.
"""

from __future__ import annotations

import numpy as np

from harts_core.plan.bundle import NONE, PlanBundle


def whole_block_tokens(bundle: PlanBundle, block_tokens: int) -> int:
    """Computed tokens of all units, with sharing in whole blocks only.

    At a fork after p tokens one child goes on in the block of its parent, every other one computes p mod B
    tokens again. Where a unit's paths leave what it imports, all do, also those that end there: their last
    block is not full, and its owner fills it differently.

    Args:
        bundle: a valid plan.
        block_tokens: B; with 1 nothing is computed again.
    """
    spans = bundle.spans
    imported = spans.owner != spans.unit
    child = spans.parent != NONE
    parent = (bundle.span_offsets[spans.unit] + spans.parent)[child]
    children = np.bincount(parent, minlength=len(spans))
    computed_children = np.bincount(parent, ~imported[child], minlength=len(spans)).astype(np.int64)
    leaving = np.where(children == 0, 1, computed_children)
    paths = np.where(imported, leaving, np.maximum(children - 1, 0))
    again = paths * (spans.stop.astype(np.int64) % block_tokens)
    return int(bundle.units.computed_tokens.sum() + again.sum())
