"""The job that a run is a part of: one process, or a rank of many."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from harts_core.errors import MissingBackendError
from harts_core.exec.config import Device, OptimizerSection, ParallelSection
from harts_core.exec.model.spec import LOCAL_SPEC, ModelSpec
from harts_core.exec.optimizer import Optimizer, StepOptimizer
from harts_core.exec.parallel.launch import Launch
from harts_core.exec.parallel.ranks import ONE_PROCESS, Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.parallel.groups import Groups

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What a run needs of it.

    Attributes:
        is_main: whether this process writes the run's files and reports.
        spec: parts of the model.
        ranks: the processes that share a step.
        groups: the process groups; None in a single process.
    """

    is_main: bool = True
    spec: ModelSpec = LOCAL_SPEC
    ranks: Ranks = ONE_PROCESS
    groups: Groups | None = None

    def optimizer(self, model: HybridModel, config: OptimizerSection, *, sharded: bool) -> StepOptimizer:
        """The optimizer of this process's model.

        Args:
            model: with its weights.
            config: the ``[optimizer]`` table.
            sharded: whether the data-parallel ranks share its state out.
        """
        if self.groups is None:
            return Optimizer(model.named_parameters(), config)
        from harts_core.exec.parallel.gradients import DdpGradients
        from harts_core.exec.parallel.sharded_optimizer import ShardedOptimizer

        if sharded:
            return ShardedOptimizer(model, config, self.groups)
        gradients = DdpGradients(model, self.groups, sharded=False)
        return Optimizer(model.named_parameters(), config, gradients)

    def collect(self, tensors: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors by name on the main process; every process calls it, the others get nothing.

        Args:
            tensors: name, this rank's part, and the parameter or buffer that it lies like.
        """
        if self.groups is None:
            return {name: tensor for name, tensor, _ in tensors}
        from harts_core.exec.parallel.state import gather_whole, join_stages

        whole = {}
        for name, tensor, like in tensors:
            gathered = gather_whole(tensor, like, self.groups)
            if self.groups.is_first_of_stage:
                whole[name] = gathered
        found = join_stages(whole, self.groups)
        return {name: tensor.cpu() for name, tensor in found.items()}

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.groups is None else self.groups.rank

    @property
    def num_processes(self) -> int:
        """Of the job."""
        return 1 if self.groups is None else self.groups.parallel.num_processes

    def gather(self, value: T) -> list[T]:
        """A small value of every process, in rank order, on all of them."""
        if self.groups is None:
            return [value]
        found: list[T] = [value] * self.num_processes
        torch.distributed.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Until every process is here."""
        if self.groups is not None:
            torch.distributed.barrier()


ALONE = Job()
"""A single process."""


@contextmanager
def importing_megatron(purpose: str) -> Iterator[None]:
    """Import in the block what is built on Megatron-core.

    Raises:
        MissingBackendError: it is not installed.
    """
    # which optional packages it lacks, and which of its calls torch has renamed, is not the user's affair
    warnings.filterwarnings("ignore", message="(?s).*(Transformer Engine|Apex)", category=UserWarning)
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)  # its default
    try:
        yield
    except ImportError as error:
        raise MissingBackendError(
            f"{purpose} needs {error.name}, which is not installed", hint="pip install 'harts[train]'"
        ) from error


@contextmanager
def join_job(parallel: ParallelSection, launch: Launch, device: Device) -> Iterator[Job]:
    """The job; with many processes their groups, until the end of the block.

    Raises:
        ExecError: the other processes did not come, or one of them died or hangs.
        MissingBackendError: Megatron-core is not installed.
    """
    if launch.world_size == 1:
        yield ALONE
        return
    with importing_megatron("a job of several processes"):
        from harts_core.exec.parallel.grid import ProcessGrid
        from harts_core.exec.parallel.groups import connect_store, process_groups
        from harts_core.exec.parallel.spec import parallel_spec
        from harts_core.exec.parallel.watch import Watch
    with process_groups(parallel, launch, device) as groups:
        store = connect_store(parallel, launch, "events")
        watch = Watch(store, launch.rank, launch.world_size, parallel.timeout_s)
        with watch.watching():
            yield Job(
                is_main=launch.is_main,
                spec=parallel_spec(groups),
                ranks=ProcessGrid(groups, torch.device(device), watch.at),
                groups=groups,
            )
