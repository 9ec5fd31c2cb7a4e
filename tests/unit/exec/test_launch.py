"""Ranks from the environments of torchrun and srun, and the checks of the degrees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harts_core.errors import ConfigError, MissingBackendError
from harts_core.exec.config import ParallelSection, RuntimeSection
from harts_core.exec.model.config import PRESETS
from harts_core.exec.parallel.degrees import (
    check_dispatcher,
    check_launch,
    check_model_degrees,
    check_plan_degrees,
)
from harts_core.exec.parallel.launch import Launch, first_host, gpu_of, read_launch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[03-04,7]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}


def test_one_process() -> None:
    assert read_launch({}) == Launch()
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == Launch()  # the batch script itself


def test_torchrun() -> None:
    launch = read_launch(TORCHRUN | SRUN)
    assert launch == Launch(rank=3, world_size=4, local_rank=1, address="10.0.0.7", port=29500)
    assert not launch.is_main


def test_srun() -> None:
    launch = read_launch(SRUN)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.address) == (5, 8, 1, "gpu03")
    assert launch.port != read_launch(SRUN | {"SLURM_JOB_ID": "1235"}).port
    assert 1024 < launch.port < 2**16
    chosen = read_launch(SRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7777"})
    assert (chosen.address, chosen.port) == ("127.0.0.1", 7777)


def test_a_process_has_the_gpu_of_its_local_rank() -> None:
    launch = Launch(rank=11, world_size=16, local_rank=3)
    assert gpu_of(launch, 8) == 3
    assert gpu_of(launch, 1) == 0  # Slurm with --gpus-per-task shows each process its own only
    with pytest.raises(ConfigError, match="process 3 of this machine has no GPU of its own: 2 are visible"):
        gpu_of(launch, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-04,7]", "gpu03"), ("a[1-2]-b,c", "a1-b"), ("n[9,10]", "n9")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "no WORLD_SIZE"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x', not a number"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 is outside a job of 4"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no MASTER_PORT"),
    ],
)
def test_odd_environments_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_launch(environment)


MOE = PRESETS["cpu-moe"]


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        ({"tp": 3}, MOE, "num_attention_heads 4 does not divide"),
        ({"tp": 2, "sp": True}, replace(MOE, vocab_size=511), "vocab_size 511 does not divide"),
        ({"tp": 2, "sp": True}, replace(MOE, intermediate_size=129), "intermediate_size 129"),
        ({"tp": 2}, MOE, "needs .* sp = true"),
        ({"dp": 3, "ep": 3}, MOE, "8 experts do not divide"),
        ({"dp": 2, "ep": 2}, PRESETS["cpu-dense"], "no experts"),
        ({"pp": 5}, MOE, "pp = 5, but the model has 4 layers"),
    ],
)
def test_models_that_do_not_divide(parallel: dict[str, int], model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model_degrees(ParallelSection(**parallel), model, "train.toml")  # type: ignore[arg-type]


def test_the_flex_dispatcher_is_for_cuda_and_bfloat16_with_deepep(monkeypatch: pytest.MonkeyPatch) -> None:
    flex, cuda = ParallelSection(moe_token_dispatcher="flex"), RuntimeSection(device="cuda", dtype="bfloat16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_dispatcher(ParallelSection(moe_token_dispatcher="allgather"), RuntimeSection(), "train.toml")
    for wrong in (RuntimeSection(dtype="bfloat16"), RuntimeSection(device="cuda")):
        with pytest.raises(ConfigError, match=r'"flex" needs .* device = "cuda" and dtype = "bfloat16"'):
            check_dispatcher(flex, wrong, "train.toml")
    with pytest.raises(MissingBackendError, match="needs deep_ep, which is not installed"):
        check_dispatcher(flex, cuda, "train.toml")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_dispatcher(flex, cuda, "train.toml")


def test_plans_that_do_not_divide() -> None:
    parallel = ParallelSection(dp=2, tp=2, sp=True)
    check_plan_degrees(parallel, {"dp": 4, "pad": 4}, "plan")
    with pytest.raises(ConfigError, match="3 replicas do not divide"):
        check_plan_degrees(parallel, {"dp": 3, "pad": 4}, "plan")
    with pytest.raises(ConfigError, match="padding multiple 3 does not divide"):
        check_plan_degrees(parallel, {"dp": 2, "pad": 3}, "plan")


def test_a_pipeline_is_allowed_the_live_producers_of_the_plan() -> None:
    plan = {"dp": 2, "pad": 1, "max_live_producers": 3}
    check_plan_degrees(ParallelSection(pp=2, max_live_producers=3), plan, "plan")
    check_plan_degrees(ParallelSection(pp=2), plan, "plan")
    check_plan_degrees(ParallelSection(max_live_producers=2), plan, "plan")  # no pipeline: the plan's own
    with pytest.raises(ConfigError, match=r"3 producers alive on a replica, but .* max_live_producers = 2"):
        check_plan_degrees(ParallelSection(pp=2, max_live_producers=2), plan, "plan")


def test_the_number_of_processes_must_be_that_of_the_configuration() -> None:
    parallel = ParallelSection(dp=2, pp=2)
    check_launch(parallel, Launch(world_size=4, port=1), "train.toml")
    with pytest.raises(ConfigError, match=r"asks for 4 processes .* but the job has 1"):
        check_launch(parallel, Launch(), "train.toml")
