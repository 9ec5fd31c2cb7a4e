"""Tests marked ``slow`` here start four or more processes, or wait for timeouts: only ``make
test-distributed`` runs them."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HARTS_TEST_DISTRIBUTED") == "1":
        return
    for item in items:
        if "distributed" in item.path.parts and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="set HARTS_TEST_DISTRIBUTED=1 (make test-distributed)"))
