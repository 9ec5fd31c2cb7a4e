"""Speed of the KDA backends on this machine: ``python benchmarks/kda.py [--threads 2] [--json]``.

Two comparisons, each inside one run, alternating, best of several repeats, forward and backward:

- the ``torch`` backend against the same chunkwise formulas in plain autograd with ``solve_triangular``
  and a Python scan: once with decay products in 16-row blocks, exact for every gate like the backend,
  once with one pair of factors per chunk, the cheapest there is, which only mild gates survive;
- a token tree computed trajectory by trajectory, node by node, and level by level in packed calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

# Threads that spin while they wait make a two-thread run ten times slower on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from torch import Tensor

from harts_core.exec.kda import KdaCall, kda_chunkwise
from harts_core.exec.kda.chunk_layout import chunk_layout

HEADS, HEAD_DIM, CHUNK = 4, 64, 64
Clock = Callable[[], float]


def mild_products(x: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """Σ_κ x_t k_s exp(G_t − G_s) for s ≤ t from one pair of factors; a decay of e^−170 overflows."""
    middle = G[:, G.shape[1] // 2, None]
    return ((x * (G - middle).exp()) @ (k * (middle - G).exp()).mT).tril()


def exact_products(x: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """The same for every gate ≤ 0: 16-row blocks, pair by pair on the diagonal."""
    W, rows = G.shape[1], []
    for start in range(0, W, 16):
        block = slice(start, start + 16)
        pairs = (G[:, block, None] - G[:, None, block]).clamp(max=0).exp()
        parts = [torch.einsum("rtk,rsk,rtsk->rts", x[:, block], k[:, block], pairs).tril()]
        if start:
            reference = G[:, start, None]
            columns = k[:, :start] * (reference - G[:, :start]).exp()
            parts.insert(0, (x[:, block] * (G[:, block] - reference).exp()) @ columns.mT)
        if start + 16 < W:
            parts.append(G.new_zeros(G.shape[0], 16, W - start - 16))
        rows.append(torch.cat(parts, -1))
    return torch.cat(rows, 1)


def kda_plain(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    call: KdaCall,
    products: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The chunkwise form as one would first write it: every step an autograd operation."""
    layout = chunk_layout(call, q_THK.device)
    W, H = layout.width, q_THK.shape[1]

    def chunks(x: Tensor) -> Tensor:
        rows = x.new_zeros(layout.num_chunks * W, *x.shape[1:]).index_copy(0, layout.token_slots, x)
        return rows.unflatten(0, (-1, W)).transpose(1, 2).flatten(0, 1)

    q, k, v, g, beta = map(chunks, (q_THK, k_THK, v_THV, g_THK, beta_TH[..., None]))
    G = g.cumsum(1)
    P, A = products(q, k, G), products(beta * k, k, G).tril(-1)
    right = torch.cat([beta * v, beta * k * G.exp()], -1)
    solved = torch.linalg.solve_triangular(torch.eye(W) + A, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    last = G[:, -1:]
    operands = (u, w, k * (last - G).exp(), q * G.exp(), P, last.exp().mT)
    step_rows = [size * H for size in layout.step_sizes]
    S = u.new_zeros(step_rows[0], k.shape[-1], v.shape[-1])
    outputs = []
    for u_, w_, k_, q_, P_, decay in zip(*(x.split(step_rows) for x in operands), strict=True):
        S = S[: u_.shape[0]]
        new_v = u_ - w_ @ S
        outputs.append(q_ @ S + P_ @ new_v)
        S = decay * S + k_.mT @ new_v
    o = torch.cat(outputs).unflatten(0, (-1, H)).transpose(1, 2).flatten(0, 1)
    return o[layout.token_slots]


def random_inputs(num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (num_tokens, HEADS, HEAD_DIM)
    unit = torch.nn.functional.normalize
    q, k = unit(normal(*shape), dim=-1) * HEAD_DIM**-0.5, unit(normal(*shape), dim=-1)
    gate = -torch.rand(shape, generator=generator)
    inputs = [q, k, normal(*shape), gate, torch.rand(shape[:2], generator=generator)]
    return [x.requires_grad_() for x in inputs]


def best_seconds(runs: dict[str, Callable[[], Tensor]], repeats: int, clock: Clock) -> dict[str, float]:
    """Best time of each run's forward and backward, the runs taking turns; the first is dropped."""
    best = dict.fromkeys(runs, float("inf"))
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = clock()
            run().sum().backward()
            if repeat:
                best[name] = min(best[name], clock() - start)
    return best


def compare_implementations(lengths: tuple[int, ...], repeats: int, clock: Clock) -> dict[str, float]:
    call = KdaCall(lengths=lengths, chunk=CHUNK)
    inputs = random_inputs(call.num_tokens)
    runs: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: kda_chunkwise(*inputs, call)[0],
        "plain_exact": lambda: kda_plain(*inputs, call, exact_products),
        "plain_mild": lambda: kda_plain(*inputs, call, mild_products),
    }
    for run in runs.values():
        torch.testing.assert_close(run(), runs["torch"](), rtol=1e-3, atol=1e-4)
    seconds = best_seconds(runs, repeats, clock)
    return {
        "sequences": len(lengths),
        "tokens": call.num_tokens,
        **{f"{name}_tokens_per_s": call.num_tokens / best for name, best in seconds.items()},
        "over_plain_exact": seconds["plain_exact"] / seconds["torch"],
        "over_plain_mild": seconds["plain_mild"] / seconds["torch"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A segment of a token tree: positions [start, stop), its parent's index (−1: root), its first row."""

    parent: int
    start: int
    stop: int
    row: int

    @property
    def anchor(self) -> int:
        return self.start // CHUNK * CHUNK


def regular_tree(depth: int, fanout: int, segment: int) -> list[list[Node]]:
    """Levels of a tree whose segments all have the same length; node indices run through the levels."""
    levels, index, row = [[Node(parent=-1, start=0, stop=segment, row=0)]], 0, segment
    for level in range(1, depth):
        nodes = []
        for parent in range(index, index + len(levels[-1])):
            for _ in range(fanout):
                start = level * segment
                nodes.append(Node(parent=parent, start=start, stop=start + segment, row=row))
                row += segment
        index += len(levels[-1])
        levels.append(nodes)
    return levels


def path_rows(nodes: list[Node], node: Node, start: int) -> list[int]:
    """Compact rows of positions [start, node.stop) on the way from the root."""
    rows: list[int] = []
    while True:
        first = max(start, node.start)
        rows = list(range(node.row + first - node.start, node.row + node.stop - node.start)) + rows
        if first == start:
            return rows
        node = nodes[node.parent]


def run_tree(nodes: list[Node], calls: list[list[int]], inputs: list[Tensor]) -> Callable[[], Tensor]:
    """A function that computes every node once, call by call, each starting at its anchor's state."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    plans = []
    for members in calls:
        rows = [path_rows(nodes, nodes[n], nodes[n].anchor) for n in members]
        wanted = [
            (n, i, (nodes[children[n][0]].anchor - nodes[n].anchor) // CHUNK)
            for i, n in enumerate(members)
            if n in children
        ]
        boundaries = tuple((i, c) for _, i, c in wanted if c > 0)
        call = KdaCall(lengths=tuple(map(len, rows)), chunk=CHUNK, boundaries=boundaries)
        plans.append((members, torch.tensor([r for path in rows for r in path]), call, wanted))
    zero = torch.zeros(HEADS, HEAD_DIM, HEAD_DIM)

    def run() -> Tensor:
        total, for_children = torch.zeros(()), {-1: zero}
        for members, rows, call, wanted in plans:
            initial = torch.stack([for_children[nodes[n].parent] for n in members])
            o, states = kda_chunkwise(*(x.index_select(0, rows) for x in inputs), call, initial)
            total = total + o.sum()
            returned = iter(states.unbind())
            for n, i, c in wanted:
                for_children[n] = next(returned) if c > 0 else initial[i]
        return total

    return run


def compare_trees(depth: int, fanout: int, segment: int, repeats: int, clock: Clock) -> dict[str, float]:
    levels = regular_tree(depth, fanout, segment)
    nodes = [node for level in levels for node in level]
    inputs = random_inputs(nodes[-1].row + segment)
    first = [sum(map(len, levels[:i])) for i in range(depth)]
    by_level = [list(range(f, f + len(level))) for f, level in zip(first, levels, strict=True)]
    paths = [path_rows(nodes, leaf, 0) for leaf in levels[-1]]
    index = torch.tensor([row for path in paths for row in path])
    whole = KdaCall(lengths=tuple(map(len, paths)), chunk=CHUNK)
    seconds = best_seconds(
        {
            "expanded": lambda: kda_chunkwise(*(x.index_select(0, index) for x in inputs), whole)[0],
            "node_wise": run_tree(nodes, [[n] for n in range(len(nodes))], inputs),
            "packed": run_tree(nodes, by_level, inputs),
        },
        repeats,
        clock,
    )
    return {
        "nodes": len(nodes),
        "compact_tokens": nodes[-1].row + segment,
        "expanded_tokens": whole.num_tokens,
        "compression": whole.num_tokens / (nodes[-1].row + segment),
        "packed_over_expanded": seconds["expanded"] / seconds["packed"],
        "packed_over_node_wise": seconds["node_wise"] / seconds["packed"],
        "packed_compact_tokens_per_s": (nodes[-1].row + segment) / seconds["packed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: the process's CPU seconds, steadier on a busy machine; with one thread only",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.clock == "cpu" and arguments.threads != 1:
        parser.error("--clock cpu needs --threads 1")
    torch.set_num_threads(arguments.threads)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[arguments.clock]
    report = {
        "implementations": [
            compare_implementations(lengths, arguments.repeats, clock)
            for lengths in ((256,) * 8, (1000,) * 2, (2048,), tuple(range(10, 300, 20)))
        ],
        "trees": [
            compare_trees(depth, fanout, segment, arguments.repeats, clock)
            for depth, fanout, segment in ((5, 2, 100), (4, 3, 50), (7, 2, 20))
        ],
    }
    if arguments.json:
        json.dump({"threads": arguments.threads, **report}, sys.stdout, indent=2)
        print()
        return
    for title, rows in report.items():
        print(title)
        for row in rows:
            print("  " + "  ".join(f"{name} {value:,.2f}".replace(".00", "") for name, value in row.items()))


if __name__ == "__main__":
    main()
