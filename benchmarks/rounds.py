"""Is planning the packed linear-attention calls linear in the segments?

Times ``plan_rounds`` on random trees of growing size; the last column should stay flat.

    python benchmarks/rounds.py
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from harts_core.plan.rounds import plan_rounds


def random_tree(num_segments: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(parent, start, stop) of a random recursive tree with segments of 1 to 400 tokens."""
    rng = np.random.default_rng(seed)
    parent = (rng.random(num_segments) * np.arange(num_segments)).astype(np.int32)
    parent[0] = -1
    tokens = rng.integers(1, 401, num_segments)
    stop = np.zeros(num_segments, np.int32)
    start = np.zeros(num_segments, np.int32)
    for i in range(num_segments):
        start[i] = stop[parent[i]] if i else 0
        stop[i] = start[i] + tokens[i]
    return parent, start, stop


def measure(num_segments: int, chunk: int, repeats: int) -> dict[str, float]:
    """Median seconds over repeats, and what was planned."""
    parent, start, stop = random_tree(num_segments, seed=num_segments)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = plan_rounds(parent, start, stop, chunk=chunk)
        times.append(time.perf_counter() - begin)
    seconds = float(np.median(times))
    return {
        "segments": num_segments,
        "rounds": int(plan.num_rounds[0]),
        "sequences": len(plan),
        "seconds": seconds,
        "ns_per_segment": seconds / num_segments * 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measure(1000, arguments.chunk, 1)  # compile
    results = [measure(n, arguments.chunk, arguments.repeats) for n in arguments.sizes]
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'segments':>10} {'rounds':>7} {'sequences':>10} {'seconds':>9} {'ns/segment':>11}")
    for r in results:
        print(
            f"{r['segments']:>10,} {r['rounds']:>7} {r['sequences']:>10,} {r['seconds']:>9.4f} "
            f"{r['ns_per_segment']:>11.0f}"
        )


if __name__ == "__main__":
    main()
