"""Speed and memory of building a rollout tree, against a plain numpy copy of the same tokens.

    python benchmarks/ingest.py                    # 43.4M tokens, the shape of one training step
    python benchmarks/ingest.py --preset tiny      # a few thousand tokens, to try it

Makes the workload with ``harts synth``, then measures, in one process and interleaved:

copy    one ``numpy`` copy of all tokens;
build   ``TreeBuilder``: tokens in memory to a checked, hashed rollout tree;
ingest  the Parquet file to a rollout-tree file on disk (decompression, checks, hashes and writing included).

and ``harts ingest`` as a program of its own, for its peak memory and start-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.ingest import ingest
from harts_core.trees.tree_file import write_tree

CHILD = """
import sys
from harts_cli.main import main
try:
    main()
finally:
    status = open("/proc/self/status").read()  # VmHWM starts anew with the program, unlike ru_maxrss
    sys.stderr.write(status.split("VmHWM:")[1].split()[0])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="paper", choices=["tiny", "paper"])
    parser.add_argument("--kind", default="tree-step")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.parquet"
        synth = ["synth", "-o", str(rows), "--kind", options.kind, "--preset", options.preset]
        subprocess.run([sys.executable, "-m", "harts_cli.main", *synth], check=True, capture_output=True)
        result = measure(rows, options.repeats)
        result |= run_program(rows, Path(folder) / "program.arrow")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def measure(rows: Path, repeats: int) -> dict[str, Any]:
    """Interleaved timings; the ratio to the copy is the median of the ratios within each repeat."""
    trajectories = load(rows)
    tokens = np.concatenate([t.tokens for t in trajectories])
    target = np.empty_like(tokens)
    tree = build_tree(trajectories)  # also compiles
    out = rows.with_name("tree.arrow")
    timings: dict[str, list[float]] = {"copy": [], "build": [], "ingest": []}
    for _ in range(repeats):
        timings["copy"].append(seconds(lambda: np.copyto(target, tokens)))
        timings["build"].append(seconds(lambda: build_tree(trajectories)))
        timings["ingest"].append(seconds(lambda: write_tree(out, ingest([rows])[0])))
    report: dict[str, Any] = {"rows": tree.num_rows, "tokens": len(tokens), "trie_tokens": tree.trie_tokens}
    for name, values in timings.items():
        report[f"{name}_s"] = round(statistics.median(values), 4)
        report[f"{name}_tokens_per_s"] = round(len(tokens) / statistics.median(values))
    for name in ("build", "ingest"):
        ratios = [value / copy for value, copy in zip(timings[name], timings["copy"], strict=True)]
        report[f"{name}_over_copy"] = round(statistics.median(ratios), 2)
    return report


def load(rows: Path) -> list[Trajectory]:
    """The file's trajectories in memory, in a random order."""
    table = pq.read_table(rows, columns=["trajectory_id", "group_id", "tokens", "loss_spans"])
    names, groups = table["trajectory_id"].to_pylist(), table["group_id"].to_pylist()
    spans = table["loss_spans"].to_pylist()
    order = np.random.default_rng(0).permutation(table.num_rows)
    return [
        Trajectory(
            trajectory_id=names[i],
            group_id=groups[i],
            tokens=table["tokens"][i].values.to_numpy(),
            loss_spans=np.array([(s["start"], s["stop"]) for s in spans[i]], np.int32),
        )
        for i in order.tolist()
    ]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run_program(rows: Path, out: Path) -> dict[str, Any]:
    """``harts ingest`` in a process of its own: wall seconds and peak memory."""
    command = [sys.executable, "-c", CHILD, "ingest", str(rows), "-o", str(out), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall = time.perf_counter() - start
    report = json.loads(done.stdout)
    return {
        "program_s": round(wall, 2),
        "program_peak_bytes": int(done.stderr) * 1024,
        "input_token_bytes": 4 * report["tokens"],
        "trie_token_bytes": 4 * report["trie_tokens"],
    }


if __name__ == "__main__":
    main()
