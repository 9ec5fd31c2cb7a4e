"""Does computing a shared prefix once change the model's outputs, and does replay matter?

A fixed random checkpoint in bfloat16 evaluates every leaf of a forking tree. Against per-trajectory execution
(the ``expanded`` plan) it compares, by the number of forks that a position lies behind:

- repeat: the same trajectories again, cut into other microbatches (what execution order alone changes);
- replay: each prefix once; a branch enters from the boundary state and replays up to its fork;
- no replay: each prefix once; a branch enters from its parent's last state and restarts the chunk grid there.

Symmetric KL is over the full vocabulary, |ΔNLL| of the trajectory's own next token; both are means.

    python benchmarks/replay_fidelity.py
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from harts_core.exec.config import LinearCalls
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.unit import unit_hidden
from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.rollout_tree import RolloutTree

MAX_DEPTH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Of each trained position, by (row, position): ``logprobs`` [S, V] over the vocabulary, ``labels``."""

    logprobs: torch.Tensor
    labels: torch.Tensor


def forking_tree(seed: int, vocab: int, segment: tuple[int, int]) -> RolloutTree:
    """A binary tree with MAX_DEPTH forks on every path; segment lengths are random, so are the forks."""
    rng = np.random.default_rng(seed)

    def paths(depth: int) -> list[list[int]]:
        own = rng.integers(0, vocab, int(rng.integers(*segment))).tolist()
        if depth == MAX_DEPTH:
            return [own]
        return [own + tail for _ in range(2) for tail in paths(depth + 1)]

    rows = paths(0)
    return build_tree(
        Trajectory(trajectory_id=str(i), group_id="0", tokens=row, loss_spans=[(1, len(row))])
        for i, row in enumerate(rows)
    )


def evaluate(
    model: HybridModel, bundle: PlanBundle, tree: RolloutTree, calls: LinearCalls = "rounds"
) -> Outputs:
    """Run every unit of a plan forward."""
    parts = []
    for unit in range(bundle.num_units):
        layout = build_unit_layout(bundle, tree, unit, linear_calls=calls)
        parts.append(_unit_logprobs(model, layout))
    row, index = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    order = torch.tensor(np.lexsort((index, row)))
    return Outputs(
        logprobs=torch.cat([p[2] for p in parts])[order], labels=torch.cat([p[3] for p in parts])[order]
    )


@torch.no_grad()
def _unit_logprobs(
    model: HybridModel, layout: UnitLayout
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], torch.Tensor, torch.Tensor]:
    device = layout.to(model.device)
    hidden = unit_hidden(model, layout)
    logits = (hidden[device.head_rows] @ model.lm_head.weight.t()).float()
    row = device.head_label_row[device.trained_label]
    labels = device.head_labels[device.trained_label]
    return layout.trained_row, layout.trained_index, torch.log_softmax(logits, -1)[row], labels


def fork_depths(bundle: PlanBundle, tree: RolloutTree) -> npt.NDArray[np.int64]:
    """int64 [S]: forks crossed before the token that predicts each trained position, by (row, position).

    Taken from a one-unit shared plan, whose spans are cut at every fork.
    """
    depths = []
    spans, table = bundle.spans, bundle.assignments
    for line in np.argsort(table.row):
        starts, span = [], int(table.span[line])
        while span != NONE:
            at = int(bundle.span_offsets[table.unit[line]]) + span
            starts.append(int(spans.start[at]))
            span = int(spans.parent[at])
        predicting = tree.trained_positions(int(table.row[line])) - 1
        depths.append(np.searchsorted(np.array(starts[::-1]), predicting, side="right") - 1)
    return np.concatenate(depths).astype(np.int64)


def compare(base: Outputs, other: Outputs, depth: npt.NDArray[np.int64]) -> list[dict[str, float]]:
    """Per depth: mean symmetric KL and mean |ΔNLL| in nats, and how many positions."""
    p, q = base.logprobs.double(), other.logprobs.double()
    kl = ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2
    label = base.labels[:, None]
    nll = (p.gather(1, label) - q.gather(1, label)).abs()[:, 0]
    rows = []
    for d in range(MAX_DEPTH + 1):
        at = torch.tensor(np.flatnonzero(depth == d))
        rows.append(
            {
                "depth": d,
                "positions": len(at),
                "symmetric_kl": float(kl[at].mean()),
                "abs_delta_nll": float(nll[at].mean()),
            }
        )
    return rows


def run(preset: str, seed: int, std: float, segment: tuple[int, int]) -> dict[str, object]:
    """All variants on one tree; plain numbers."""
    config = replace(PRESETS[preset], initializer_range=std)
    model = HybridModel(config, dtype=torch.bfloat16, seed=seed)
    tree = forking_tree(seed, config.vocab_size, segment)
    whole = tree.original_tokens

    def plan(planner: str, capacity: int) -> PlanBundle:
        return plan_tree(tree, PlanOptions(dp=1, capacity=capacity, planner=planner))

    shared = plan("harts-l1", whole)
    depth = fork_depths(shared, tree)
    base = evaluate(model, plan("expanded", whole), tree)
    longest = int(tree.length.max())
    variants = {
        "repeat": evaluate(model, plan("expanded", 2 * longest), tree),
        "replay": evaluate(model, shared, tree),
        "no replay": evaluate(model, shared, tree, "no-replay"),
    }
    return {
        "model": preset,
        "original_tokens": whole,
        "compact_tokens": tree.trie_tokens,
        "replayed_tokens": int(shared.metrics["replay_tokens"]),
        "variants": {name: compare(base, outputs, depth) for name, outputs in variants.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="cpu-bench", choices=[p for p in PRESETS if p.startswith("cpu")])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--std", type=float, default=0.1, help="deviation of the random weights")
    parser.add_argument("--segment", type=int, nargs=2, default=(20, 110), help="tokens of a segment")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = run(arguments.preset, arguments.seed, arguments.std, tuple(arguments.segment))
    if arguments.json:
        json.dump(result, sys.stdout, indent=2)
        return
    print(
        f"{result['model']}, bfloat16: {result['original_tokens']:,} original tokens, "
        f"{result['compact_tokens']:,} compact, {result['replayed_tokens']:,} replayed"
    )
    variants = result["variants"]
    assert isinstance(variants, dict)
    print(f"{'forks crossed':>13} {'positions':>9}" + "".join(f"{name:>26}" for name in variants))
    print(f"{'':>23}" + f"{'sym. KL':>15}{'|ΔNLL|':>11}" * len(variants))
    for d in range(MAX_DEPTH + 1):
        cells = [f"{v[d]['symmetric_kl']:>15.2e}{v[d]['abs_delta_nll']:>11.2e}" for v in variants.values()]
        print(f"{d:>13} {variants['replay'][d]['positions']:>9,}" + "".join(cells))


if __name__ == "__main__":
    main()
