"""Shared by the training tests: plans of small trees and tiny train.toml files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harts_core.plan.build import build_bundle
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.bundle_file import write_bundle
from harts_core.plan.cost_model import CostModel
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import write_tree
from tests.support import random_sequences, tree_from_sequences

COST = CostModel(name="test", alpha_forward=1, beta_forward=0, alpha_backward=2, beta_backward=0)


def plan_of(
    tree: RolloutTree, *, sharing: str = "tree", dp: int = 1, slots: int = 1, chunk: int = 16
) -> PlanBundle:
    """Rows dealt out in order: contiguous runs to ``dp · slots`` consumers."""
    consumer = np.arange(tree.num_rows) * (dp * slots) // tree.num_rows
    return build_bundle(
        tree,
        planner="expanded" if sharing == "none" else "harts-l1",
        parameters={"dp": dp, "capacity": 1_000_000, "pad": 1, "chunk": chunk, "seed": 0},
        cost_model=COST,
        replica=consumer % dp,
        slot=consumer // dp,
        sharing=sharing,
    )


def random_tree(seed: int = 0, *, num_rows: int = 10, vocab: int = 200, max_extend: int = 24) -> RolloutTree:
    """A random tree with all metadata, in three groups."""
    rng = np.random.default_rng(seed)
    rows = random_sequences(rng, num_rows=num_rows, vocab=vocab, max_extend=max_extend)
    groups = [f"g{i % 3}" for i in range(len(rows))]
    return tree_from_sequences(rows, groups=groups, rng=rng, vocab=vocab)


def write_inputs(folder: Path, *, seed: int = 0, dp: int = 1, slots: int = 2) -> tuple[Path, Path, Path]:
    """tree.arrow, a shared plan and an expanded plan in a folder."""
    tree = write_tree(folder / "tree.arrow", random_tree(seed))
    write_bundle(folder / "shared", plan_of(tree, dp=dp, slots=slots))
    write_bundle(folder / "expanded", plan_of(tree, sharing="none", dp=dp, slots=slots))
    return folder / "tree.arrow", folder / "shared", folder / "expanded"


TOML = """
[model]
preset = "cpu-moe"
vocab_size = 256
num_hidden_layers = 2
layer_group_size = 2

[objective]
kl_coef = 0.05

[optimizer]
learning_rate = 1e-3
weight_decay = 0.1
schedule = "cosine"
warmup_steps = 1
decay_steps = 10

[runtime]
dtype = "{dtype}"
threads = 1
checkpoint_every = {every}
keep_checkpoints = {keep}
"""


def write_config(folder: Path, *, dtype: str = "float32", every: int = 0, keep: int = 2) -> Path:
    """A train.toml of a tiny model."""
    file = folder / "train.toml"
    file.write_text(TOML.format(dtype=dtype, every=every, keep=keep))
    return file
