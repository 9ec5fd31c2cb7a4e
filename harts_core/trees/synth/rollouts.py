"""The rollouts of one synthetic task: multi-turn conversations, some of them branching off others.

A turn is an assistant message (header, thinking, answer, end) and, except after the last one, the tool
results that it got. Rollouts that branch share the ``Turn`` objects of their common history, so shared
tokens are equal by construction and are drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts_core.trees.synth.spec import BRANCHING_KINDS, NUM_SPECIAL, WorkloadSpec

MESSAGE_START, MESSAGE_END, NEWLINE = 1, 2, 3
SYSTEM, USER, ASSISTANT, TOOL, SUMMARY = 4, 5, 6, 7, 8
THINK_START, THINK_END, DUMMY = 9, 10, 11

HEADER_TOKENS = 3
"""A message begins with MESSAGE_START, its role and NEWLINE, and ends with MESSAGE_END and NEWLINE."""
_END = np.array([MESSAGE_END, NEWLINE], np.int32)

Tokens = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One assistant turn.

    Attributes:
        action: int32, the assistant message.
        think: the half-open range of ``action`` that is its thinking, markup included.
        logprobs: float32, of the sampled tokens ``action[HEADER_TOKENS:-1]`` (the header and the newline
            after the end token are written by the chat template, not sampled).
        observation: int32, the tool message that followed; empty if the rollout was cut off.
        summary: int32, a message that replaces the history before this turn, or None.
    """

    action: Tokens
    think: tuple[int, int]
    logprobs: Logprobs
    observation: Tokens
    summary: Tokens | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """A conversation: its turns (the first ``first_own`` are another rollout's) and a reward per turn."""

    name: str
    turns: tuple[Turn, ...]
    rewards: tuple[float, ...]
    first_own: int = 0

    @property
    def total_reward(self) -> float:
        """The reward of the whole rollout."""
        return sum(self.rewards)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """One prompt group: the shared prompt and its rollouts."""

    name: str
    prompt: Tokens
    rollouts: tuple[Rollout, ...]


