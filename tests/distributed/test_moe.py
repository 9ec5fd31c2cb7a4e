"""Megatron-core's expert layer with the model's parts, on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_expert_parallel_layer(tmp_path: Path, dispatcher: str) -> None:
    codes = run(["-m", "tests.distributed.moe_layer", dispatcher], 2, folder=tmp_path)
    logs = "\n".join((tmp_path / f"rank-{rank}.log").read_text() for rank in range(2))
    assert codes == [0, 0], logs
