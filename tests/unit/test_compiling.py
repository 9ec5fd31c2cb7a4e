"""Compilations are noticed once and timed; kernels that are loaded or known are not."""

from __future__ import annotations

import numba

from harts_core.compiling import compile_clock


def test_compilations_are_timed_and_announced_once() -> None:
    @numba.njit
    def inner(x: float) -> float:
        return x + 1

    @numba.njit
    def outer(x: float) -> float:
        return inner(x) * 2

    calls: list[int] = []
    with compile_clock(lambda: calls.append(1)) as clock:
        assert clock.seconds == 0
        outer(1.5)
        first = clock.seconds
        outer(2.5)
        assert clock.seconds == first > 0
        outer(3)
    assert clock.seconds > first
    assert calls == [1]
    outer(True)
    assert calls == [1]


def test_nothing_to_compile_says_nothing() -> None:
    with compile_clock(lambda: None) as clock:
        pass
    assert clock.seconds == 0
