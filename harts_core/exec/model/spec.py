"""The replaceable parts of the model: one set for a single process, others for tensor and expert parallelism.

Layers ask the spec for their linears, embedding, norms and expert parts, and take head counts per rank from
it; nothing else in the layer code knows how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts_core.errors import ConfigError
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.moe import MoE
from harts_core.exec.model.norm import RMSNorm
from harts_core.exec.weights.regions import Region

LinearFactory = Callable[[int, int, torch.dtype], nn.Module]
"""(input width, output width, dtype) → a module with ``weight`` and no bias."""

Mark = Callable[[Any], None]
"""Called with a parameter."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of a parameter or buffer: part ``index`` of ``count`` equal ones along ``dim``."""

    dim: int = 0
    index: int = 0
    count: int = 1

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Shape of the whole, of which ``tensor`` is the part."""
        shape = list(tensor.shape)
        if self.count > 1:
            shape[self.dim] *= self.count
        return tuple(shape)

    def region(self, tensor: Tensor) -> Region:
        """Where ``tensor``, the part, lies in the whole."""
        start = [0] * tensor.dim()
        if self.count > 1:
            start[self.dim] = self.index * tensor.shape[self.dim]
        return Region(tuple(start), tuple(tensor.shape))

    def own_part(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor, as a view."""
        return whole if self.count == 1 else whole.chunk(self.count, self.dim)[self.index]


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers: stage ``index`` of a pipeline of ``count``; the first ones may hold one more."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Its layers among those of the whole model."""
        first, last = (-(-i * num_layers // self.count) for i in (self.index, self.index + 1))
        return range(first, last)


WHOLE_MODEL = Stage()


def _same(x: Tensor) -> Tensor:
    return x


def _no_mark(parameter: Any) -> None:
    """One rank: nothing to say about a parameter."""


def _whole(parameter: Tensor) -> Shard:
    return WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Factories of the parts that a parallel run replaces. Widths are those of the whole model.

    Attributes:
        column_linear: output split over the tensor-parallel ranks.
        row_linear: input split over them; the output is summed.
        replicated_linear: the whole matrix on every rank.
        embedding: (vocabulary, width, dtype) → token ids to rows.
        lm_head: (width, vocabulary, dtype) → a module with ``weight``; the head reads only that.
        norm: (width, eps, dtype of the weight) → RMSNorm.
        moe: (config, dtype, the spec itself) → a feed-forward part with experts: a module like ``MoE``, with
            the same tensor names.
        tensor_parallel: ranks that the heads and widths are split over.
        tensor_group: their process group, over which the vocabulary is split too; None where it is whole.
        enter: the residual stream's rows on this rank → those of the whole unit, as input of split linears.
            There may be more rows than tokens: padding at the end.
        local_rows: a value per token of the unit → those of this rank's rows of the residual stream, zeros
            for padding.
        mark_split: called for parameters that hold this rank's heads or channels (dimension 0).
        mark_shared: for parameters that every rank applies to all tokens, for its own heads.
        mark_rows: for parameters that a rank applies to its rows of the residual stream.
        shard_of: which part of a parameter or buffer this rank holds.
        stage: the layers that this rank holds.
    """

    column_linear: LinearFactory
    row_linear: LinearFactory
    replicated_linear: LinearFactory
    embedding: Callable[[int, int, torch.dtype], nn.Module]
    lm_head: LinearFactory
    norm: Callable[[int, float, torch.dtype], nn.Module]
    moe: Callable[[ModelConfig, torch.dtype, ModelSpec], nn.Module]
    tensor_parallel: int = 1
    tensor_group: Any = None
    enter: Callable[[Tensor], Tensor] = _same
    local_rows: Callable[[Tensor], Tensor] = _same
    mark_split: Mark = _no_mark
    mark_shared: Mark = _no_mark
    mark_rows: Mark = _no_mark
    shard_of: Callable[[Tensor], Shard] = _whole
    stage: Stage = WHOLE_MODEL

    def local_heads(self, num_heads: int) -> int:
        """Heads of one rank.

        Raises:
            ConfigError: the heads do not divide over the ranks.
        """
        if num_heads % self.tensor_parallel:
            raise ConfigError(
                f"{num_heads} attention heads do not divide over {self.tensor_parallel} ranks.",
                where="num_attention_heads",
            )
        return num_heads // self.tensor_parallel


class Linear(nn.Module):
    """x [..., in] → x Wᵀ [..., out]; the weight [out, in] is left to the model's seeded init."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """int64 token ids [C] → rows [C, width] of ``weight`` [vocabulary, width]."""

    def __init__(self, num_embeddings: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, width, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up."""
        return F.embedding(tokens, self.weight)


LOCAL_SPEC = ModelSpec(
    column_linear=Linear,
    row_linear=Linear,
    replicated_linear=Linear,
    embedding=Embedding,
    lm_head=Linear,
    norm=RMSNorm,
    moe=MoE,
)
"""Plain torch in one process."""
