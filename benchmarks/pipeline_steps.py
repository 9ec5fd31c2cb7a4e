"""Step times of a pipeline's schedules, measured in real processes, beside the simulated makespans.

One process for each stage (gloo). ``sleep``: the paper's workload; a pass sleeps as long as it costs, event
lists and transfers are those of training. ``model``: training steps of a small model on a shortened workload.
The schedules take turns; medians. Rank 0 prints Markdown.

    torchrun --nproc-per-node 2 benchmarks/pipeline_steps.py sleep
    torchrun --nproc-per-node 4 benchmarks/pipeline_steps.py sleep --max-window-slots 0 4
    torchrun --nproc-per-node 2 benchmarks/pipeline_steps.py model
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from workloads import shortened_workload

from harts_core.exec.config import OptimizerSection, ParallelSection
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Grpo
from harts_core.exec.parallel.grid import ProcessGrid
from harts_core.exec.parallel.groups import Groups
from harts_core.exec.parallel.job import Job, join_job
from harts_core.exec.parallel.launch import read_launch
from harts_core.exec.parallel.transfers import StageTransfers
from harts_core.exec.trainer import Trainer
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cost_model import PRESETS as COST_MODELS
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.pipeline import SCHEDULES, ScheduleKind, pipeline_schedule
from harts_core.plan.schedule.report import PipelineReport, pipeline_report
from harts_core.plan.schedule.units import Event
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec

ACTIVATION_WIDTH = 16
"""Numbers for each token that sleeping stages send each other."""
Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and the schedules of the replica of it that is run."""

    tree: RolloutTree
    bundle: PlanBundle
    report: PipelineReport

    def makespan(self, kind: ScheduleKind) -> float:
        """Simulated."""
        line = next(line for line in self.report.schedules if line.kind == kind)
        return line.replicas[self.report.replica].makespan


def paper_workload(arguments: argparse.Namespace) -> tuple[RolloutTree, PlanOptions]:
    """The paper's workload and what to plan for; the slowest replica is run."""
    tree = build_tree(generate(workload_spec(kind="tree-step", preset="paper", seed=arguments.seed)))
    return tree, PlanOptions(dp=arguments.dp, capacity=65_536, seed=arguments.seed)


def small_workload(arguments: argparse.Namespace) -> tuple[RolloutTree, PlanOptions]:
    """The same turns and branches, shortened, on one replica."""
    tree = shortened_workload(
        "tree-step",
        rows=arguments.rows,
        shorter=32,
        vocab_size=PRESETS["cpu-bench"].vocab_size,
        seed=arguments.seed,
    )
    cost_model = COST_MODELS["tokens"]  # short contexts: attention costs little
    return tree, PlanOptions(dp=1, capacity=2048, chunk=16, cost_model=cost_model)


def make_plans(arguments: argparse.Namespace, stages: int) -> list[Planned]:
    """The workload planned with every limit on the windows, for every lag."""
    tree, options = (paper_workload if arguments.passes == "sleep" else small_workload)(arguments)
    found = []
    for limit in arguments.max_window_slots:
        bundle = plan_tree(tree, replace(options, max_window_slots=limit or None))
        for lag in arguments.lag:
            report = pipeline_report(bundle, num_stages=stages, lag=lag)
            found.append(Planned(tree=tree, bundle=bundle, report=report))
    return found


def sleeping_steps(found: Planned, groups: Groups, unit_s: float) -> dict[ScheduleKind, Step]:
    """For each schedule a step of this rank's stage that sleeps ``unit_s`` for each unit of cost."""
    transfers, report = StageTransfers(groups), found.report
    steps = {}
    for kind in SCHEDULES:
        schedule = pipeline_schedule(
            found.bundle, num_stages=report.stages, replica=report.replica, kind=kind, lag=report.lag
        )
        events = schedule.stages[groups.stage.index]
        steps[kind] = lambda events=events: sleep_through(events, found.bundle, transfers, unit_s)
    return steps


