"""From rollouts to rows: one sampling rule per kind, duplicates, interrupted rollouts, advantages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from harts_core.trees.build import Trajectory
from harts_core.trees.synth.rollouts import (
    DUMMY,
    HEADER_TOKENS,
    Logprobs,
    Rollout,
    Task,
    TaskWriter,
    Tokens,
    Turn,
)
from harts_core.trees.synth.spec import WHOLE_KINDS, WorkloadSpec

ADVANTAGE_EPSILON = 1e-6
_SURPLUS = 0.12
"""Share of a task's rows that are dropped to steer the mean length (``WorkloadSpec.mean_length``)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sample:
    """A row before its tokens are put together: a rollout up to the action of turn ``turn``."""

    rollout: Rollout
    turn: int
    num_tokens: int
    final: bool


def generate(spec: WorkloadSpec) -> Iterator[Trajectory]:
    """The rows of a workload, task by task: a pure function of ``spec``, one task in memory at a time.

    Yields exactly ``spec.rows`` rows. If ``spec.mean_length`` is set, the rows that the filter drops are
    chosen so that the mean of all rows so far stays near it. A trajectory_id is the rollout's name, followed
    by ``#<step>`` for a step of it; group_id is the task; ``step`` is the index of the assistant turn, None
    for whole rollouts; ``reward`` is the step's own, or the whole rollout's. There is one advantage per row:
    (R − mean) / (std + 1e-6) of the rollout's total reward R over its task's rollouts, each counted once.
    """
    num_rows = num_tokens = index = 0
    while num_rows < spec.rows:
        writer = TaskWriter(spec, index)
        task = writer.write_task()
        samples = _candidates(spec, task, writer)
        drops = max(0, len(samples) - (spec.rows - num_rows))
        if spec.mean_length is None:
            samples = _drop_random(samples, drops, writer.rng)
        else:
            drops = max(drops, round(_SURPLUS * len(samples)))
            target = spec.mean_length * (num_rows + len(samples) - drops) - num_tokens
            samples = _drop_towards(samples, drops, target)
        yield from _render_task(spec, task, samples)
        num_rows += len(samples)
        num_tokens += sum(s.num_tokens for s in samples)
        index += 1


def _candidates(spec: WorkloadSpec, task: Task, writer: TaskWriter) -> list[_Sample]:
    """The task's rows in arrival order, with duplicates and interrupted rollouts after their originals."""
    samples = []
    for rollout in task.rollouts:
        last = len(rollout.turns) - 1
        chosen = [last]
        if spec.kind not in WHOLE_KINDS:
            inner = range(rollout.first_own, last)
            chosen = [t for t in inner if writer.rng.random() < spec.keep] + chosen
        elif last > 0 and writer.rng.random() < spec.interrupt:
            chosen = [last, int(writer.rng.integers(last))]
        for turn in chosen:
            size = sum(len(piece) for piece, _ in _pieces(spec.kind, task, rollout, turn))
            samples.append(_Sample(rollout=rollout, turn=turn, num_tokens=size, final=turn == last))
    return _name_twins(spec, samples, writer)


def _name_twins(spec: WorkloadSpec, samples: list[_Sample], writer: TaskWriter) -> list[_Sample]:
    """Make duplicates, and give them and interrupted rollouts a name and rewards of their own.

    A duplicate is a row of another rollout that sampled the same tokens up to that turn and got another
    reward.
    """

    def twin(sample: _Sample, suffix: str) -> _Sample:
        origin, stop = sample.rollout, sample.turn + 1
        rewards = (*origin.rewards[: stop - 1], *writer.turn_rewards(1))
        other = Rollout(
            name=f"{origin.name}{suffix}{sample.turn}", turns=origin.turns[:stop], rewards=rewards
        )
        return replace(sample, rollout=other)

    result = []
    for sample in samples:
        if spec.kind in WHOLE_KINDS and not sample.final:
            sample = twin(sample, "-cut")
        result.append(sample)
        if writer.rng.random() < spec.duplicate:
            result.append(replace(twin(sample, "-twin"), final=False))
    return result


