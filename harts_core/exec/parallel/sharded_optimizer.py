"""AdamW with its state shared out among the data-parallel ranks: Megatron-core's DistributedOptimizer.

Every rank holds the moments and the float32 masters of its shard of the gradient buffers, updates that shard
of the parameters, and gathers the others'. Dense parameters are shared out among the data-parallel ranks,
experts among those that hold the same ones. Megatron-core's part does the shards, the copies and the
gathering; learning rate, decay, clipping and the check of the norm are those of ``StepOptimizer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn

from harts_core.exec.config import OptimizerSection
from harts_core.exec.gradients import accumulation_dtype
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.optimizer import StateShard, StepOptimizer, decays
from harts_core.exec.parallel.cpu import cuda_means_cpu
from harts_core.exec.parallel.gradients import DdpGradients
from harts_core.exec.parallel.groups import Groups
from harts_core.exec.parallel.placement import placement_of


class ShardedOptimizer(StepOptimizer):
    """The optimizer of a split model; every rank makes the same calls.

    Args:
        model: of this rank, with its weights, in float32 or bfloat16; its parameters move into one buffer.
        config: the ``[optimizer]`` table.
        groups: of this process.
    """

    def __init__(self, model: HybridModel, config: OptimizerSection, groups: Groups) -> None:
        self._ddp = DdpGradients(model, groups, sharded=True)
        super().__init__(self._ddp.parameters, self._ddp, config)
        experts = {n for n, p in self._parameters.items() if placement_of(p).split == "expert"}
        dense = {n: p for n, p in self._parameters.items() if n not in experts}
        self.parts = [self._part(dense, self._ddp.ddp.buffers, groups.data)]
        if experts:
            rest = {n: p for n, p in self._parameters.items() if n in experts}
            self.parts.append(self._part(rest, self._ddp.ddp.expert_parallel_buffers, groups.expert_data))

    def _part(
        self, parameters: Mapping[str, nn.Parameter], buffers: list[Any], group: dist.ProcessGroup
    ) -> DistributedOptimizer:
        """Of the parameters that a group of ranks shares out, with its state at zero."""
        config = self.config
        groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            # one dtype each: of a mixed group Megatron-core confuses whose state is whose
            groups.setdefault((decays(name, parameter), parameter.dtype), []).append(parameter)
        decay = {True: config.weight_decay, False: 0.0}
        adamw = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay[decayed]} for (decayed, _), group in groups.items()],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )
        device = next(iter(parameters.values())).device
        with cuda_means_cpu(device), torch.no_grad():  # shards are views, which are not to be tracked
            part = DistributedOptimizer(
                adamw,
                OptimizerConfig(use_distributed_optimizer=True, bf16=True),
                grad_scaler=None,
                init_state_fn=None,
                model_chunks=[self._ddp.ddp],
                per_model_buffers={0: buffers},
                data_parallel_group=group,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        for shard in part.get_parameters():
            adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
        return part

    def _update(self, rate: float, scale: float, count: int) -> None:
        for part in self.parts:
            part.prepare_grads()
            for group in part.optimizer.param_groups:
                group["lr"] = rate
                for shard in group["params"]:
                    shard.grad.mul_(scale)
                    part.optimizer.state[shard]["step"].fill_(count - 1)
            # without DistributedOptimizer's gathering of all parameters, which is done once for both parts
            MixedPrecisionOptimizer.step_with_ready_grads(part)
            part.zero_grad()
        self._ddp.ddp.start_param_sync()

    def state_shard(self, kind: str, name: str) -> StateShard:
        """See ``StepOptimizer``: what this rank updates of the parameter."""
        parameter, own = self._parameters[name], self._ddp.shards(name).own
        for part in self.parts:
            place = part.model_param_group_index_map.get(parameter)
            if place is not None:
                group, index = place
                master: Tensor = part.optimizer.param_groups[group]["params"][index]
                values = master if kind == "master" else part.optimizer.state[master][kind]
                return StateShard(start=own.start, stop=own.stop, values=values)
        nothing = torch.empty(0, dtype=accumulation_dtype(parameter), device=parameter.device)
        return StateShard(start=0, stop=0, values=nothing)

    def _whole_state(self, kind: str, name: str) -> Tensor:
        """Gathered from the ranks that share it out."""
        return self._ddp.shards(name).gather(
            self.state_shard(kind, name).values, self._parameters[name].shape
        )
