"""Updates on several processes, the optimizer's state on every rank or shared out, against one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harts_core.exec.config import OptimizerSection
from tests.distributed.cases import Case, Result, build_trainer, run_alone
from tests.distributed.launch import run_cases
from tests.distributed.test_checkpoint import configure, logs, train_in_two
from tests.distributed.test_train import arguments, folder

__all__ = ["folder"]  # a fixture

# eps is large against the gradients' rounding, which a small one would divide by itself
SECTION = OptimizerSection(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.5, eps=1e-3, warmup_steps=2)
MOVED = {"float32": 1e-5, "bfloat16": 1e-4, "float64": 1e-10}
"""How far a parameter's movement (in bfloat16 its float32 master's) may be from one process's, relative to
its norm. In bfloat16 a weight here and there is rounded to its other neighbour; with experts it sends tokens
elsewhere in the next step: there only one step is compared."""
CANCELLING = 4
"""How much farther the moments of ``A_log`` may be: a head's gradient is a sum over all rows that is up to
190 times smaller than its terms (docs/distributed.md): float32 in another order shows in its fifth digit."""


def case(
    dtype: str,
    *,
    sharded: bool | None,
    dp: int = 2,
    model: str = "moe",
    steps: int = 3,
    **parallel: bool | int,
) -> Case:
    return Case(
        parallel={"dp": dp, **parallel, "distributed_optimizer": sharded},  # type: ignore[arg-type]
        model=model,
        dtype=dtype,
        optimizer=SECTION,
        steps=steps,
        levels=1,
    )


def far(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """The largest relative distance between two movements of a parameter, beyond the float32 rounding of the
    parameter itself; and that every one has moved."""
    assert found.keys() == expected.keys()
    distances = []
    for name, tensor in expected.items():
        moved = tensor.double() - start[name].double()
        assert moved.norm() > 0, name
        rounding = 0.0 if tensor.dtype == torch.float64 else torch.finfo(torch.float32).eps * tensor.norm()
        error = (found[name].double() - tensor.double()).norm()
        distances.append(float((error - rounding) / moved.norm()))
    return max(distances)


def start_of(case: Case) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in build_trainer(case).optimizer.parameters()}


def exact(result: Result) -> dict[str, Tensor]:
    """The parameters, masters in place of rounded ones."""
    return {name: result.state.get(f"master.{name}", p) for name, p in result.weights.items()}


def check_moved_alike(case: Case, found: Result) -> Result:
    """Against one process, whose result is returned."""
    expected = run_alone(replace(case, parallel={}))
    assert expected.grad_norm > 2 * SECTION.max_grad_norm  # clipping is on
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=MOVED[case.dtype])
    assert far(exact(found), exact(expected), start_of(case)) < MOVED[case.dtype]
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert (found.state[name].shape, found.state[name].dtype) == (tensor.shape, tensor.dtype), name
        if name.startswith("exp_avg"):
            error = float((found.state[name] - tensor).norm() / tensor.norm())
            allowed = 2 * MOVED[case.dtype] * (CANCELLING if name.endswith("A_log") else 1)
            assert error < allowed, (name, error)
    return expected


@pytest.mark.parametrize(
    ("dtype", "ep", "model", "steps"),
    [("float32", 2, "moe", 3), ("bfloat16", 1, "moe", 1), ("bfloat16", 1, "dense", 3)],
)
def test_sharded_state(tmp_path: Path, dtype: str, ep: int, model: str, steps: int) -> None:
    """Two ranks share the state out: the same gradients to the bit and the same updates as with all of it on
    both, in half the memory; once more: the same bits."""
    shared, on_both = (
        case(dtype, sharded=sharded, ep=ep, model=model, steps=steps) for sharded in (True, False)
    )
    found, whole, again = run_cases([shared, on_both, shared], folder=tmp_path)
    expected = check_moved_alike(shared, found)
    assert all(torch.equal(found.gradients[name], g) for name, g in whole.gradients.items())
    assert far(exact(found), exact(whole), start_of(shared)) < MOVED[dtype]
    kinds = {name.split(".")[0] for name in found.state}
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == "bfloat16" else set())
    if dtype == "bfloat16":
        for name, p in found.weights.items():
            master = found.state.get(f"master.{name}")
            assert master is None or torch.equal(master.bfloat16(), p), name
    for name, tensor in found.weights.items():
        assert torch.equal(again.weights[name], tensor), name
    for name, tensor in found.state.items():
        assert torch.equal(again.state[name], tensor), name
    check_bytes(found, whole, expected)


def check_bytes(found: Result, whole: Result, alone: Result) -> None:
    """Of the state: dense parameters' is on both ranks or shared out, as are experts' where they are whole.
    Parameters start at multiples of 64 elements, buffers are filled up to multiples of 128 per rank."""
    (total,) = alone.state_bytes
    assert total == sum(tensor.nbytes for tensor in alone.state.values())
    padding = 4 * 3 * (64 * len(alone.weights) + 4 * 128)
    assert all(total / 2 <= size + padding and size <= total / 2 + padding for size in found.state_bytes)
    assert sum(found.state_bytes) == total
    assert all(size > 0.6 * total for size in whole.state_bytes)


def test_float64_keeps_its_precision(tmp_path: Path) -> None:
    double = case("float64", sharded=None, ep=2)
    (found,) = run_cases([double], folder=tmp_path)
    check_moved_alike(double, found)


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_resumed_run_is_the_run(folder: Path, form: str) -> None:
    """bfloat16, state shared out: two steps and one more leave the bytes of three steps."""
    configure(folder, "dp", dtype="bfloat16", form=form)
    for out, steps, more in (("straight", 3, ()), ("cut", 2, ()), ("cut", 3, ("--resume",))):
        command = arguments(folder, "dp.toml", out, steps, *more)
        assert train_in_two(folder, *command) == [0, 0], logs(folder)
    straight, cut = (folder / out / "checkpoints" / "step-000003" for out in ("straight", "cut"))
    names = sorted(path.name for path in straight.iterdir())
    assert names == sorted(path.name for path in cut.iterdir())
    assert any(name.endswith((".safetensors", ".distcp")) for name in names)
    for name in names:
        assert (straight / name).read_bytes() == (cut / name).read_bytes(), name


FOUR = {
    "dp2 tp2 sp ep2": case("float32", sharded=True, tp=2, sp=True, ep=2),
    "dp2 tp2 sp": case("float32", sharded=True, tp=2, sp=True),
    "pp2 dp2, bfloat16": case("bfloat16", sharded=True, pp=2, model="dense"),
}


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    for given, found in zip(FOUR.values(), run_cases(list(FOUR.values()), folder=tmp_path), strict=True):
        check_moved_alike(given, found)
