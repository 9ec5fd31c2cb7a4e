"""Objectives that end or stop one process in the middle of a step, for ``[objective] name``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from harts_core.exec.objectives import Grpo, ObjectiveBatch, ObjectiveOutput

calls = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Grpo):
    """On rank 1 the second unit never comes back."""

    hang: bool = False

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        global calls
        calls += 1
        if calls == 2 and os.environ["RANK"] == "1":
            time.sleep(3600 if self.hang else 2)
            os._exit(9)
        return Grpo.__call__(self, batch)
