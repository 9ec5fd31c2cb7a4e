"""The process groups of a job, by Megatron-core's rank order: tensor, then data, then pipeline."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from harts_core.errors import ExecError
from harts_core.exec.config import Device, ParallelSection
from harts_core.exec.model.spec import Stage
from harts_core.exec.parallel.cpu import allow_cpu
from harts_core.exec.parallel.launch import Launch, gpu_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """The groups that this process belongs to.

    Attributes:
        parallel: the degrees.
        rank: of this process among all.
        tensor: the ranks of one replica that share its layers.
        data: the ranks that hold the same parameters, experts aside.
        expert: the ranks that hold different experts.
        expert_data: the ranks that hold the same experts.
        tensor_and_data: all ranks of a pipeline stage.
        stage: which pipeline stage this rank is of.
        pipeline: the ranks that hold the other stages of this rank's layers' parts, in order.
        activations, gradients: for the stage before (−1) and after (1) the pair of ranks that only exchanges
            activations or gradients; absent at the ends.
    """

    parallel: ParallelSection
    rank: int
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_data: dist.ProcessGroup
    tensor_and_data: dist.ProcessGroup
    stage: Stage
    pipeline: dist.ProcessGroup
    activations: dict[int, dist.ProcessGroup]
    gradients: dict[int, dist.ProcessGroup]

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank speaks for its stage; rank 0 does for the first."""
        return self.tensor_and_data.rank() == 0


@contextmanager
def process_groups(parallel: ParallelSection, launch: Launch, device: Device) -> Iterator[Groups]:
    """Join the job's process groups: gloo on the CPU, nccl on CUDA; leave them at the end.

    Raises:
        ConfigError: this machine has more processes than GPUs.
        ExecError: the other processes did not come within ``timeout_s``.
    """
    if device == "cuda":
        torch.cuda.set_device(gpu_of(launch, torch.cuda.device_count()))
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=connect_store(parallel, launch, "groups"),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=datetime.timedelta(seconds=parallel.timeout_s),
        )
    except RuntimeError as error:
        raise ExecError(
            f"the job's {launch.world_size} processes did not meet ({_first_line(error)})",
            where=f"rank {launch.rank}, {launch.address}:{launch.port}",
        ) from error
    if device == "cpu":
        allow_cpu()
    yield make_groups(parallel, launch.rank)
    leave_groups()  # not after an error: a process that waits for a lost one would wait here again
    dist.destroy_process_group()


def connect_store(parallel: ParallelSection, launch: Launch, prefix: str) -> Store:
    """A connection to the job's key-value store: torchrun's, or one that rank 0 holds."""
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(
        launch.address,
        launch.port,
        is_master=launch.is_main and not held_by_torchrun and prefix == "groups",
        timeout=datetime.timedelta(seconds=parallel.timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"harts/{restarts}/{prefix}", store)


def make_groups(parallel: ParallelSection, rank: int) -> Groups:
    """Split the running default process group; ``leave_groups`` undoes it."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=parallel.timeout_s / 60,
        create_gloo_process_groups=False,
    )
    activations = _neighbours(parallel, rank)
    gradients = _neighbours(parallel, rank)
    return Groups(
        parallel=parallel,
        rank=rank,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
        tensor_and_data=parallel_state.get_tensor_and_data_parallel_group(),
        stage=Stage(parallel_state.get_pipeline_model_parallel_rank(), parallel.pp),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        activations=activations,
        gradients=gradients,
    )


def _neighbours(parallel: ParallelSection, rank: int) -> dict[int, dist.ProcessGroup]:
    """A group for each pair of neighbouring stages; every rank makes all of them, in the same order."""
    width = parallel.dp * parallel.tp
    timeout = datetime.timedelta(seconds=parallel.timeout_s)
    mine = {}
    for before in range((parallel.pp - 1) * width):
        after = before + width
        group = dist.new_group([before, after], timeout=timeout)
        if rank in (before, after):
            mine[1 if rank == before else -1] = group
    return mine


def leave_groups() -> None:
    """Destroy the groups of ``make_groups``; the default group stays."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
