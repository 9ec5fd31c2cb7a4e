"""Random token trees and two ways to run linear attention over them: every trajectory in full, and compactly.

An independent, small stand-in for the planner's rounds: paths are chosen at random or node by node, and a
path's round follows from the path that produces its anchor's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts_core.exec.kda import KdaBackend, KdaCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Segments in topological order; segment s holds token positions [start[s], stop[s]) and computed rows
    [row[s], row[s] + stop[s] - start[s])."""

    parent: list[int]
    start: list[int]
    stop: list[int]
    row: list[int]

    def children(self, s: int) -> list[int]:
        return [c for c in range(len(self.parent)) if self.parent[c] == s]

    def ancestry(self, s: int) -> list[int]:
        """From the root to s."""
        path = [s]
        while self.parent[path[0]] >= 0:
            path.insert(0, self.parent[path[0]])
        return path

    def rows(self, s: int, start: int, stop: int) -> list[int]:
        """Computed rows of the token positions [start, stop) on the way from the root to s."""
        return [
            self.row[a] + p - self.start[a]
            for a in self.ancestry(s)
            for p in range(max(start, self.start[a]), min(stop, self.stop[a]))
        ]


def random_tree(rng: np.random.Generator, *, num_segments: int, max_tokens: int, roots: int = 1) -> Tree:
    tree = Tree(parent=[], start=[], stop=[], row=[])
    row = 0
    for s in range(num_segments):
        parent = -1 if s < roots else int(rng.integers(s))
        start = 0 if parent < 0 else tree.stop[parent]
        tokens = 1 if rng.random() < 0.2 else int(rng.integers(1, max_tokens + 1))
        tree.parent.append(parent)
        tree.start.append(start)
        tree.stop.append(start + tokens)
        tree.row.append(row)
        row += tokens
    return tree


def random_inputs(
    rng: np.random.Generator, T: int, *, H: int, K: int, V: int, dtype: torch.dtype, gate: float = 1.0
) -> list[Tensor]:
    """q, k, v, g, beta as the model prepares them; gates uniform in (-gate, 0]."""

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    g = -gate * torch.from_numpy(rng.random((T, H, K))).to(dtype)
    beta = torch.from_numpy(rng.random((T, H))).to(dtype)
    return [unit(normal(T, H, K)) * K**-0.5, unit(normal(T, H, K)), normal(T, H, V), g, beta]


def split_into_paths(tree: Tree, rng: np.random.Generator | None) -> list[list[int]]:
    """Every segment in one path; a random child (or none) continues its parent's path. None: node by node."""
    paths: list[list[int]] = []
    continued: set[int] = set()
    for s in range(len(tree.parent)):
        children = tree.children(s)
        if rng is not None and children and rng.random() < 0.9:
            continued.add(children[rng.integers(len(children))])
    of_segment: dict[int, list[int]] = {}
    for s, parent in enumerate(tree.parent):
        if parent >= 0 and s in continued:
            of_segment[s] = of_segment[parent]
            of_segment[s].append(s)
        else:
            of_segment[s] = [s]
            paths.append(of_segment[s])
    return paths


def run_expanded(
    backend: KdaBackend,
    tree: Tree,
    inputs: list[Tensor],
    chunk: int,
    *,
    gate_lower_bound: float | None = None,
) -> list[tuple[list[int], Tensor]]:
    """Every root-to-leaf path in full, in one call: its computed rows and its outputs."""
    leaves = [s for s in range(len(tree.parent)) if not tree.children(s)]
    rows = [tree.rows(leaf, 0, tree.stop[leaf]) for leaf in leaves]
    call = KdaCall(lengths=tuple(map(len, rows)), chunk=chunk, gate_lower_bound=gate_lower_bound)
    index = torch.tensor([r for path in rows for r in path])
    o, _ = backend(*(x[index] for x in inputs), call, None)
    return list(zip(rows, o.split(call.lengths), strict=True))


def run_compact(
    backend: KdaBackend,
    tree: Tree,
    inputs: list[Tensor],
    chunk: int,
    paths: list[list[int]],
    *,
    gate_lower_bound: float | None = None,
) -> Tensor:
    """Every segment once: round by round, boundary states handed over, replay from the anchor."""
    holder = {s: n for n, path in enumerate(paths) for s in path}
    anchor = [tree.start[path[0]] // chunk * chunk for path in paths]

    def producer(n: int) -> int:
        """The path whose computed tokens end chunk anchor[n] // chunk."""
        return next(
            holder[a] for a in tree.ancestry(paths[n][0]) if tree.start[a] < anchor[n] <= tree.stop[a]
        )

    rounds: dict[int, int] = {}
    for n in range(len(paths)):  # a path's first segment follows its ancestors in topological order
        rounds[n] = 0 if anchor[n] == 0 else 1 + rounds[producer(n)]
    wanted = {n: (producer(n), (anchor[n] - anchor[producer(n)]) // chunk) for n in rounds if anchor[n]}
    states: dict[tuple[int, int], Tensor] = {}
    rows_of: list[int] = []
    outputs: list[Tensor] = []
    H, K, V = inputs[0].shape[1], inputs[0].shape[2], inputs[2].shape[2]
    for r in range(max(rounds.values()) + 1):
        members = [n for n in rounds if rounds[n] == r]
        rows = [tree.rows(paths[n][-1], anchor[n], tree.stop[paths[n][-1]]) for n in members]
        keys = sorted({key for key in wanted.values() if key[0] in members})
        call = KdaCall(
            lengths=tuple(map(len, rows)),
            chunk=chunk,
            boundaries=tuple((members.index(n), c) for n, c in keys),
            gate_lower_bound=gate_lower_bound,
        )
        index = torch.tensor([x for path in rows for x in path])
        zero = inputs[3].new_zeros(H, K, V)
        initial = torch.stack([states[wanted[n]] if n in wanted else zero for n in members])
        o, returned = backend(*(x[index] for x in inputs), call, initial)
        states.update(zip(keys, returned, strict=True))
        for n, path_rows, o_path in zip(members, rows, o.split(call.lengths), strict=True):
            computed = tree.start[paths[n][0]] - anchor[n]
            rows_of += path_rows[computed:]
            outputs.append(o_path[computed:])
    order = torch.argsort(torch.tensor(rows_of))
    return torch.cat(outputs)[order]
