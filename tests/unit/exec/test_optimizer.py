from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from harts_core.errors import DataError, NonFiniteError
from harts_core.exec.checkpoint_tensors import OPTIMIZER, restore_optimizer
from harts_core.exec.config import OptimizerSection
from harts_core.exec.model.spec import LOCAL_SPEC
from harts_core.exec.optimizer import Optimizer, learning_rate
from harts_core.exec.weights.safetensors_file import write_safetensors


def make_model(dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(6, 5), "norm": nn.LayerNorm(5)})
    model["linear"].to(dtype)
    return model


def run_steps(model: nn.ModuleDict, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 6, generator=generator).to(model["linear"].weight.dtype)
        model["norm"](model["linear"](x).float()).pow(2).mul(torch.arange(5.0)).sum().backward()
        optimizer.step(step)


def test_schedules() -> None:
    warm = OptimizerSection(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(warm, s) for s in (0, 1, 3, 4, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = OptimizerSection(
        learning_rate=1.0, min_learning_rate=0.2, schedule="linear", warmup_steps=2, decay_steps=10
    )
    assert [learning_rate(linear, s) for s in (2, 6, 10, 11)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = OptimizerSection(learning_rate=1.0, schedule="cosine", decay_steps=8)
    expected = [(1 + math.cos(math.pi * s / 8)) / 2 for s in (0, 3, 8)]
    assert [learning_rate(cosine, s) for s in (0, 3, 8)] == pytest.approx(expected)


def test_one_step_is_adamw_with_decoupled_decay() -> None:
    """Written out: m̂ = g, v̂ = g² after one step, so the update is sign-like; decay only on matrices."""
    model = make_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = OptimizerSection(learning_rate=0.1, weight_decay=0.5, max_grad_norm=0.0)
    optimizer = Optimizer(model.named_parameters(), config)
    for p in model.parameters():
        p.grad = torch.linspace(-1, 2, p.numel()).reshape(p.shape)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert optimizer.step(0) == 0.1
    for name, p in model.named_parameters():
        g = gradients[name]
        decayed = before[name] * (1 - 0.1 * 0.5) if p.dim() > 1 else before[name]
        torch.testing.assert_close(p.detach(), decayed - 0.1 * g / (g.abs() + 1e-8))
        assert p.grad is None


def test_convolutions_are_not_decayed() -> None:
    p = nn.Parameter(torch.ones(3, 1, 4))
    optimizer = Optimizer(
        [("model.layers.0.attention.q_conv1d.weight", p)], OptimizerSection(weight_decay=0.5)
    )
    p.grad = torch.zeros_like(p)
    optimizer.step(0)
    assert torch.equal(p.detach(), torch.ones(3, 1, 4))


def test_clipping_scales_all_gradients_to_the_norm() -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    optimizer = Optimizer([("p", p), ("q", q)], OptimizerSection(max_grad_norm=1.0))
    p.grad, q.grad = torch.tensor([2.0, 4.0]), torch.tensor([4.0])
    assert optimizer.grad_norm() == pytest.approx(6.0)
    held = p.grad
    optimizer.step(0)
    torch.testing.assert_close(held, torch.tensor([2.0, 4.0]) / 6)


def test_non_finite_gradients_update_nothing() -> None:
    model = make_model()
    optimizer = Optimizer(model.named_parameters(), OptimizerSection())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model["norm"].weight.grad = torch.full((5,), float("nan"))
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        optimizer.step(0)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_bfloat16_gradients_accumulate_in_float32() -> None:
    """256 + 1 in bfloat16 is 256; over a thousand microbatches the small parts must not be lost."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Optimizer([("p", p)], OptimizerSection())
    (p * 256).sum().backward()
    for _ in range(100):
        p.sum().backward()
    assert p.grad is None
    assert optimizer.gradients()["p"].dtype == torch.float32
    assert optimizer.gradients()["p"].item() == 356


def test_optimizers_of_one_model_see_the_same_gradients() -> None:
    """Whatever the parameter's dtype: a new optimizer may follow, or stand beside, an earlier one."""
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.zeros(1, dtype=dtype))
        first, second = (Optimizer([("p", p)], OptimizerSection()) for _ in range(2))
        (p * 256).sum().backward()
        p.sum().backward()
        assert first.gradient("p").item() == second.gradient("p").item() == 257
        second.step(0)
        assert first.grad_norm() == 0
        assert p.item() != 0


def test_bfloat16_updates_below_its_precision_add_up() -> None:
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer([("p", p)], OptimizerSection(learning_rate=1e-4))
    for step in range(100):  # 1 − 1e-4 rounds back to 1 in bfloat16
        (p * 1).sum().backward()
        optimizer.step(step)
    assert p.item() == pytest.approx(0.99, abs=0.004)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_state_continues_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    config = OptimizerSection(learning_rate=0.01, weight_decay=0.1, schedule="cosine", decay_steps=9)
    straight = make_model(dtype)
    run_steps(straight, Optimizer(straight.named_parameters(), config), range(4))

    first = make_model(dtype)
    optimizer = Optimizer(first.named_parameters(), config)
    run_steps(first, optimizer, range(2))
    write_safetensors(tmp_path / OPTIMIZER, dict(optimizer.named_state()))
    second = make_model(dtype)
    second.load_state_dict(first.state_dict())
    restored = Optimizer(second.named_parameters(), config)
    restore_optimizer(tmp_path, restored, LOCAL_SPEC)
    run_steps(second, restored, range(2, 4))
    for name, p in straight.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name


def test_many_steps_equal_torchs_adamw() -> None:
    """With the decay on matrices only, as here, and a rate that changes."""
    config = OptimizerSection(
        learning_rate=0.01, weight_decay=0.1, max_grad_norm=1.5, schedule="cosine", decay_steps=12
    )
    ours, theirs = make_model(torch.float64).double(), make_model(torch.float64).double()
    optimizer = Optimizer(ours.named_parameters(), config)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for step in range(15):
        for model in (ours, theirs):
            for i, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + i)
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(config, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.max_grad_norm)
        assert optimizer.grad_norm() == pytest.approx(float(norm))
        adamw.step()
        optimizer.step(step)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)  # torch adds 1e-6 to the norm it clips by


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        (torch.float32, {"exp_avg.other": torch.zeros(1)}, r"does not fit the model: exp_avg\.other"),
        (torch.float32, {"exp_avg.linear.weight": torch.ones(1)}, r"exp_avg\.linear\.weight has shape \[1\]"),
        (torch.float32, {"exp_avg.norm.bias": torch.ones(5).double()}, "dtype F64, not .* F32"),
        (torch.bfloat16, {}, r"does not fit the model: master\.linear"),
    ],
)
def test_foreign_state_is_refused(
    tmp_path: Path, dtype: torch.dtype, change: dict[str, torch.Tensor], message: str
) -> None:
    state = dict(Optimizer(make_model().named_parameters(), OptimizerSection()).named_state())
    state["exp_avg_sq.norm.weight"].fill_(3)
    write_safetensors(tmp_path / OPTIMIZER, state | change)
    optimizer = Optimizer(make_model(dtype).named_parameters(), OptimizerSection())
    with pytest.raises(DataError, match=message) as error:
        restore_optimizer(tmp_path, optimizer, LOCAL_SPEC)
    assert error.value.where == str(tmp_path / OPTIMIZER)
    assert not any(values.any() for name, values in optimizer.named_state() if "avg" in name)
