"""The fla backend without a GPU: in Triton's interpreter, and compiled for one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow


def run_module(module: str, *arguments: str, **environment: str) -> str:
    """stdout of ``python -m module``: kernels and fla are imported in a process of their own only."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(autouse=True)
def _packages() -> None:
    """Only looked for, not imported: fla would warn about the missing GPU, and must come after the shim."""
    for name in ("triton", "fla", "ml_dtypes"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize(
    ("gates", "dtype", "bound"),
    [("bounded", "float32", 3e-6), ("unbounded", "float32", 3e-6), ("bounded", "bfloat16", 1e-2)],
)
def test_values_states_and_gradients(gates: str, dtype: str, bound: float) -> None:
    errors = json.loads(run_module("tests.numerics.kda.fla_in_interpreter", gates, dtype))
    assert set(errors) == {"o", "states", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}
    for name, error in errors.items():
        assert error < bound, name


@pytest.mark.parametrize("gates", ["model-bounded", "model-unbounded"])
def test_a_model_passes_the_bound_of_its_gates(gates: str) -> None:
    """And runs a unit with forks and replay as ``naive`` does: hidden states and every weight's gradient."""
    errors = json.loads(run_module("tests.numerics.kda.fla_in_interpreter", gates, "float32"))
    assert len(errors) > 20
    for name, error in errors.items():
        assert error < 2e-5, (name, error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compact_is_bitwise_expanded(dtype: str) -> None:
    equal = json.loads(run_module("tests.numerics.kda.fla_in_interpreter", "bitwise", dtype))
    assert len(equal) >= 2
    assert all(equal.values()), equal


def test_state_kernels_compile_for_sm_90() -> None:
    compiled = json.loads(
        run_module(
            "tests.numerics.kda.compile_state_kernels", TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="1"
        )
    )
    assert len(compiled) == 8
    for name, kernel in compiled.items():
        assert kernel["cubin_bytes"] > 0, name
        assert kernel["shared_bytes"] <= 227 * 1024, name
