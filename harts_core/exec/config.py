"""train.toml: the configuration of a training run as frozen dataclasses that check themselves.

The tables are ``[model]``, ``[objective]``, ``[optimizer]``, ``[parallel]`` and ``[runtime]``. Field names
are the keys, field types are plain (``schemas/train-config.schema.json`` is derived from them), and unknown
tables or keys are errors. This module imports neither torch nor numpy, so that a configuration is checked
before anything heavy starts. docs/configuration.md describes every key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from harts_core.errors import ConfigError
from harts_core.exec.config_table import build_section, parse_section, require, suggest
from harts_core.plan.recompute import Recompute

MAX_THREADS = 1024

Dtype = Literal["float32", "bfloat16", "float64"]
LinearCalls = Literal["rounds", "levels", "nodes", "no-replay"]
Backend = Literal["torch", "naive", "fla"]
Device = Literal["cpu", "cuda"]
Schedule = Literal["constant", "linear", "cosine"]
BalanceLoss = Literal["batch", "sequence"]
CheckpointFormat = Literal["whole", "sharded"]
PipelineKind = Literal["harts", "non-overlapping", "backward-first"]
TokenDispatcher = Literal["alltoall", "allgather", "flex"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """``[model]``: which model to build. Empty: the one of ``--checkpoint``.

    Attributes:
        preset: name of a built-in shape, or None.
        overrides: every other key of the table: ``bailing_hybrid`` config.json keys. They replace the
            preset's, or describe the whole model where no preset is named.
    """

    preset: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSection:
    """``[objective]``: what is minimised.

    Attributes:
        name: a name in ``harts_core.exec.objectives.OBJECTIVES``, or an import path ``package.module:Name``.
        router_z_loss_coef: weight of the router's z-loss, summed over the layers with experts.
        balance_loss_coef: weight of the experts' load-balancing loss, summed over them.
        balance_loss: its form: ``batch``, the loads of the whole step.
        options: every other key of the table: fields of that objective.
    """

    name: str = "grpo"
    router_z_loss_coef: float = 0.0
    balance_loss_coef: float = 0.0
    balance_loss: BalanceLoss = "batch"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("router_z_loss_coef", "balance_loss_coef"):
            require(getattr(self, name) >= 0, f"[objective] {name} must not be negative")
        if self.balance_loss == "sequence":
            raise ConfigError(
                '[objective] balance_loss = "sequence" is not available: each trajectory would weigh '
                "the routing of a shared token by its own loads",
                hint='use "batch", the loads of the whole step, or [optimizer] expert_bias_rate',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """``[optimizer]``: AdamW with decoupled weight decay.

    Attributes:
        learning_rate: peak learning rate.
        beta1, beta2, eps: AdamW's moment decays and denominator constant.
        weight_decay: decoupled decay of matrices; one-dimensional parameters are not decayed.
        max_grad_norm: gradients are scaled down to this global norm; 0 = no clipping.
        schedule: learning rate after the warmup: ``constant``, or ``linear`` or ``cosine`` decay.
        warmup_steps: the rate rises linearly over this many steps.
        decay_steps: the step at which the decay ends (required by ``linear`` and ``cosine``).
        min_learning_rate: the rate at the end of the decay and after.
        num_minibatches: optimizer steps per plan: its slots are split, in order, into that many parts with
            normalisers of their own. Parts never cut a sharing window.
        expert_bias_rate: after each update, the routing bias of every expert moves by this much towards even
            loads (0 = it stays as loaded).
    """

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_learning_rate: float = 0.0
    num_minibatches: int = 1
    expert_bias_rate: float = 0.0

    def __post_init__(self) -> None:
        require(self.learning_rate >= 0, "[optimizer] learning_rate must not be negative")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"[optimizer] {name} must be in [0, 1)")
        require(self.eps > 0, "[optimizer] eps must be positive")
        require(self.num_minibatches >= 1, "[optimizer] num_minibatches must be at least 1")
        for name in (
            "weight_decay",
            "max_grad_norm",
            "warmup_steps",
            "min_learning_rate",
            "expert_bias_rate",
        ):
            require(getattr(self, name) >= 0, f"[optimizer] {name} must not be negative")
        require(
            self.min_learning_rate <= self.learning_rate,
            "[optimizer] min_learning_rate must not exceed learning_rate",
        )
        if self.schedule != "constant":
            require(
                self.decay_steps is not None,
                f"[optimizer] schedule {self.schedule!r} needs decay_steps, the step at which the decay ends",
            )
        if self.decay_steps is not None:
            require(
                self.decay_steps > self.warmup_steps,
                "[optimizer] decay_steps must be greater than warmup_steps",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """``[parallel]``: how many processes share the work: dp · tp · pp of them (docs/distributed.md).

    A plan's D replicas are dealt out to the dp ranks; with dp = 1 one rank runs them one after another.

    Attributes:
        dp, tp, pp: data-, tensor- and pipeline-parallel degree.
        ep: expert-parallel degree: ranks of a stage's dp · tp that hold different experts.
        sp: sequence parallelism within the tensor-parallel group.
        moe_token_dispatcher: how rows reach the ranks of their experts, by Megatron-core's names:
            ``alltoall``, ``allgather``, or ``flex`` (DeepEP, on CUDA in bfloat16 only).
        distributed_optimizer: share the optimizer's state out among the data-parallel ranks; None: where
            dp > 1, float64 aside.
        schedule: of the pipeline: ``harts``, or to compare with, ``non-overlapping`` or ``backward-first``.
        schedule_lag: microbatches that a stage keeps in reserve for each stage after it.
        max_live_producers: on one stage; None: pp for each level of nested producers.
        timeout_s: a collective operation that waits longer for another process ends the job.
    """

    dp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    ep: int = 1
    moe_token_dispatcher: TokenDispatcher = "alltoall"
    distributed_optimizer: bool | None = None
    schedule: PipelineKind = "harts"
    schedule_lag: int = 2
    max_live_producers: int | None = None
    timeout_s: int = 600

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "ep", "schedule_lag", "timeout_s"):
            require(getattr(self, name) >= 1, f"[parallel] {name} must be at least 1")
        require(
            self.max_live_producers is None or self.max_live_producers >= 1,
            "[parallel] max_live_producers must be at least 1",
        )
        require(not self.sp or self.tp > 1, "[parallel] sp = true needs tp > 1")
        require(
            not self.distributed_optimizer or self.dp > 1,
            "[parallel] distributed_optimizer = true needs dp > 1",
        )
        require(
            self.dp * self.tp % self.ep == 0,
            f"[parallel] ep = {self.ep} does not divide dp · tp = {self.dp * self.tp}",
        )
        require(
            self.schedule != "backward-first" or self.tp % self.ep == 0,
            '[parallel] schedule = "backward-first" is not available where ep spans replicas (it must divide '
            "tp): the order depends on each replica's costs",
        )

    @property
    def num_processes(self) -> int:
        """Processes of the job."""
        return self.dp * self.tp * self.pp

    def shares_optimizer(self, dtype: Dtype) -> bool:
        """Whether the data-parallel ranks share the optimizer's state out, in a run of this dtype."""
        if self.distributed_optimizer is None:
            return self.dp > 1 and dtype != "float64"
        return self.distributed_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSection:
    """``[runtime]``: how the work is executed.

    Attributes:
        dtype: of weights and activations; float32 islands (states, gates, router, norms) stay float32 in a
            bfloat16 run and are float64 in a float64 run.
        device: where the model lives.
        backend: linear-attention kernels: ``torch`` (chunkwise), ``naive`` (token by token, reference),
            ``fla`` (Triton, needs a GPU).
        recompute: activations to recompute in the backward pass: ``none``, every ``layer``, every whole
            ``unit`` that has to wait for its backward, or both, ``unit+layer``.
        linear_calls: how linear attention is cut into packed calls: the plan's ``rounds``, or, to compare
            with, one call per tree ``levels`` or ``nodes``, or ``no-replay``.
        head_block_rows: rows of vocabulary logits held at a time.
        memory_budget_bytes: device memory for the blocks that units keep for later ones; more is moved to the
            host. 0 = no limit.
        cache_block_tokens: cut these blocks at multiples of a fixed size, to compare with; 0 = adaptive.
        threads: CPU threads of this process; 0 = torch's default. The results may depend on it in the last
            bits, so a resumed run should keep it.
        seed: of the initial weights and of the run's random state.
        checkpoint_every: steps between checkpoints; 0 = only after the last step.
        checkpoint_format: ``whole``: the main process writes the model in Hugging Face form; ``sharded``:
            every process writes its own parts; None: whole in one process, sharded in many.
        keep_checkpoints: how many of the newest checkpoints to keep.
    """

    dtype: Dtype = "float32"
    device: Device = "cpu"
    backend: Backend = "torch"
    recompute: Recompute = "none"
    linear_calls: LinearCalls = "rounds"
    head_block_rows: int = 1024
    memory_budget_bytes: int = 0
    cache_block_tokens: int = 0
    threads: int = 0
    seed: int = 0
    checkpoint_every: int = 0
    checkpoint_format: CheckpointFormat | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        require(self.head_block_rows >= 1, "[runtime] head_block_rows must be at least 1")
        require(self.threads <= MAX_THREADS, f"[runtime] threads must be at most {MAX_THREADS}")
        require(self.keep_checkpoints >= 1, "[runtime] keep_checkpoints must be at least 1")
        for name in ("memory_budget_bytes", "cache_block_tokens", "threads", "checkpoint_every"):
            require(getattr(self, name) >= 0, f"[runtime] {name} must not be negative")
        require(0 <= self.seed < 2**63, "[runtime] seed must be in [0, 2^63)")
        require(
            self.backend != "fla" or self.device == "cuda", '[runtime] backend "fla" needs device = "cuda"'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The whole of train.toml; every table may be left out."""

    model: ModelSection = ModelSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    runtime: RuntimeSection = RuntimeSection()

    def __post_init__(self) -> None:
        require(
            not self.parallel.distributed_optimizer or self.runtime.dtype != "float64",
            "[parallel] distributed_optimizer = true holds the optimizer's state in float32, not for "
            '[runtime] dtype = "float64"',
        )

    @property
    def sharded_checkpoints(self) -> bool:
        """Whether every process writes its own parts of a checkpoint."""
        default = "sharded" if self.parallel.num_processes > 1 else "whole"
        return (self.runtime.checkpoint_format or default) == "sharded"

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], where: str = "train config") -> TrainConfig:
        """Check parsed TOML and fill in the defaults.

        Args:
            tables: table name to its keys.
            where: named in errors.

        Raises:
            ConfigError: an unknown table or key (with the nearest known one), a wrong type or value.
        """
        sections: dict[str, Any] = {}
        for name, table in tables.items():
            if name not in SECTIONS:
                raise ConfigError(
                    f"unknown table [{name}]", where=where, hint=suggest(name, SECTIONS, "tables")
                )
            if not isinstance(table, Mapping):
                raise ConfigError(f"{name} must be a table, [{name}]", where=where)
            sections[name] = parse_section(SECTIONS[name], _split_open_keys(name, table), name, where)
        return build_section(cls, sections, where)

    def to_dict(self) -> dict[str, Any]:
        """The same tables in TOML's form, every default resolved (JSON-able)."""
        tables = asdict(self)
        for name, open_key in OPEN_KEYS.items():
            tables[name] |= tables[name].pop(open_key)
        return tables


SECTIONS: dict[str, Any] = {
    "model": ModelSection,
    "objective": ObjectiveSection,
    "optimizer": OptimizerSection,
    "parallel": ParallelSection,
    "runtime": RuntimeSection,
}
OPEN_KEYS = {"model": "overrides", "objective": "options"}
"""Tables whose other keys are checked by what they configure; the field that collects them."""


def read_config(path: Path) -> TrainConfig:
    """Read and check train.toml.

    Raises:
        ConfigError: no such file, not TOML, or anything ``TrainConfig.from_dict`` refuses.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the configuration cannot be read ({error.strerror})",
            where=str(path),
            hint="docs/configuration.md shows a complete train.toml",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", where=str(path)) from error
    return TrainConfig.from_dict(tables, str(path))


def _split_open_keys(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys that are not fields of an open table into its collecting field."""
    if name not in OPEN_KEYS:
        return dict(table)
    own = {f.name for f in fields(SECTIONS[name])} - {OPEN_KEYS[name]}
    closed = {k: v for k, v in table.items() if k in own}
    return closed | {OPEN_KEYS[name]: {k: v for k, v in table.items() if k not in own}}
