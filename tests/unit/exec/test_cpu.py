"""Jobs on the CPU, also of machines with a GPU."""

from __future__ import annotations

import pytest
import torch

from harts_core.exec.parallel.cpu import allow_cpu, cuda_means_cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_cuda_means_cpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with cuda_means_cpu(CPU):
        made = torch.zeros(2, device="cuda")
        assert made.type() == "torch.cuda.FloatTensor"
    assert made.device == CPU
    with cuda_means_cpu(torch.device("cuda")):
        assert made.type() == "torch.FloatTensor"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_allow_cpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for name in ("current_device", "synchronize", "current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))  # restored behind the test
    allow_cpu()
    assert torch.zeros(2, device=torch.cuda.current_device()).device == CPU
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
