"""What a training step reports, and the JSONL file that keeps it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harts_core.errors import CorruptFileError
from harts_core.files import atomic_file, naming_output


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        step: counted from 1.
        loss: the step's loss, over all consumers of all replicas.
        grad_norm: global gradient norm before clipping.
        lr: learning rate used.
        original_tokens: S, token occurrences of the step's trajectories.
        compact_tokens: tokens computed.
        trained_positions: log-probabilities in the loss.
        units: units executed, consumers and producers.
        rounds: packed linear-attention calls per KDA layer.
        interface_bytes: most bytes held at a time for units that import: shared rows and their gradients.
        cache_allocated_bytes: of all blocks that were made for them.
        cache_hit_rate: share of the block bytes read that were in fast memory in time.
        cache_offloaded_bytes: moved out to the host under the memory budget.
        cache_over_budget_bytes: the most by which what one unit needs at once exceeded it.
        seconds: clock time of the step.
        tokens_per_s: original tokens per second.
        objective: the objective's own metrics and, of layers with experts, the router's.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    original_tokens: int
    compact_tokens: int
    trained_positions: int
    units: int
    rounds: int
    interface_bytes: int
    cache_allocated_bytes: int
    cache_hit_rate: float
    cache_offloaded_bytes: int
    cache_over_budget_bytes: int
    seconds: float
    tokens_per_s: float
    objective: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """A flat JSON-able record, the objective's metrics after the others; null where one is not finite."""
        values: dict[str, Any] = asdict(self)
        own = values.pop("objective")
        return values | {name: value if math.isfinite(value) else None for name, value in own.items()}


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, flushed as it is written.

    Args:
        path: the file; continued if it exists.
        after_step: lines of later steps are dropped first (a resumed run repeats them).

    Raises:
        CorruptFileError: the file has a line that is no record, other than a cut-off last one.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self.path = path
        kept = [line for step, line in _read_lines(path) if step <= after_step]
        with atomic_file(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def append(self, metrics: StepMetrics) -> None:
        """Write one step and flush it to disk.

        Raises:
            DataError: the operating system refuses.
        """
        with naming_output(self.path), open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(metrics.to_dict(), allow_nan=False) + "\n")
            f.flush()
            os.fsync(f.fileno())


def num_logged(path: Path) -> int:
    """Steps in a metrics file; 0 where there is none.

    Raises:
        CorruptFileError: as ``MetricsLog``.
    """
    return len({step for step, _ in _read_lines(path)})


def _read_lines(path: Path) -> list[tuple[int, str]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    complete, cut_off = lines[:-1], lines[-1]
    del cut_off  # the process was killed while writing it
    records = []
    for number, line in enumerate(complete, 1):
        try:
            records.append((int(json.loads(line)["step"]), line))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError("not a metrics record", where=f"{path}, line {number}") from error
    return records
