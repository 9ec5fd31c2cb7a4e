"""Files saved with torch.save, read as plain data only (no pickled code), where torch is installed."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harts_core.errors import DataError, MissingBackendError
from harts_core.trees.sources.item import Item


def read_torch(path: Path) -> Iterator[Item]:
    """The one record of a torch file, tensors as numpy arrays.

    Raises:
        MissingBackendError: torch is not installed.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise MissingBackendError(
            "reading .pt files needs torch", where=str(path), hint='pip install "harts[train]"'
        ) from error
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        what = f"cannot be loaded as plain data ({str(error).splitlines()[0]})"
        hint = "save dicts, lists, numbers, strings and tensors only"
        yield Item(number=0, unit="file", content=DataError(what, hint=hint))
        return
    if not isinstance(value, dict):
        error_item = DataError(f"holds a {type(value).__name__}, not a dict")
        yield Item(number=0, unit="file", content=error_item)
        return
    yield Item(number=0, unit="file", content=_plain(value))


def _plain(value: Any) -> Any:
    """The same structure with numpy arrays for tensors (bfloat16 as float32)."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return (
            [_plain(v) for v in value] if any(not isinstance(v, int | float) for v in value) else list(value)
        )
    if hasattr(value, "detach"):
        tensor = value.detach()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return value
