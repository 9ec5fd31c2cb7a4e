"""One process of a distributed test: runs the cases that it is given and saves rank 0's results.

Started by ``tests.distributed.launch`` as ``python -m tests.distributed.worker cases.pt results.pt``.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from harts_core.exec.config import ParallelSection
from harts_core.exec.parallel.grid import ProcessGrid
from harts_core.exec.parallel.groups import leave_groups, make_groups, process_groups
from harts_core.exec.parallel.job import Job
from harts_core.exec.parallel.launch import read_launch
from harts_core.exec.parallel.spec import parallel_spec
from harts_core.exec.parallel.state import gather_whole, join_stages
from tests.distributed.cases import Case, Result, build_trainer, held_bytes, run, update


def run_case(case: Case, rank: int) -> Result:
    groups = make_groups(case.section, rank)
    grid = ProcessGrid(groups, torch.device("cpu"))
    job = Job(is_main=rank == 0, spec=parallel_spec(groups), ranks=grid, groups=groups)
    trainer = build_trainer(case, job)
    result = run(case, trainer)
    for name, parameter in trainer.optimizer.parameters():
        result.gradients[name] = gather_whole(trainer.optimizer.gradient(name), parameter, groups)
    if not groups.is_first_of_stage:
        result.gradients.clear()
    result.gradients = join_stages(result.gradients, groups)
    counts: list[torch.Tensor | None] = [None] * groups.stage.count
    dist.all_gather_object(counts, result.expert_counts, group=groups.pipeline)
    found = [part for part in counts if part is not None]
    result.expert_counts = torch.cat(found) if found else None
    if case.steps:
        result.weights, result.state = update(case, trainer, job)
        result.state_bytes = [0] * dist.get_world_size()
        dist.all_gather_object(result.state_bytes, held_bytes(trainer))
    leave_groups()
    return result


def main(cases_file: str, results_file: str) -> None:
    cases: list[Case] = torch.load(cases_file, weights_only=False)
    launch = read_launch()
    whole = ParallelSection(dp=launch.world_size, timeout_s=60)
    with process_groups(whole, launch, "cpu"):
        leave_groups()
        results = []
        for case in cases:
            start = time.perf_counter()
            results.append(run_case(case, launch.rank))
            print(f"{time.perf_counter() - start:.1f} s: {case}", flush=True)
        make_groups(whole, launch.rank)
    if launch.is_main:
        torch.save(results, results_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
