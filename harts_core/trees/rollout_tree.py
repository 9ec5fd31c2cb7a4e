"""The rollout tree in memory: front-coded trajectories in lexicographic order with their RL metadata.

The file format (Arrow IPC) is read and written by :mod:`harts_core.trees.tree_file`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.trees.ragged import Ragged, offsets_from_lengths, read_only


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutTree:
    """N trajectories in lexicographic token order (ties by trajectory_id), each storing only its suffix.

    Row i shares its first ``lcp[i]`` tokens with row i − 1 and stores tokens [lcp[i], length[i]). The
    suffixes together are exactly the token trie. Read a file with ``read_tree``; build one from unsorted
    trajectories with ``build_tree``. Both check every invariant; this class only locks its arrays.

    Attributes:
        trajectory_id: N unique strings.
        group_id: N strings, the prompt group that advantages are relative to.
        length: int32 [N], tokens of the trajectory, ≥ 1.
        lcp: int32 [N], tokens shared with the previous row; 0 for row 0.
        suffix: int32 values; row i holds tokens [lcp[i], length[i]).
        loss_spans: int32 values, start and stop alternating; row i holds its sorted, disjoint, half-open
            trained spans. Position t is trained: log p(token t | tokens < t) enters the loss; 1 ≤ t.
        old_logprobs: float32, one per trained position (null rows allowed), or None: column absent.
        ref_logprobs: likewise.
        advantages: float32, one per trained position or one for the whole trajectory; or None: absent.
        reward: float32 [N], NaN = null, or None.
        step: int32 [N] with ``step_valid`` bool [N], or None.
        policy_version: int32 [N] with ``policy_version_valid`` bool [N], or None.
        metadata: the ``harts`` schema metadata (format, version, vocab_size, tokenizer, sampling, sources,
            dropped counts, content_sha256), JSON-able.
    """

    trajectory_id: tuple[str, ...]
    group_id: tuple[str, ...]
    length: npt.NDArray[np.int32]
    lcp: npt.NDArray[np.int32]
    suffix: Ragged
    loss_spans: Ragged
    old_logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    advantages: Ragged | None = None
    reward: npt.NDArray[np.float32] | None = None
    step: npt.NDArray[np.int32] | None = None
    step_valid: npt.NDArray[np.bool_] | None = None
    policy_version: npt.NDArray[np.int32] | None = None
    policy_version_valid: npt.NDArray[np.bool_] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays: dict[str, Any] = {"length": np.int32, "lcp": np.int32, "reward": np.float32, "step": np.int32}
        arrays |= {"policy_version": np.int32, "step_valid": np.bool_, "policy_version_valid": np.bool_}
        for name, dtype in arrays.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, read_only(np.asarray(value, dtype)))

    @property
    def num_rows(self) -> int:
        """N, the number of trajectories."""
        return len(self.length)

    @property
    def original_tokens(self) -> int:
        """S, all token occurrences of all trajectories."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def trie_tokens(self) -> int:
        """C(all), the tokens of the trie."""
        return len(self.suffix.values)

    @property
    def content_sha256(self) -> str:
        """Hash over the canonical column values; a plan names the tree it was made for by it."""
        return str(self.metadata["content_sha256"])

    @cached_property
    def trained_counts(self) -> npt.NDArray[np.int64]:
        """int64 [N], trained positions of each row."""
        values = self.loss_spans.values.astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(values[1::2] - values[::2])])
        bounds = self.loss_spans.offsets // 2
        return np.asarray(ends[bounds[1:]] - ends[bounds[:-1]])

    def trained_positions(self, row: int) -> npt.NDArray[np.int32]:
        """int32, the trained positions of a row in order."""
        spans = self.loss_spans[row].reshape(-1, 2)
        if not len(spans):
            return np.empty(0, np.int32)
        return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in spans])

    @cached_property
    def _previous_smaller(self) -> npt.NDArray[np.int64]:
        """int64 [N], the nearest earlier row with a strictly smaller lcp; −1 if there is none."""
        result = np.full(self.num_rows, -1, np.int64)
        stack: list[int] = []
        lcp = self.lcp.tolist()
        for i, l in enumerate(lcp):
            while stack and lcp[stack[-1]] >= l:
                stack.pop()
            if stack:
                result[i] = stack[-1]
            stack.append(i)
        return result

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int32]:
        """int32, tokens [start, stop) of a trajectory, gathered from the suffixes it runs through.

        Args:
            row: 0 ≤ row < N.
            start: first token position.
            stop: one past the last; None: the whole trajectory.
        """
        stop = int(self.length[row]) if stop is None else stop
        if not 0 <= start <= stop <= self.length[row]:
            raise IndexError(f"tokens [{start}, {stop}) of row {row}, which has {self.length[row]}")
        out = np.empty(stop - start, np.int32)
        need, source = stop, row  # tokens [need, stop) are filled
        while need > start:
            own = int(self.lcp[source])
            if own < need:  # the source row's suffix holds [own, need)
                low = max(own, start)
                out[low - start : need - start] = self.suffix[source][low - own : need - own]
                need = own
            source = int(self._previous_smaller[source])
        return out

    def all_tokens(self) -> Ragged:
        """Every trajectory in full, int32: S tokens in memory. For tests, exports and small trees."""
        offsets = offsets_from_lengths(self.length)
        values = np.empty(int(offsets[-1]), np.int32)
        for i in range(self.num_rows):
            a, l = int(offsets[i]), int(self.lcp[i])
            if l:
                values[a : a + l] = values[offsets[i - 1] : offsets[i - 1] + l]
            values[a + l : offsets[i + 1]] = self.suffix[i]
        return Ragged(offsets=offsets, values=values)