def _drop_random(samples: list[_Sample], drops: int, rng: np.random.Generator) -> list[_Sample]:
    """Drop rows of inner turns at random, whole rollouts' last rows only when no others are left."""
    order = sorted(rng.permutation(len(samples)).tolist(), key=lambda i: samples[i].final)
    dropped = set(order[:drops])
    return [s for i, s in enumerate(samples) if i not in dropped]


def _drop_towards(samples: list[_Sample], drops: int, target_tokens: int) -> list[_Sample]:
    """Drop rows (inner turns first) so that the tokens of the rest come close to ``target_tokens``."""
    left = sum(s.num_tokens for s in samples) - target_tokens  # tokens still to be dropped
    pool = list(samples)
    for remaining in range(drops, 0, -1):
        inner = [s for s in pool if not s.final] or pool
        wanted = left / remaining
        nearest = min(inner, key=lambda s: abs(s.num_tokens - wanted))
        pool.remove(nearest)
        left -= nearest.num_tokens
    return pool


def _pieces(kind: str, task: Task, rollout: Rollout, turn: int) -> list[tuple[Tokens, Turn | None]]:
    """The row up to the action of ``turn``: messages in order, each with its turn if it is trained."""
    turns = rollout.turns
    first = 0
    pieces: list[tuple[Tokens, Turn | None]] = [(task.prompt, None)]
    if kind == "step-summary":
        first = max((t for t in range(turn + 1) if turns[t].summary is not None), default=0)
        summary = turns[first].summary
        if summary is not None:
            pieces.append((summary, None))
    for t in range(first, turn):
        action = turns[t].action
        if kind == "step-no-think":
            start, stop = turns[t].think
            action = np.concatenate([action[:start], action[stop:]])
        pieces.append((action, turns[t] if kind in WHOLE_KINDS else None))
        pieces.append((turns[t].observation, None))
    pieces.append((turns[turn].action, turns[turn]))
    return pieces


def _render_task(spec: WorkloadSpec, task: Task, samples: list[_Sample]) -> Iterator[Trajectory]:
    twins = [s.rollout for s in samples if all(s.rollout is not r for r in task.rollouts)]
    returns = np.array([r.total_reward for r in (*task.rollouts, *twins)])
    mean, scale = float(returns.mean()), float(returns.std()) + ADVANTAGE_EPSILON
    for sample in samples:
        rollout, turn = sample.rollout, sample.turn
        stepwise = spec.kind not in WHOLE_KINDS
        tokens, spans, logprobs = _render(spec, _pieces(spec.kind, task, rollout, turn))
        yield Trajectory(
            trajectory_id=f"{rollout.name}#{turn}" if stepwise else rollout.name,
            group_id=task.name,
            step=turn if stepwise else None,
            tokens=tokens,
            loss_spans=spans,
            old_logprobs=logprobs,
            reward=rollout.rewards[turn] if stepwise else rollout.total_reward,
            advantages=np.array([(rollout.total_reward - mean) / scale], np.float32),
            policy_version=spec.step,
        )


def _render(spec: WorkloadSpec, pieces: list[tuple[Tokens, Turn | None]]) -> tuple[Tokens, Tokens, Logprobs]:
    """Tokens, loss spans [n, 2] and log-probs of a row, lengths scaled.

    Scaling by n puts n − 1 dummy tokens after every token and scales the spans alike: dummies inside a
    trained span are trained, with the log-prob of the token before them.
    """
    n = spec.length_scale
    spans, logprobs, position = [], [], 0
    for piece, turn in pieces:
        if turn is not None:
            start = position + HEADER_TOKENS
            spans.append((start, start + len(turn.logprobs)))
            logprobs.append(turn.logprobs)
        position += len(piece)
    tokens = np.concatenate([piece for piece, _ in pieces])
    if n > 1:
        scaled = np.full((len(tokens), n), DUMMY, np.int32)
        scaled[:, 0] = tokens
        tokens = scaled.reshape(-1)
    return tokens, np.array(spans, np.int32) * n, np.repeat(np.concatenate(logprobs), n)
