"""Groups for files that name none: consecutive blocks of rollouts, or rollouts with the same prompt."""

from __future__ import annotations

import hashlib

from harts_core.errors import ConfigError, DataError
from harts_core.trees.build import Trajectory


class GroupBlocks:
    """Consecutive blocks of ``size`` rollouts of one file; the rows of one rollout count once.

    Args:
        file: the file's name, for group names and messages.
        size: rollouts of a group.
    """

    def __init__(self, file: str, size: int) -> None:
        self._file = file
        self._size = size
        self._order: dict[str, int] = {}

    def group_of(self, rollout: str) -> str:
        """The group of a rollout; a new rollout takes the next place."""
        return f"{self._file}:{self._order.setdefault(rollout, len(self._order)) // self._size}"

    def check_complete(self) -> None:
        """Refuse a last block that is too small.

        Raises:
            DataError: the file's rollouts are not a multiple of the size.
        """
        if len(self._order) % self._size:
            what = f"{len(self._order)} rollouts are not a multiple of the group size {self._size}"
            raise DataError(what, where=self._file)


def prompt_group(trajectory: Trajectory) -> str:
    """A name for the tokens before the first trained one.

    Raises:
        ConfigError: a step-wise row, whose tokens before the first trained one are not the prompt.
    """
    if trajectory.step is not None:
        raise ConfigError(
            "--group-by-prompt needs whole trajectories, and these rows are steps",
            where=f"trajectory {trajectory.trajectory_id}",
            hint="use --group-key or --group-size",
        )
    prompt = trajectory.tokens[: int(trajectory.loss_spans[0, 0])]
    return "prompt-" + hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest()[:16]
