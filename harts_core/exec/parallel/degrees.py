"""Checks of the parallel degrees, before any process group starts. Imports neither torch nor numpy."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harts_core.errors import ConfigError, MissingBackendError
from harts_core.exec.config import ParallelSection, RuntimeSection, TrainConfig, read_config
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.parallel.launch import Launch, read_launch


def read_job_config(path: Path) -> tuple[TrainConfig, Launch]:
    """A configuration and how this process was started, which must fit each other.

    Args:
        path: train.toml.

    Raises:
        ConfigError: see ``read_config``, ``read_launch``, ``check_launch`` and ``check_dispatcher``.
        MissingBackendError: see ``check_dispatcher``.
    """
    config, launch = read_config(path), read_launch()
    check_launch(config.parallel, launch, str(path))
    check_dispatcher(config.parallel, config.runtime, str(path))
    return config, launch


def check_launch(parallel: ParallelSection, launch: Launch, where: str) -> None:
    """The number of processes must be that of the configuration.

    Raises:
        ConfigError: it is not.
    """
    if launch.world_size == parallel.num_processes:
        return
    degrees = f"dp · tp · pp = {parallel.dp} · {parallel.tp} · {parallel.pp}"
    raise ConfigError(
        f"[parallel] asks for {parallel.num_processes} processes ({degrees}), but the job has "
        f"{launch.world_size}",
        where=where,
        hint=f"start it with torchrun --nproc-per-node {parallel.num_processes}, or with srun --ntasks "
        f"{parallel.num_processes}; or change [parallel]",
    )


def check_dispatcher(parallel: ParallelSection, runtime: RuntimeSection, where: str) -> None:
    """The flex token dispatcher needs DeepEP, which has CUDA kernels for bfloat16 rows only.

    Raises:
        ConfigError: it is asked for on another device or in another dtype.
        MissingBackendError: DeepEP is not installed.
    """
    if parallel.moe_token_dispatcher != "flex":
        return
    _require(
        (runtime.device, runtime.dtype) == ("cuda", "bfloat16"),
        '[parallel] moe_token_dispatcher = "flex" needs [runtime] device = "cuda" and dtype = "bfloat16", '
        f'not "{runtime.device}" and "{runtime.dtype}"',
        where,
        hint='use "alltoall" or "allgather"',
    )
    if importlib.util.find_spec("deep_ep") is None:
        raise MissingBackendError(
            '[parallel] moe_token_dispatcher = "flex" needs deep_ep, which is not installed',
            where=where,
            hint='install DeepEP (github.com/deepseek-ai/DeepEP), or use "alltoall" or "allgather"',
        )


def check_model_degrees(parallel: ParallelSection, model: ModelConfig, where: str) -> None:
    """Heads, widths and experts must divide over the ranks.

    Raises:
        ConfigError: something does not divide, or a combination is not available.
    """
    widths = {
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
    }
    if model.has_experts:
        widths["moe_intermediate_size · num_shared_experts"] = (
            model.moe_intermediate_size * model.num_shared_experts
        )
    for name, value in widths.items():
        _require(
            value % parallel.tp == 0,
            f"{name} {value} does not divide over [parallel] tp = {parallel.tp}",
            where,
        )
    _require(
        parallel.pp <= model.num_hidden_layers,
        f"[parallel] pp = {parallel.pp}, but the model has {model.num_hidden_layers} layers",
        where,
    )
    if parallel.ep > 1:
        _require(model.has_experts, f"[parallel] ep = {parallel.ep}, but the model has no experts", where)
        _require(
            model.num_experts % parallel.ep == 0,
            f"{model.num_experts} experts do not divide over [parallel] ep = {parallel.ep}",
            where,
        )
    if model.has_experts and parallel.tp > 1:
        _require(parallel.sp, "a model with experts needs [parallel] sp = true where tp > 1", where)


def check_plan_degrees(parallel: ParallelSection, parameters: Mapping[str, Any], where: str) -> None:
    """The plan's replicas must divide over the data-parallel ranks, its padding over the tensor-parallel; a
    pipeline's stages must be allowed the live producers that the plan's replicas are.

    Args:
        parallel: the ``[parallel]`` table.
        parameters: of the plan's manifest: ``dp``, ``pad`` and ``max_live_producers``.
        where: the plan, for messages.

    Raises:
        ConfigError: they do not.
    """
    replicas, pad = int(parameters["dp"]), int(parameters["pad"])
    _require(
        replicas % parallel.dp == 0,
        f"the plan's {replicas} replicas do not divide over [parallel] dp = {parallel.dp}",
        where,
        hint=f"plan with --dp {parallel.dp}, or a multiple of it",
    )
    _require(
        not parallel.sp or pad % parallel.tp == 0,
        f"the plan's padding multiple {pad} does not divide over [parallel] tp = {parallel.tp}, so its costs "
        "are not those of the run",
        where,
        hint=f"plan with --pad {parallel.tp}, or a multiple of it",
    )
    live, limit = int(parameters.get("max_live_producers", 1)), parallel.max_live_producers
    _require(
        parallel.pp == 1 or limit is None or limit >= live,
        f"the plan may keep {live} producers alive on a replica, but [parallel] max_live_producers = {limit}",
        where,
        hint=f"plan with --max-live-producers {limit}, or raise it",
    )


def _require(condition: bool, what: str, where: str, hint: str | None = None) -> None:
    if not condition:
        raise ConfigError(what, where=where, hint=hint)
