"""What a synthetic workload looks like: its kind, size and length distributions, and two presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from harts_core.errors import ConfigError

KINDS = ("trajectory", "tree", "step", "step-no-think", "step-summary", "tree-step")
"""How rollouts become rows; see docs/synth.md."""
BRANCHING_KINDS = ("tree", "tree-step")
WHOLE_KINDS = ("trajectory", "tree")
"""Kinds with one row per rollout; the others have one row per kept assistant turn."""

NUM_SPECIAL = 12
"""Token ids below this are chat markup, text tokens are drawn from [NUM_SPECIAL, vocab_size)."""
MAX_ROW_TOKENS = 2**31 - 1
RANGE_MINIMA = {"action_tokens": 3, "rollouts": 1, "expansions": 0, "summary_every": 1, "summary_tokens": 0}
"""Least lower ends; an action has both marks of its thinking and something between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRange:
    """A log-normal number, rounded and clipped to [minimum, maximum].

    Attributes:
        minimum, maximum: inclusive bounds.
        median: of the log-normal.
        sigma: standard deviation of its logarithm.
    """

    minimum: int
    median: float
    maximum: int
    sigma: float

    def draw(self, rng: np.random.Generator) -> int:
        """One draw."""
        value = round(float(np.exp(rng.normal(np.log(self.median), self.sigma))))
        return min(max(value, self.minimum), self.maximum)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """Everything that decides the rows of a workload; ``generate`` is a pure function of it.

    Attributes:
        kind: one of ``KINDS``.
        rows: rows to make, ≥ 1; tasks are added until they suffice.
        seed: of everything; the system prompt depends on it alone.
        step: training step; another step has other tasks under the same system prompt.
        vocab_size: token ids are below it.
        length_scale: n: every token is followed by n − 1 dummy tokens, so all token counts grow n-fold.
        max_length: tokens of a row before length scaling; rollouts end before they exceed it.
        mean_length: rows that a filter drops anyway are chosen so that the mean length comes close to this
            (before length scaling); None: the mean is left as it falls.
        system_tokens: tokens of the shared system prompt; not a multiple of a chunk length, so that forks
            do not line up with chunk boundaries.
        task_tokens, observation_tokens: tokens of a task prompt and of one tool result.
        action_tokens: inclusive range (uniform) of an assistant turn's text.
        think_share: part of an assistant turn's text that is its thinking.
        observation_parts: probabilities of 1, 2, … tool results after a turn.
        turns: assistant turns of a rollout.
        rollouts: inclusive range (uniform) of rollouts of a task that start at its prompt.
        expansions: inclusive range of further rollouts that branch off an earlier one (branching kinds).
        fork_beta: the turn where an expansion branches off is Beta(fork_beta, fork_beta) along its source.
        keep: probability that a step row is kept (the last one of a rollout always is).
        duplicate: probability that a row has an exact token duplicate with another reward and advantage.
        interrupt: probability, per rollout of a whole-rollout kind, of a further row that is its proper
            prefix, cut after an inner turn.
        echo: probability that a sibling begins with the same text tokens; their number is geometric with
            mean ``echo_tokens``, so forks lie inside turns.
        summary_every: inclusive range of turns between two history summaries (``step-summary``).
        summary_tokens: tokens of a summary.
    """

    kind: str
    rows: int
    seed: int = 0
    step: int = 0
    vocab_size: int
    length_scale: int = 1
    max_length: int
    mean_length: int | None = None
    system_tokens: int
    task_tokens: LengthRange
    action_tokens: tuple[int, int]
    think_share: float
    observation_tokens: LengthRange
    observation_parts: tuple[float, ...]
    turns: LengthRange
    rollouts: tuple[int, int]
    expansions: tuple[int, int]
    fork_beta: float = 1.4
    keep: float
    duplicate: float
    interrupt: float
    echo: float = 0.5
    echo_tokens: float
    summary_every: tuple[int, int]
    summary_tokens: tuple[int, int]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown kind {self.kind!r}", where="kind", hint=f"one of {', '.join(KINDS)}")
        minima = {"rows": 1, "seed": 0, "step": 0, "vocab_size": NUM_SPECIAL + 4, "length_scale": 1}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if value < minimum:
                raise ConfigError(f"{name} is {value}, it must be at least {minimum}", where=name)
        for name, minimum in RANGE_MINIMA.items():
            low, high = getattr(self, name)
            if not minimum <= low <= high:
                raise ConfigError(
                    f"{name} is {low} to {high}, it must be a range from at least {minimum}", where=name
                )
        if self.vocab_size >= 2**31:
            raise ConfigError(f"vocab_size is {self.vocab_size}, token ids are int32", where="vocab_size")
        if self.max_length * self.length_scale > MAX_ROW_TOKENS:
            raise ConfigError(
                f"rows of {self.max_length} tokens scaled {self.length_scale} times do not fit int32",
                where="length_scale",
                hint=f"at most {MAX_ROW_TOKENS // self.max_length}",
            )


