from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support import SHARED_DATA


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def shared_data() -> Path:
    """The folder of real rollouts; skips the test where it is not beside the checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip("real data is not beside this checkout")
    return SHARED_DATA
