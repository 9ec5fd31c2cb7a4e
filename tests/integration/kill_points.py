"""A program for test_resume_windows: training runs that are killed (SIGKILL) at a given point.

    python -m tests.integration.kill_points FOLDER

A point is a call that touches the disk or one event of a step. Imports are shared: every run is a fork.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch

from harts_core.exec.run import RunOptions, train_run
from harts_core.exec.trainer import Trainer
from harts_core.exec.windows import UnitExecutor
from harts_core.plan.bundle_file import read_bundle
from harts_core.plan.validate import validate_plan
from harts_core.trees.tree_file import read_tree

FRACTIONS = (0.01, 0.35, 0.65, 0.97)
"""Where runs are killed, of all points of an uninterrupted run."""


def run(folder: Path, out: str, kill_at: int | None) -> int:
    """Fork, run (resuming), die at point ``kill_at``; return the number of points, or −1 if killed."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if kill_at is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return -1
        assert os.waitstatus_to_exitcode(status) == 0, "the run failed"
        return int(text)
    code = 1
    try:
        points = itertools.count()

        def point() -> None:
            if next(points) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*arguments: Any, **options: Any) -> Any:
                point()
                result = call(*arguments, **options)
                point()
                return result

            return wrapper

        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        safetensors.torch.save_file = counted(safetensors.torch.save_file)
        UnitExecutor.run = counted(UnitExecutor.run)  # type: ignore[method-assign]
        plans = tuple(folder / name for name in json.loads((folder / "plans.json").read_text()))
        train_run(
            RunOptions(
                plans=plans,
                trees=tuple(sorted(folder.glob("tree-*.arrow"))),
                config=folder / "train.toml",
                out=folder / out,
                resume=True,
                steps=5,
            )
        )
        os.write(write, str(next(points)).encode())
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    folder = Path(sys.argv[1])
    assert Trainer.step_on  # imported here, with everything that a run needs, for all forks
    bundle, tree = read_bundle(folder / "step-1"), read_tree(folder / "tree-0.arrow")
    validate_plan(bundle, tree)  # compiled once
    total = run(folder, "straight", None)
    done = []
    for i, fraction in enumerate(FRACTIONS):
        assert run(folder, f"run-{i}", int(fraction * total)) == -1
        again = run(folder, f"run-{i}", 40)  # early in the resumed run too
        assert again in (-1, *range(41))
        assert run(folder, f"run-{i}", None) > 0
        done.append(f"run-{i}")
    json.dump({"points": total, "runs": done}, sys.stdout)


if __name__ == "__main__":
    main()
