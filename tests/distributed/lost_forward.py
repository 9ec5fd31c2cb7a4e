"""``harts`` with a model that ends its process in the second forward, on rank 1."""

from __future__ import annotations

import os
import time
from typing import Any

from harts_cli.main import main
from harts_core.exec.model.decoder import HybridModel

calls = 0
whole_forward = HybridModel.forward


def forward(self: HybridModel, *args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    if calls == 2 and os.environ["RANK"] == "1":
        time.sleep(2)  # the watch writes the event once a second
        os._exit(9)
    return whole_forward(self, *args, **kwargs)


if __name__ == "__main__":
    HybridModel.forward = forward  # type: ignore[method-assign]
    main()