_PAPER = WorkloadSpec(
    kind="tree-step",
    rows=1617,
    vocab_size=150_000,
    max_length=64_000,
    system_tokens=6_003,
    task_tokens=LengthRange(minimum=600, median=1_500, maximum=5_000, sigma=0.5),
    action_tokens=(200, 600),
    think_share=0.6,
    observation_tokens=LengthRange(minimum=300, median=1_150, maximum=3_000, sigma=0.6),
    observation_parts=(0.70, 0.20, 0.10),
    turns=LengthRange(minimum=4, median=10, maximum=40, sigma=0.45),
    rollouts=(2, 4),
    expansions=(10, 16),
    keep=0.62,
    duplicate=0.004,
    interrupt=0.02,
    echo_tokens=8,
    summary_every=(5, 8),
    summary_tokens=(300, 900),
)
_PAPER_STEPS = replace(
    _PAPER,
    turns=LengthRange(minimum=5, median=15, maximum=40, sigma=0.35),
    rollouts=(8, 8),
    keep=0.75,
)
_PAPER_MEAN = 26_904

_TINY = WorkloadSpec(
    kind="tree-step",
    rows=48,
    vocab_size=512,
    max_length=400,
    system_tokens=57,
    task_tokens=LengthRange(minimum=10, median=16, maximum=30, sigma=0.3),
    action_tokens=(10, 22),
    think_share=0.5,
    observation_tokens=LengthRange(minimum=8, median=16, maximum=40, sigma=0.4),
    observation_parts=(0.8, 0.2),
    turns=LengthRange(minimum=3, median=5, maximum=8, sigma=0.3),
    rollouts=(2, 2),
    expansions=(3, 4),
    keep=0.8,
    duplicate=0.04,
    interrupt=0.05,
    echo_tokens=3,
    summary_every=(2, 3),
    summary_tokens=(8, 16),
)
_TINY_INDEPENDENT = replace(_TINY, rollouts=(4, 4))

PRESETS: Mapping[str, Mapping[str, WorkloadSpec]] = MappingProxyType(
    {
        "tiny": {
            "trajectory": replace(_TINY_INDEPENDENT, kind="trajectory", rows=24),
            "tree": replace(_TINY, kind="tree", rows=24),
            "step": replace(_TINY_INDEPENDENT, kind="step"),
            "step-no-think": replace(_TINY_INDEPENDENT, kind="step-no-think"),
            "step-summary": replace(_TINY_INDEPENDENT, kind="step-summary"),
            "tree-step": _TINY,
        },
        "paper": {
            "trajectory": replace(_PAPER, kind="trajectory", rows=256, rollouts=(16, 16)),
            "tree": replace(_PAPER, kind="tree", rows=256),
            "step": replace(_PAPER_STEPS, kind="step", mean_length=_PAPER_MEAN),
            "step-no-think": replace(_PAPER_STEPS, kind="step-no-think"),
            "step-summary": replace(_PAPER_STEPS, kind="step-summary"),
            "tree-step": replace(_PAPER, mean_length=_PAPER_MEAN),
        },
    }
)
"""Preset → kind → workload. ``tiny`` trains a toy model on a laptop in seconds; ``paper`` has the shape of
one training step of agentic coding rollouts (tree-step: 1,617 rows, 43.5M tokens)."""


def workload_spec(
    *,
    kind: str = "tree-step",
    preset: str = "tiny",
    rows: int | None = None,
    seed: int = 0,
    step: int = 0,
    vocab_size: int | None = None,
    length_scale: int = 1,
) -> WorkloadSpec:
    """A preset's workload of the given kind and size.

    Args:
        kind: one of ``KINDS``.
        preset: a key of ``PRESETS``.
        rows: rows to make; None: the preset's.
        seed, step, vocab_size, length_scale: see ``WorkloadSpec``.

    Raises:
        ConfigError: an unknown kind or preset, or a number out of range.
    """
    if preset not in PRESETS:
        raise ConfigError(
            f"unknown preset {preset!r}", where="preset", hint=f"one of {', '.join(sorted(PRESETS))}"
        )
    if kind not in KINDS:
        raise ConfigError(f"unknown kind {kind!r}", where="kind", hint=f"one of {', '.join(KINDS)}")
    base = PRESETS[preset][kind]
    return replace(
        base,
        rows=base.rows if rows is None else rows,
        vocab_size=base.vocab_size if vocab_size is None else vocab_size,
        seed=seed,
        step=step,
        length_scale=length_scale,
    )