def sleep_through(
    events: Sequence[Event], bundle: PlanBundle, transfers: StageTransfers, unit_s: float
) -> None:
    """Carry out a stage's events: transfers are real, passes sleep."""
    u = bundle.units
    for event in events:
        activation = torch.zeros(int(u.padded_tokens[event.unit]), ACTIVATION_WIDTH)
        match event.kind:
            case "receive_activation":
                transfers.receive_activation(activation)
            case "forward":
                time.sleep(float(u.cost_forward[event.unit]) * unit_s)
            case "send_activation":
                transfers.send_activation(activation)
            case "receive_gradient":
                transfers.receive_gradient(activation)
            case "backward":
                time.sleep(float(u.cost_backward[event.unit]) * unit_s)
            case "send_gradient":
                transfers.send_gradient(activation)
    transfers.finish()


def training_steps(found: Planned, job: Job, groups: Groups) -> dict[ScheduleKind, Step]:
    """For each schedule the forwards and backwards of a training step on this rank's stage."""
    steps = {}
    for kind in SCHEDULES:
        parallel = replace(groups.parallel, schedule=kind, schedule_lag=found.report.lag)
        grid = ProcessGrid(replace(groups, parallel=parallel), torch.device("cpu"))
        model = HybridModel(PRESETS["cpu-bench"], dtype=torch.float32, spec=job.spec, seed=0)
        optimizer = job.optimizer(model, OptimizerSection(learning_rate=1e-4), sharded=False)
        trainer = Trainer(model, Grpo(), optimizer, ranks=grid)
        data = trainer.prepare(found.bundle, found.tree)
        steps[kind] = lambda trainer=trainer, data=data: trainer.backward(data)
    return steps


def measure(steps: dict[ScheduleKind, Step], rounds: int) -> dict[ScheduleKind, list[float]]:
    """Seconds of every step, from one barrier to the next; the schedules take turns."""
    seconds: dict[ScheduleKind, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            seconds[kind].append(time.perf_counter() - start)
    return seconds


def print_table(name: str, found: Planned, seconds: dict[ScheduleKind, list[float]], unit_s: float) -> None:
    """One line for each schedule; ratios are medians over the rounds."""
    report, ours = found.report, seconds[SCHEDULES[0]]
    print(
        f"{name}: P = {report.stages}, lag {report.lag}, {report.slots} slots, {report.windows} windows, "
        f"{len(ours)} rounds\n\n| schedule | seconds | least | over simulated | over harts | simulated |\n"
        "|---|---|---|---|---|---|"
    )
    for kind, mine in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(mine, ours, strict=True))
        simulated, median = found.makespan(kind), statistics.median(mine)
        of_simulated = f"{median / (simulated * unit_s * report.stages):.3f}" if unit_s else ""
        print(
            f"| {kind} | {median:.3f} | {min(mine):.3f} | {of_simulated} | {ratio:.3f} | "
            f"{simulated / found.makespan(SCHEDULES[0]):.3f} |"
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("passes", choices=["sleep", "model"])
    parser.add_argument("--dp", type=int, default=8, help="replicas of the paper's plan; one is run")
    parser.add_argument("--max-window-slots", type=int, nargs="+", default=[0], help="0: no limit")
    parser.add_argument("--lag", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a sleeping step, simulated, harts")
    parser.add_argument("--rows", type=int, default=128, help="of the shortened workload")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    launch = read_launch()
    parallel = ParallelSection(pp=launch.world_size, timeout_s=7200)  # however busy the machine is
    with join_job(parallel, launch, "cpu") as job:
        assert job.groups is not None, "start it with torchrun, two processes or more"
        made = [make_plans(arguments, parallel.pp) if launch.is_main else None]
        dist.broadcast_object_list(made)
        for found in made[0] or ():
            unit_s = 0.0
            if arguments.passes == "sleep":
                unit_s = arguments.seconds / found.makespan(SCHEDULES[0]) / parallel.pp
                steps = sleeping_steps(found, job.groups, unit_s)
            else:
                steps = training_steps(found, job, job.groups)
            measure(steps, 1)  # allocations, first transfers
            seconds = measure(steps, arguments.rounds)
            if launch.is_main:
                print_table(arguments.passes, found, seconds, unit_s)


if __name__ == "__main__":
    main()
