"""How far apart the workers end under four placements, from the cost model and from measured CPU time.

Many small groups of branching rollouts (at least 40 for 4 workers), placed by length alone
(``length-balanced``), by prefix alone (``prefix-first``), trajectory by trajectory (``balance-first``) and as
psRL does. The cost model is fitted to units of the same model on the same machine first, by CPU time, and
decides psRL's placement. All workers run in one process, event by event in turn, and so do the placements; a
worker's share of a step is the median of ``--repeats`` runs after one that warms up.

Markdown on stdout: for every placement the medians over the seeds of (max − min) / mean and max / mean of the
workers' estimated and measured times, and the measured seconds of all workers; then how the estimates and the
measurements correlate.

    python benchmarks/psrl_placements.py        # about eight CPU minutes
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from psrl import head, integers
from unit_times import Float64, Step, StepRun, alternate, run_step
from workloads import agent_workloads, lengths, shorten

from harts_core.exec.layout import build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.unit import unit_hidden
from harts_core.plan.calibration import calibration_units, cost_model_of, fit_costs
from harts_core.plan.cost_model import CostModel
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.work import relative_range
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate

PLACEMENTS = ("length-balanced", "prefix-first", "balance-first", "psrl")
COLUMNS = (
    "estimated range",
    "measured range",
    "estimated max / mean",
    "measured max / mean",
    "CPU seconds",
)


def fitted_costs(model: HybridModel, *, capacity: int, chunk: int, repeats: int) -> CostModel:
    """A cost model of this model and machine, in CPU seconds."""
    timings = []
    for unit in calibration_units(capacity=capacity, vocab_size=model.config.vocab_size, chunk=chunk):
        layout = build_unit_layout(unit.bundle, unit.tree, 0)
        forward, backward = [], []
        for _ in range(repeats + 1):  # the first one warms up
            start = time.process_time()
            hidden = unit_hidden(model, layout)
            middle = time.process_time()
            torch.autograd.backward([hidden.sum()])
            forward.append(middle - start)
            backward.append(time.process_time() - middle)
        model.zero_grad()
        timings.append(unit.timed(forward_s=min(forward[1:]), backward_s=min(backward[1:])))
    fits = fit_costs(timings)
    print(f"cost model: R² {fits[0].r_squared:.3f}, {fits[1].r_squared:.3f}", file=sys.stderr)
    return cost_model_of("cpu", *fits)


def many_groups(rows: int, seed: int, shorter: int, vocab_size: int) -> RolloutTree:
    """Steps of branching rollouts in small groups of uneven size, with all lengths divided."""
    house = agent_workloads(rows, seed)["house-agent"]
    spec = replace(
        house,
        kind="tree-step",
        vocab_size=vocab_size,
        turns=lengths(3, 6, 18, 0.6),
        rollouts=(1, 2),
        expansions=(1, 4),
        keep=0.2,
    )
    return build_tree(generate(shorten(spec, shorter)))


def typical(runs: Sequence[StepRun]) -> Float64:
    """float64 [D], a worker's seconds: the median of its shares, times the median step."""
    seconds = np.stack([run.seconds for run in runs])
    shares = np.median(seconds / seconds.mean(axis=1, keepdims=True), axis=0)
    return np.asarray(shares * np.median(seconds.mean(axis=1)), np.float64)


def correlation(a: Iterable[float], b: Iterable[float]) -> float:
    """Pearson's."""
    return float(np.corrcoef(list(a), list(b))[0, 1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=360)
    parser.add_argument("--seeds", type=integers, default=[0, 1, 2])
    parser.add_argument("--shorter", type=int, default=32, help="divide all lengths")
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = HybridModel(PRESETS["cpu-bench"], dtype=torch.float32, seed=0)
    costs = fitted_costs(model, capacity=arguments.capacity, chunk=arguments.chunk, repeats=arguments.repeats)
    estimated: dict[str, list[Float64]] = {p: [] for p in PLACEMENTS}
    measured: dict[str, list[Float64]] = {p: [] for p in PLACEMENTS}
    for seed in arguments.seeds:
        tree = many_groups(arguments.rows, seed, arguments.shorter, model.config.vocab_size)
        options = PlanOptions(
            dp=arguments.dp, capacity=arguments.capacity, chunk=arguments.chunk, cost_model=costs
        )
        steps = {p: Step(bundle=plan_tree(tree, replace(options, planner=p)), tree=tree) for p in PLACEMENTS}
        run_step(model, steps["psrl"])
        for p, runs in alternate(model, steps, arguments.repeats).items():
            units = steps[p].bundle.units
            work = units.cost_forward + units.cost_backward
            estimated[p].append(np.bincount(units.replica, work, minlength=arguments.dp).astype(np.float64))
            measured[p].append(typical(runs))
            print(
                f"seed {seed}, {len(set(tree.group_id))} groups, {tree.original_tokens:,} tokens, {p}: "
                f"{relative_range(estimated[p][-1]):.1%}, {relative_range(measured[p][-1]):.1%}",
                file=sys.stderr,
                flush=True,
            )
    print("\n".join(report(estimated, measured)))


def report(estimated: dict[str, list[Float64]], measured: dict[str, list[Float64]]) -> list[str]:
    """The table and the correlations; a worker's times by placement and seed."""
    lines = head("placement", COLUMNS)
    for p in PLACEMENTS:
        ranges = [statistics.median(map(relative_range, times[p])) for times in (estimated, measured)]
        peaks = [statistics.median(t.max() / t.mean() for t in times[p]) for times in (estimated, measured)]
        total = statistics.median(t.sum() for t in measured[p])
        cells = [*(f"{r:.1%}" for r in ranges), *(f"{m:.3f}" for m in peaks), f"{total:.1f}"]
        lines.append(f"| {p} | {' | '.join(cells)} |")
    pairs = [(e, m) for p in PLACEMENTS for e, m in zip(estimated[p], measured[p], strict=True)]
    spread = correlation((relative_range(e) for e, _ in pairs), (relative_range(m) for _, m in pairs))
    shares = correlation(
        np.concatenate([e / e.mean() for e, _ in pairs]), np.concatenate([m / m.mean() for _, m in pairs])
    )
    return [
        *lines,
        "",
        f"correlation of estimated and measured: ranges {spread:.3f} ({len(pairs)} plans), "
        f"workers' shares {shares:.3f} ({sum(len(e) for e, _ in pairs)} workers)",
    ]


if __name__ == "__main__":
    main()
