"""Writing a sharded checkpoint: every rank its own parts, through Megatron-core's dist_checkpointing.

Tensors are described by Megatron-core's ShardedTensors: whole shape, and where in it a rank's part lies. Of
parts that several ranks hold, its fully parallel strategy lets one write each, spread evenly. What is written
is its ``torch_dist`` format, which its own loader reads too.

Its own writer copies all of a rank's parts to the host, forks processes that write them, and keeps a server
process that outlives a killed rank. The one here writes in this process, one tensor at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemWriter,
    SerializationFormat,
    _write_item,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from harts_core.errors import DataError
from harts_core.exec.weights.regions import Ints, Region
from harts_core.files import os_reason


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a rank holds of a tensor.

    Attributes:
        tensor: the part.
        region: where it lies in the whole.
        shape: of the whole.
    """

    tensor: Tensor
    region: Region
    shape: Ints


def save_parts(folder: Path, parts: Mapping[str, list[Part]]) -> None:
    """Write tensors of which every rank has some parts; all ranks call this together.

    Args:
        folder: an empty one that every rank sees.
        parts: by the tensor's name. Parts of two ranks are the same or do not overlap.

    Raises:
        DataError: the operating system refuses a rank's write; every rank raises it.
    """
    state = {
        f"{name}#{i}": _sharded(name, part) for name, found in parts.items() for i, part in enumerate(found)
    }
    with _process_group():
        try:
            dist_checkpointing.save(
                state,
                str(folder),
                FullyParallelSaveStrategyWrapper(_StreamingSave("torch_dist", 1)),
                validate_access_integrity=False,  # done by the strategy, when every part has one writer
            )
        except CheckpointException as failed:
            rank, error = _first_failure(failed)
            if not isinstance(error, OSError):
                raise
            where = f"{folder}, rank {rank}"
            raise DataError(f"the output cannot be written ({os_reason(error)})", where=where) from failed
        except RuntimeError as error:  # torch.save, of common.pt: the system's reason is lost
            if "iostream error" not in str(error):
                raise
            where = str(folder / "common.pt")
            raise DataError("the output cannot be written (no space left?)", where=where) from error


def files_of_rank(folder: Path) -> list[Path]:
    """What this rank has written."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return sorted(folder.glob(f"__{rank}_*{DEFAULT_SUFFIX}"))


def _sharded(name: str, part: Part) -> ShardedTensor:
    return ShardedTensor(
        key=name,
        data=part.tensor.detach(),
        dtype=part.tensor.dtype,
        local_shape=part.region.shape,
        global_shape=part.shape,
        global_offset=part.region.start,
        axis_fragmentations=None,  # no regular grid: shares of the optimizer's state begin anywhere
        replica_id=0,  # the strategy chooses among the ranks that have this part
    )


class _StreamingSave(SaveShardedStrategy):  # type: ignore[misc]
    """Writes the parts that are this rank's to write, one after another."""

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """See Megatron-core: ``sharded_state_dict`` is a flat dict here."""
        own: dict[str, list[CheckpointableShardedTensor]] = {}
        for part in sharded_state_dict.values():
            if part.replica_id == 0:
                own.setdefault(part.key, []).append(CheckpointableShardedTensor.from_sh_ten(part))
        save(
            {key: found[0] if len(found) == 1 else LocalShardsContainer(found) for key, found in own.items()},
            storage_writer=_Writer(checkpoint_dir, sync_files=True),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


class _Writer(FileSystemWriter):
    """torch's, holding one tensor on the host at a time; and no path or random number in the index."""

    def storage_meta(self) -> None:
        """Nothing."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write this rank's file."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        if plan.items:
            with open(os.path.join(self.path, name), "wb") as f:
                for item in plan.items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)
                    tensor = tensor.detach().cpu().contiguous()
                    if tensor.untyped_storage().nbytes() != tensor.nbytes:
                        tensor = tensor.clone()  # torch.save would write all of what it is a view of
                    format_ = SerializationFormat.TORCH_SAVE
                    with _os_error_first():
                        results.append(_write_item(self.transforms, f, tensor, item, name, format_))
                f.flush()
                os.fsync(f.fileno())
        done.set_result(results)
        return done


@contextmanager
def _os_error_first() -> Iterator[None]:
    """Raise what the operating system has refused, not what torch.save makes of it.

    After a failed write torch.save closes its archive, and fails at that with a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _first_failure(failed: CheckpointException) -> tuple[int, BaseException]:
    rank = min(failed.failures)
    return rank, failed.failures[rank][0]


@contextmanager
def _process_group() -> Iterator[None]:
    """The job's; in a single process one of its own for as long as needed."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
