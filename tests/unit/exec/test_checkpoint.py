"""Which configuration a run may be resumed under."""

from __future__ import annotations

import pytest

from harts_core.errors import ConfigError
from harts_core.exec.checkpoint import check_same_config
from harts_core.exec.config import TrainConfig

FREE = {
    "threads",
    "recompute",
    "memory_budget_bytes",
    "checkpoint_every",
    "checkpoint_format",
    "keep_checkpoints",
}
"""Keys of [runtime]."""
KEYS = [(table, key) for table, values in TrainConfig().to_dict().items() for key in values]


@pytest.mark.parametrize(("table", "key"), KEYS)
def test_what_a_resumed_run_may_change(table: str, key: str) -> None:
    stored, current = TrainConfig().to_dict(), TrainConfig().to_dict()
    check_same_config(stored, current, "train.toml")
    current[table][key] = "other"
    if table == "parallel" or (table == "runtime" and key in FREE):
        check_same_config(stored, current, "train.toml")
        return
    with pytest.raises(ConfigError, match=rf"\[{table}\] {key}: .* → 'other'") as caught:
        check_same_config(stored, current, "train.toml")
    assert caught.value.hint == "to change it, start another run with --checkpoint"


def test_every_change_is_named() -> None:
    stored, current = TrainConfig().to_dict(), TrainConfig().to_dict()
    del stored["runtime"]["linear_calls"]  # a key of a later version
    current["optimizer"]["eps"] = 1.0
    with pytest.raises(ConfigError, match=r"\[optimizer\] eps: 1e-08 → 1.0; \[runtime\] linear_calls: None"):
        check_same_config(stored, current, "train.toml")
