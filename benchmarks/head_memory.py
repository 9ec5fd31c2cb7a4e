"""Peak memory of the log-probability head, against plain versions. One process per measurement.

Every variant computes λ of all trained positions and the gradients of their sum in the hidden states and the
output matrix, from the same hidden states of one unit that holds the whole tree:

    positions   log_softmax of the logits of every trained position (the head of per-trajectory training)
    rows        log_softmax of the logits of every compact row that predicts something
    blocks      harts_core.exec.head, rows in blocks, recomputed in backward
    blocks+H    the same with entropies

    python benchmarks/head_memory.py --rows 192 --vocab-size 32768
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from harts_core.exec.head import unit_head
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import build_tree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec

VARIANTS = ("positions", "rows", "blocks", "blocks+H")
PRESET = "cpu-bench"


def whole_tree_layout(rows: int, seed: int) -> UnitLayout:
    """One unit over a synthetic tree."""
    tree = build_tree(generate(workload_spec(rows=rows, seed=seed)))
    options = PlanOptions(dp=1, capacity=tree.original_tokens, planner="harts-l1")
    return build_unit_layout(plan_tree(tree, options), tree, 0)


def head_sum(variant: str, model: HybridModel, hidden: Tensor, layout: UnitLayout, block_rows: int) -> Tensor:
    """Σ λ of the trained positions (and Σ H), as the variant computes them."""
    if variant.startswith("blocks"):
        entropy = variant == "blocks+H"
        out = unit_head(model, hidden, layout, block_rows, entropy=entropy)
        return out.logprobs.sum() + (0 if out.entropy is None else out.entropy.sum())
    head = layout.head
    label = torch.from_numpy(head.labels[head.trained_label])
    row_of_label = np.repeat(np.arange(len(head.rows)), np.diff(head.label_offsets))
    row = torch.from_numpy(row_of_label[head.trained_label])
    source = hidden.index_select(0, torch.from_numpy(head.rows))
    if variant == "positions":
        source, row = source.index_select(0, row), torch.arange(len(row))
    logp = torch.log_softmax(source @ model.lm_head.weight.t(), dim=-1)  # type: ignore[operator]
    return logp[row, label].sum()


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One variant in this process: the rise of the peak resident memory, and seconds."""
    torch.set_num_threads(1)
    layout = whole_tree_layout(arguments.rows, arguments.seed)
    model = HybridModel(
        replace(PRESETS[PRESET], vocab_size=arguments.vocab_size), dtype=torch.float32, seed=0
    )
    hidden = torch.randn(layout.num_rows, model.config.hidden_size, requires_grad=True)
    before, start = peak_bytes(), time.perf_counter()
    head_sum(arguments.variant, model, hidden, layout, arguments.block_rows).backward()  # type: ignore[no-untyped-call]
    return {
        "seconds": time.perf_counter() - start,
        "peak_mib": (peak_bytes() - before) / 2**20,
        "compact_rows": len(layout.head.rows),
        "positions": len(layout.trained_row),
    }


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=192, help="rows of the synthetic tree-step workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--block-rows", type=int, default=256)
    parser.add_argument("--variant", choices=VARIANTS, help="measure only this one, in this process")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    results = {}
    for variant in VARIANTS:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--variant", variant],
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # freed tensors leave the process at once
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        results[variant] = json.loads(done.stdout)
    if arguments.json:
        json.dump(results, sys.stdout, indent=2)
        return
    first = results[VARIANTS[0]]
    print(
        f"{first['positions']:,} trained positions, {first['compact_rows']:,} compact rows, vocabulary "
        f"{arguments.vocab_size:,}, blocks of {arguments.block_rows} rows, float32, one thread"
    )
    for variant, result in results.items():
        ratio = first["peak_mib"] / result["peak_mib"]
        print(
            f"  {variant:<10} {result['peak_mib']:9.1f} MiB  {ratio:6.1f}x less  {result['seconds']:7.2f} s"
        )


if __name__ == "__main__":
    main()
