"""Keys and values, or latents, between MLA layers: ``python benchmarks/mla_interface.py [--rows N]``.

A consumer that imports R ancestor tokens can take their expanded keys and values, or the latents and rotary
keys and expand them again with W_kvb. Both give the same gradients. Printed per imported token, at the
published shapes: bytes in bfloat16, and CPU time of forward and backward in float32 (best of several
alternating repeats), next to the attention of 256 queries over the same keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from harts_core.exec.layout import AttentionSpan
from harts_core.exec.model.attention import forest_attention
from harts_core.exec.model.config import PRESETS, ModelConfig

QUERIES = 256


def measure(config: ModelConfig, rows: int, repeats: int) -> dict[str, float]:
    """Seconds of forward and backward."""
    heads, nope, rope, value = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    weight = (torch.randn(heads * (nope + value), config.kv_lora_rank) * 0.02).requires_grad_()
    latent = torch.randn(rows, config.kv_lora_rank, requires_grad=True)
    k_rope = torch.randn(rows, 1, rope, requires_grad=True)
    keys = torch.randn(rows, heads, nope + rope, requires_grad=True)
    values = torch.randn(rows, heads, value, requires_grad=True)
    q = torch.randn(QUERIES, heads, nope + rope, requires_grad=True)
    own = (torch.randn(QUERIES, heads, nope + rope), torch.randn(QUERIES, heads, value))
    span = (AttentionSpan(start=0, stop=QUERIES, ancestors=((QUERIES, QUERIES + rows),)),)

    def concatenate() -> tuple[Tensor, Tensor]:
        return torch.cat([own[0], keys]), torch.cat([own[1], values])

    def expand() -> tuple[Tensor, Tensor]:
        k_nope, v = (latent @ weight.t()).view(rows, heads, -1).split([nope, value], -1)
        k = torch.cat([k_nope, k_rope.expand(-1, heads, -1)], -1)
        return torch.cat([own[0], k]), torch.cat([own[1], v])

    def attend() -> tuple[Tensor, ...]:
        return (forest_attention(q, *concatenate(), span, (nope + rope) ** -0.5),)

    work: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "keys and values": concatenate,
        "latents, expanded again": expand,
        f"attention of {QUERIES} queries": attend,
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(repeats):
        for name, run in work.items():
            begin = time.process_time()
            torch.autograd.backward([x.sum() for x in run()])
            best[name] = min(best[name], time.process_time() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("ling-3.0-tiny", "ling-3.0-flash"):
        config = PRESETS[name]
        expanded = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * 2
        latent = (config.kv_lora_rank + config.qk_rope_head_dim) * 2
        print(f"{name}: {expanded} bytes of keys and values, {latent} bytes of latents per token and layer")
        for what, seconds in measure(config, arguments.rows, arguments.repeats).items():
            print(f"  {what}: {seconds / arguments.rows * 1e6:.1f} µs per imported token")


if __name__ == "__main__":
    main()
