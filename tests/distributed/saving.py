"""``harts`` with an interfering save, in one rank: ``python -m tests.distributed.saving HOW train …``.

``killed-N``: rank N is killed while it writes its part of the second checkpoint. ``counted``: what the ranks
send one another while they save is written to ``RUN/sent-RANK.json``: the bytes of every tensor but those
that objects were pickled to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harts_cli.main import main

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "broadcast", "gather"),
    *("isend", "reduce_scatter_tensor", "scatter", "send"),
)


def kill_in_second_save(rank: str) -> None:
    from harts_core.exec.parallel import sharded_save

    write, saves = sharded_save._write_item, 0

    def interfering(*arguments: Any) -> Any:
        nonlocal saves
        saves += arguments[1].tell() == 0  # the first tensor of a file
        if saves == 2 and arguments[1].tell() > 0 and os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*arguments)

    sharded_save._write_item = interfering


def count_in_saves(folder: Path) -> None:
    from harts_core.exec import checkpoint

    save, sent = checkpoint.save_sharded, []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            for value in arguments:
                for tensor in value if isinstance(value, list) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.uint8:
                        sent.append(tensor.nbytes)
            return function(*arguments, **named)

        return counted

    def watched(*arguments: Any, **named: Any) -> Any:
        kept = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, function in kept.items():
            setattr(dist, name, counting(function))
        try:
            return save(*arguments, **named)
        finally:
            for name, function in kept.items():
                setattr(dist, name, function)
            (folder / f"sent-{os.environ['RANK']}.json").write_text(json.dumps(sent))

    checkpoint.save_sharded = watched


if __name__ == "__main__":
    how = sys.argv.pop(1)
    if how.startswith("killed-"):
        kill_in_second_save(how[-1])
    else:
        count_in_saves(Path(sys.argv[sys.argv.index("--out") + 1]))
    main()
