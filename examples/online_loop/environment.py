"""A toy environment: the agent sees a symbol and has to answer with the next one, turn after turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_SYMBOLS = 8
VOCAB_SIZE = 2 * NUM_SYMBOLS + 1
START = 2 * NUM_SYMBOLS
"""Tokens: observed symbols [0, 8), answers [8, 16), and the start token of every prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The symbols that the environment will show, one per turn: int [turns]."""

    name: str
    symbols: tuple[int, ...]

    @classmethod
    def draw(cls, name: str, turns: int, rng: np.random.Generator) -> Task:
        """A random task."""
        return cls(name=name, symbols=tuple(rng.integers(0, NUM_SYMBOLS, turns).tolist()))

    def reward(self, answers: list[int]) -> float:
        """Share of the turns answered with the successor of their symbol."""
        wanted = [NUM_SYMBOLS + (symbol + 1) % NUM_SYMBOLS for symbol in self.symbols]
        return sum(a == w for a, w in zip(answers, wanted, strict=True)) / len(wanted)
