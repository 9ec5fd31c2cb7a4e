"""A whole online RL loop on a toy environment: sample branching rollouts, plan, train, again.

    python examples/online_loop/online_loop.py --out loop/

trains the same small model twice, on ``harts`` plans and on ``expanded`` ones, writes both reward curves to
``rewards.csv`` (and ``rewards.png`` where matplotlib is installed) and draws them on the terminal.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from environment import START, VOCAB_SIZE, Task
from sampler import Rollout, sample_token

from harts_core.exec.config import OptimizerSection
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.plan.options import PlanOptions
from harts_core.plan.step import plan_step
from harts_core.trees.build import Trajectory

MODES = ("harts", "expanded")
MODEL = replace(
    PRESETS["cpu-dense"],
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=2,
    layer_group_size=2,
    initializer_range=0.15,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Attributes:
    steps: updates.
    tasks: prompt groups per step.
    turns: answers of a rollout.
    branch_at: turns before which every running rollout becomes two.
    learning_rate, seed: of the run.
    """

    steps: int = 100
    tasks: int = 6
    turns: int = 6
    branch_at: tuple[int, ...] = (0, 2, 4)
    learning_rate: float = 5e-3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """One step of the loop: mean reward of its rollouts, tokens before and after sharing, seconds."""

    reward: float
    original_tokens: int
    computed_tokens: int
    train_s: float


def sample_rollouts(
    model: HybridModel, tasks: list[Task], options: LoopOptions, generator: torch.Generator
) -> list[tuple[Task, list[Rollout]]]:
    """Rollouts of every task: they branch, and all running ones are sampled together."""
    running = [(task, [Rollout(group=task.name, tokens=[START])]) for task in tasks]
    for turn in range(options.turns):
        if turn in options.branch_at:
            running = [
                (task, [r for old in rollouts for r in (old, old.branch())]) for task, rollouts in running
            ]
        for task, rollouts in running:
            for rollout in rollouts:
                rollout.observe(task.symbols[turn])
        sample_token(model, [rollout for _, rollouts in running for rollout in rollouts], generator)
    return running


def to_trajectories(task: Task, rollouts: list[Rollout]) -> tuple[list[Trajectory], list[float]]:
    """A group's training rows: answers are trained, advantages are relative to the group."""
    rewards = [task.reward([rollout.tokens[t] for t in rollout.sampled]) for rollout in rollouts]
    advantages = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-6)
    rows = [
        Trajectory(
            trajectory_id=f"{task.name}/{i}",
            group_id=task.name,
            tokens=rollout.tokens,
            loss_spans=[(t, t + 1) for t in rollout.sampled],
            old_logprobs=rollout.logprobs,
            advantages=[advantage],
            reward=reward,
        )
        for i, (rollout, advantage, reward) in enumerate(zip(rollouts, advantages, rewards, strict=True))
    ]
    return rows, rewards


def run_loop(mode: str, options: LoopOptions) -> list[LoopStep]:
    """Train a new model online; ``mode`` is the planner of its steps."""
    model = HybridModel(MODEL, dtype=torch.float32, seed=options.seed)
    settings = OptimizerSection(learning_rate=options.learning_rate)
    trainer = Trainer(model, Grpo(), Optimizer(model.named_parameters(), settings))
    plan_options = PlanOptions(dp=1, capacity=256, planner=mode, chunk=16)
    rng, generator = np.random.default_rng(options.seed), torch.Generator().manual_seed(options.seed)
    history = []
    for step in range(options.steps):
        tasks = [Task.draw(f"{step}-{i}", options.turns, rng) for i in range(options.tasks)]
        trajectories, rewards = [], []
        for task, rollouts in sample_rollouts(model, tasks, options, generator):
            rows, values = to_trajectories(task, rollouts)
            trajectories += rows
            rewards += values
        tree, plan = plan_step(trajectories, plan_options, metadata={"vocab_size": VOCAB_SIZE})
        start = time.perf_counter()
        metrics = trainer.step(plan, tree)
        history.append(
            LoopStep(
                reward=float(np.mean(rewards)),
                original_tokens=metrics.original_tokens,
                computed_tokens=metrics.compact_tokens,
                train_s=time.perf_counter() - start,
            )
        )
        if sys.stderr.isatty():
            print(f"\r{mode} step {step + 1}: reward {history[-1].reward:.2f}", end="", file=sys.stderr)
    return history


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Means over the last ``width`` values."""
    return [float(np.mean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]


def draw(curves: dict[str, list[float]], height: int = 12, width: int = 72) -> str:
    """All curves in one character plot, rewards 0 to 1 upwards; * where they meet."""
    marks = dict(zip(curves, "he", strict=False))
    grid = [[" "] * width for _ in range(height)]
    for name, values in curves.items():
        shown = smooth(values)
        for column in range(width):
            value = shown[column * (len(shown) - 1) // max(1, width - 1)]
            line = height - 1 - round(value * (height - 1))
            grid[line][column] = marks[name] if grid[line][column] == " " else "*"
    lines = [f"{1 - i / (height - 1):4.2f} |{''.join(row)}" for i, row in enumerate(grid)]
    legend = ", ".join(f"{mark} {name}" for name, mark in marks.items())
    return "\n".join([*lines, "     +" + "-" * width, f"      steps; {legend}, * both"])


def write_curves(out: Path, histories: dict[str, list[LoopStep]]) -> None:
    """rewards.csv, and rewards.png where matplotlib is installed."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "rewards.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *histories])
        rewards = [[f"{step.reward:.4f}" for step in history] for history in histories.values()]
        writer.writerows([i + 1, *values] for i, values in enumerate(zip(*rewards, strict=True)))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, history in histories.items():
        axes.plot(range(1, len(history) + 1), smooth([step.reward for step in history]), label=name)
    axes.set(xlabel="step", ylabel="mean reward (5 steps)", ylim=(0, 1))
    axes.legend()
    figure.savefig(out / "rewards.png", dpi=150)


def main() -> None:
    """Both modes, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of rewards.csv and rewards.png")
    parser.add_argument("--steps", type=int, default=LoopOptions().steps)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = LoopOptions(steps=arguments.steps, seed=arguments.seed)
    histories = {mode: run_loop(mode, options) for mode in MODES}
    write_curves(arguments.out, histories)
    print(draw({mode: [step.reward for step in history] for mode, history in histories.items()}))
    for mode, history in histories.items():
        rewards = [step.reward for step in history]
        tokens = [sum(getattr(s, f) for s in history) for f in ("original_tokens", "computed_tokens")]
        print(
            f"{mode:<9} reward {np.mean(rewards[:10]):.2f} (first 10 steps) to {np.mean(rewards[-10:]):.2f} "
            f"(last 10); {tokens[0]:,} tokens, {tokens[1]:,} computed; "
            f"{sum(step.train_s for step in history):.1f} s in training steps"
        )


if __name__ == "__main__":
    main()
