"""The whole pipeline on a toy workload, through the real commands: run it with ``make demo``.

Rollouts are made up, ingested and planned twice: with shared prefixes (harts-l1) and without (expanded).
Both plans train the same model on the same rollouts, so the losses must agree; the seconds do not.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "demo"
PLANNERS = ("harts-l1", "expanded")
STEPS = 3
TOLERANCE = 1e-4
"""Largest relative difference of the losses: float32 rounding, carried through the optimizer's steps."""


def harts(*arguments: str, quiet: bool = False) -> None:
    """Show a command line and run it in the project's folder; stop the demo if it fails."""
    print(f"\n$ harts {shlex.join(arguments)}", flush=True)
    output = subprocess.DEVNULL if quiet else None
    command = [sys.executable, "-m", "harts_cli.main", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=output, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Run the demo; exit 1 if the losses of the two plans differ."""
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    (ROOT / FOLDER).mkdir()
    rows, tree = f"{FOLDER}/rows.parquet", f"{FOLDER}/tree.arrow"
    harts("synth", "-o", rows, "--preset", "tiny", "--kind", "tree-step", "--seed", "0")
    harts("ingest", rows, "-o", tree, "--vocab-size", "512")
    for planner in PLANNERS:
        plan = f"{FOLDER}/plan-{planner}"
        harts("plan", tree, "-o", plan, "--planner", planner, "--dp", "2", "--capacity", "2048")
    harts("inspect", "plan", f"{FOLDER}/plan-{PLANNERS[0]}", "--tree", tree)
    for planner in PLANNERS:
        run = ("--config", "examples/demo.toml", "--out", f"{FOLDER}/run-{planner}", "--steps", str(STEPS))
        harts("train", f"{FOLDER}/plan-{planner}", "--tree", tree, *run, "--json", quiet=True)
    compare({planner: read_metrics(planner) for planner in PLANNERS})


def read_metrics(planner: str) -> list[dict[str, Any]]:
    """The steps of a run, from its metrics.jsonl."""
    lines = (ROOT / FOLDER / f"run-{planner}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def compare(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print both losses of every step, the largest difference, and the ratio of the median seconds."""
    shared, expanded = (runs[planner] for planner in PLANNERS)
    print(f"\n{'step':>4}  {'loss, ' + PLANNERS[0]:>18}  {'loss, ' + PLANNERS[1]:>18}")
    worst = 0.0
    for a, b in zip(shared, expanded, strict=True):
        print(f"{a['step']:>4}  {a['loss']:>18.8f}  {b['loss']:>18.8f}")
        worst = max(worst, abs(a["loss"] - b["loss"]) / max(abs(b["loss"]), 1e-12))
    seconds = [statistics.median(step["seconds"] for step in run) for run in (shared, expanded)]
    tokens = [run[0]["compact_tokens"] for run in (shared, expanded)]
    print(f"largest relative difference of the losses: {worst:.1e}")
    print(f"tokens computed per step: {tokens[0]:,} and {tokens[1]:,}, {tokens[1] / tokens[0]:.2f}× fewer")
    print(f"seconds per step (median): {seconds[0]:.2f} and {seconds[1]:.2f}: ", end="")
    print(f"{seconds[1] / seconds[0]:.2f}× faster")
    if worst > TOLERANCE:
        sys.exit(f"the losses differ by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
