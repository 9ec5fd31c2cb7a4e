"""One process of ``test_moe``: the expert layer of a spec of two expert-parallel ranks against that of one.

Started as ``python -m tests.distributed.moe_layer DISPATCHER``; an assertion ends it with exit code 1.
"""

from __future__ import annotations

import gc
import sys
import weakref

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from harts_core.exec.config import ParallelSection
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.moe import MoE
from harts_core.exec.model.spec import LOCAL_SPEC, ModelSpec
from harts_core.exec.parallel.groups import Groups, process_groups
from harts_core.exec.parallel.launch import read_launch
from harts_core.exec.parallel.placement import placement_of
from harts_core.exec.parallel.spec import parallel_spec
from harts_core.exec.parallel.state import gather_whole
from tests.support_model import model_weights

CONFIG = PRESETS["cpu-moe"]
ROWS = [(7, 2), (5, 0), (0, 3), (0, 0), (40, 41)]
"""Of the two ranks."""
DISPATCHERS = {"alltoall": "MoEAlltoAllTokenDispatcher", "allgather": "MoEAllGatherTokenDispatcher"}


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def layers(spec: ModelSpec, dtype: torch.dtype) -> tuple[MoE, MoELayer]:
    """The same weights in one process and in the spec's layer."""
    alone, split = MoE(CONFIG, dtype, LOCAL_SPEC), spec.moe(CONFIG, dtype, spec)
    whole = model_weights(alone)
    with torch.no_grad():
        for seed, tensor in enumerate(whole.values()):
            tensor.copy_(random(*tensor.shape, seed=seed, dtype=tensor.dtype) / tensor.shape[-1] ** 0.5)
        for name, tensor in model_weights(split).items():
            tensor.copy_(spec.shard_of(tensor).own_part(whole[name]))
    return alone, split


def check_built(alone: MoE, split: MoELayer, dispatcher: str) -> None:
    assert isinstance(split, MoELayer)
    assert type(split.token_dispatcher).__name__ == DISPATCHERS[dispatcher]
    assert model_weights(split).keys() == model_weights(alone).keys()
    for name, parameter in split.named_parameters():
        expected = "expert" if name.startswith("experts.") else "none"
        assert placement_of(parameter).split == expected, name


def gradients(layer: MoE | MoELayer, x: Tensor, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs, the gradient of the rows, and of the parameters, of a loss on outputs and logits."""
    x = x.clone().requires_grad_()
    out, routing = layer(x)
    probe = random(*out.shape, seed=seed, dtype=out.dtype)
    ((out * probe).sum() + routing.logits.square().sum()).backward()
    assert x.grad is not None
    found = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    return out.detach(), x.grad, found


def check_rows(alone: MoE, split: MoELayer, rows: tuple[int, int], groups: Groups) -> None:
    """Each rank has its own rows; the gradients of its experts come from both."""
    inputs = [
        random(count, CONFIG.hidden_size, seed=9 + r, dtype=torch.float64) for r, count in enumerate(rows)
    ]
    out, x_grad, found = gradients(split, inputs[groups.rank], groups.rank)
    expected = [gradients(alone, x, rank) for rank, x in enumerate(inputs)]
    torch.testing.assert_close(out, expected[groups.rank][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x_grad, expected[groups.rank][1], rtol=1e-12, atol=1e-12)
    for name, parameter in split.named_parameters():
        whole = gather_whole(found.get(name, torch.zeros_like(parameter)), parameter, groups)
        ranks = expected if name.startswith("experts.") else expected[groups.rank : groups.rank + 1]
        total = sum((grads[name] for *_, grads in ranks if name in grads), torch.zeros_like(whole))
        torch.testing.assert_close(whole, total, rtol=1e-12, atol=1e-12)


def check_rounding(spec: ModelSpec, rank: int, dispatcher: str) -> None:
    """In bfloat16 outputs are rounded where one process rounds them; so are the rows' gradients, but for the
    all-gather's, which are summed on the way."""
    alone, split = layers(spec, torch.bfloat16)
    x = random(64, CONFIG.hidden_size, seed=20 + rank, dtype=torch.bfloat16)
    (out, x_grad, _), expected = gradients(split, x, rank), gradients(alone, x, rank)
    assert torch.equal(out, expected[0])
    assert torch.equal(x_grad, expected[1]) or dispatcher == "allgather"


def check_nothing_is_remembered(split: MoELayer) -> None:
    """Neither layer nor dispatcher keeps a unit's graph."""
    gc.disable()
    x = random(6, CONFIG.hidden_size, seed=1, dtype=torch.float64).requires_grad_()
    hidden = x * 2
    out, routing = split(hidden)
    watched = [weakref.ref(routing.weights), weakref.ref(routing.logits), weakref.ref(hidden)]
    del out, routing, hidden
    assert [ref() for ref in watched] == [None] * 3
    gc.enable()


def main(dispatcher: str) -> None:
    parallel = ParallelSection(dp=2, ep=2, moe_token_dispatcher=dispatcher, timeout_s=60)  # type: ignore[arg-type]
    with process_groups(parallel, read_launch(), "cpu") as groups:
        spec = parallel_spec(groups)
        alone, split = layers(spec, torch.float64)
        check_built(alone, split, dispatcher)
        for rows in ROWS:
            check_rows(alone, split, rows, groups)
        check_rounding(spec, groups.rank, dispatcher)
        check_nothing_is_remembered(split)
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