class TaskWriter:
    """Draws the text, lengths and rewards of one task from its own random stream."""

    def __init__(self, spec: WorkloadSpec, index: int) -> None:
        self._spec = spec
        self.rng = np.random.default_rng([spec.seed, spec.step, index, 1])
        # Summaries have a stream of their own, so that every step-wise kind sees the same rollouts.
        self._summary_rng = np.random.default_rng([spec.seed, spec.step, index, 2])
        self._solve_rate = float(self.rng.beta(1.0, 1.0))
        self.name = f"step{spec.step}-task{index:04d}"

    def write_task(self) -> Task:
        """The task's prompt, its rollouts from the start, then its expansions."""
        spec = self._spec
        task_message = message(USER, self._text(spec.task_tokens.draw(self.rng)))
        prompt = np.concatenate([system_prompt(spec), task_message])
        rollouts: list[Rollout] = []
        for _ in range(self._uniform(spec.rollouts)):
            sibling = rollouts[-1].turns[0] if rollouts else None
            turns = self._grow(len(prompt), 0, spec.turns.draw(self.rng), sibling)
            rollouts.append(self._rollout(len(rollouts), turns))
        if spec.kind in BRANCHING_KINDS:
            for _ in range(self._uniform(spec.expansions)):
                source = rollouts[int(self.rng.integers(len(rollouts)))]
                if len(source.turns) > 1:
                    rollouts.append(self._expand(len(rollouts), source, len(prompt)))
        return Task(name=self.name, prompt=prompt, rollouts=tuple(rollouts))

    def turn_rewards(self, num_turns: int) -> tuple[float, ...]:
        """A small reward for every turn; the last one adds the outcome, 0 or 1."""
        rewards = self.rng.normal(0.0, 0.05, num_turns)
        rewards[-1] += float(self.rng.random() < self._solve_rate)
        return tuple(rewards.tolist())

    def _rollout(self, index: int, turns: list[Turn]) -> Rollout:
        return Rollout(
            name=f"{self.name}-r{index:02d}", turns=tuple(turns), rewards=self.turn_rewards(len(turns))
        )

    def _expand(self, index: int, source: Rollout, prompt_tokens: int) -> Rollout:
        """A rollout that shares ``source``'s turns before a random one and goes its own way from there."""
        count = len(source.turns)
        beta = self._spec.fork_beta
        fork = min(1 + int(self.rng.beta(beta, beta) * (count - 1)), count - 1)
        head = source.turns[:fork]
        left = 1 + int(np.ceil(self._spec.turns.draw(self.rng) * (1 - fork / count)))
        history_tokens = prompt_tokens + sum(len(t.action) + len(t.observation) for t in head)
        own = self._grow(history_tokens, fork, fork + left, source.turns[fork])
        return Rollout(
            name=f"{self.name}-r{index:02d}",
            turns=(*head, *own),
            rewards=(*source.rewards[:fork], *self.turn_rewards(len(own))),
            first_own=fork,
        )

    def _grow(self, history_tokens: int, first: int, stop: int, sibling: Turn | None) -> list[Turn]:
        """Turns [first, stop) after a history, at least one, fewer where the length limit is reached.

        Every turn that ends early keeps room for a longest action after its observation, so a history that
        has an observation can always be continued (expansions rely on it).
        """
        turns: list[Turn] = []
        until_summary = self._until_summary()
        stop = min(stop, self._spec.turns.maximum)
        for index in range(first, max(stop, first + 1)):
            summary = None
            if until_summary == 0:
                size = self._summary_rng.integers(*self._spec.summary_tokens, endpoint=True)
                summary = message(SUMMARY, self._text(int(size), self._summary_rng))
                until_summary = self._until_summary()
            until_summary -= 1
            turn = self._turn(sibling, summary)
            sibling = None
            turns.append(turn)
            history_tokens += len(turn.action) + len(turn.observation)
            if index + 1 < stop and history_tokens + self._longest_action > self._spec.max_length:
                break
        return turns

    def _until_summary(self) -> int:
        low, high = self._spec.summary_every
        return int(self._summary_rng.integers(low, high, endpoint=True))

    @property
    def _longest_action(self) -> int:
        return self._spec.action_tokens[1] + HEADER_TOKENS + len(_END)

    def _turn(self, sibling: Turn | None, summary: Tokens | None) -> Turn:
        spec = self._spec
        size = self._uniform(spec.action_tokens)
        think_stop = max(3, round(size * spec.think_share))
        body = self._text(size)
        body[0], body[think_stop - 1] = THINK_START, THINK_END
        logprobs = -self.rng.gamma(0.5, 0.7, size + 1).astype(np.float32)
        if sibling is not None and self.rng.random() < spec.echo:
            # The sibling's first thinking tokens again; the text goes on differently after them.
            own_room = min(think_stop, sibling.think[1] - HEADER_TOKENS) - 2
            echoed = 1 + min(int(self.rng.geometric(1 / spec.echo_tokens)), own_room)
            body[:echoed] = sibling.action[HEADER_TOKENS : HEADER_TOKENS + echoed]
            logprobs[:echoed] = sibling.logprobs[:echoed]
        parts = 1 + int(self.rng.choice(len(spec.observation_parts), p=spec.observation_parts))
        results = [self._text(spec.observation_tokens.draw(self.rng)) for _ in range(parts)]
        return Turn(
            action=message(ASSISTANT, body),
            think=(HEADER_TOKENS, HEADER_TOKENS + think_stop),
            logprobs=logprobs,
            observation=message(TOOL, np.concatenate(results)),
            summary=summary,
        )

    def _text(self, size: int, rng: np.random.Generator | None = None) -> Tokens:
        rng = rng or self.rng
        return rng.integers(NUM_SPECIAL, self._spec.vocab_size, size, dtype=np.int32)

    def _uniform(self, bounds: tuple[int, int]) -> int:
        return int(self.rng.integers(*bounds, endpoint=True))


def message(role: int, text: Tokens) -> Tokens:
    """A chat message: header, text, end."""
    return np.concatenate([np.array([MESSAGE_START, role, NEWLINE], np.int32), text, _END])


def system_prompt(spec: WorkloadSpec) -> Tokens:
    """The system prompt of every task and training step of a seed."""
    rng = np.random.default_rng([spec.seed, 0])
    text = rng.integers(NUM_SPECIAL, spec.vocab_size, spec.system_tokens, dtype=np.int32)
    return message(SYSTEM, text)
