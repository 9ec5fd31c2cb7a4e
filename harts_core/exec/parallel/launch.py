"""Which process this is, from the environment of torchrun or srun. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from harts_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One of the job's processes.

    Attributes:
        rank: in [0, world_size).
        world_size: processes of the job.
        local_rank: index among the processes of this machine; selects the GPU (``gpu_of``).
        address, port: where rank 0 listens for the others.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """The launch that the environment describes: torchrun's, else that of a Slurm job step, else one process.

    torchrun (and everything that follows its convention) sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT. srun sets SLURM_PROCID, SLURM_LOCALID and SLURM_STEP_NUM_TASKS; rank 0's machine is the first
    of SLURM_STEP_NODELIST and the port is derived from the job and step ids, unless MASTER_ADDR and
    MASTER_PORT say otherwise.

    Args:
        environment: variables; None: those of this process.

    Raises:
        ConfigError: a variable is missing or is no number.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = Launch(
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0,
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else 0,
        )
    elif "SLURM_STEP_NUM_TASKS" in env:
        launch = _slurm_launch(env)
    else:
        return Launch()
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(
            f"rank {launch.rank} is outside a job of {launch.world_size} processes", where="environment"
        )
    if launch.world_size > 1 and not launch.port:
        raise ConfigError(
            "the environment names no MASTER_PORT", where="environment", hint="start the job with torchrun"
        )
    return launch


def _slurm_launch(env: Mapping[str, str]) -> Launch:
    address = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    if "MASTER_PORT" in env:
        port = _number(env, "MASTER_PORT")
    else:  # jobs that share a machine, and the steps of a job, need ports of their own
        job = _number(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else 0
        step = _number(env, "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else 0
        port = 20_000 + (job * 16 + step) % 10_000
    return Launch(
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(env, "SLURM_LOCALID"),
        address=address,
        port=port,
    )


def gpu_of(launch: Launch, num_gpus: int) -> int:
    """Which of the visible GPUs is the process's.

    Args:
        launch: of the process.
        num_gpus: that it sees: all of the machine, or one where the scheduler shows it its own only.

    Raises:
        ConfigError: the machine has more processes than GPUs.
    """
    if num_gpus == 1:  # if two processes really shared it, NCCL would refuse
        return 0
    if launch.local_rank >= num_gpus:
        raise ConfigError(
            f"process {launch.local_rank} of this machine has no GPU of its own: {num_gpus} are visible",
            where=f"rank {launch.rank}",
            hint="start one process per GPU on every machine",
        )
    return launch.local_rank


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-05,9],cpu1`` → ``gpu03``."""
    match = re.match(r"(?P<prefix>[^\[,]+)(\[(?P<first>\d+)[^\]]*\](?P<suffix>[^,]*))?", node_list)
    if match is None:
        raise ConfigError(f"cannot read the node list {node_list!r}", where="SLURM_STEP_NODELIST")
    return match["prefix"] + (match["first"] or "") + (match["suffix"] or "")


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise ConfigError(f"the environment has no {name}", where="environment") from None
    except ValueError:
        raise ConfigError(f"{name} is {env[name]!r}, not a number", where="environment") from None
