"""One training step's data: consumers in order, step-wide counts, metadata of the trained positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError, ExecError, InvalidPlanError
from harts_core.exec.objectives.protocol import Column, ObjectiveBatch, StepTotals
from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.validate import validate_plan
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.layout import UnitLayout

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepData:
    """A validated plan joined with its tree, ready for the trainer. Make it with ``build_step_data``.

    Attributes:
        bundle, tree: the plan and the rollout tree that it is for.
        consumers: unit ids in execution order: slot by slot, in a slot replica by replica.
        totals: counts over the whole step.
        row_tokens: int64 [N], trained positions of each tree row that the step evaluates; 0 for the others.
        group: int64 [N], group index of each row; −1 where the row is not trained.
        group_tokens, group_sequences: int64 [groups].
        columns: the metadata columns that the objective needs.
    """

    bundle: PlanBundle
    tree: RolloutTree
    consumers: tuple[int, ...]
    totals: StepTotals
    row_tokens: Int64
    group: Int64
    group_tokens: Int64
    group_sequences: Int64
    columns: dict[Column, Ragged]

    def batch(self, layout: UnitLayout, logprobs: Tensor) -> ObjectiveBatch:
        """A unit's log-probabilities with the metadata of their positions.

        Args:
            layout: the unit's; it says which trained position each value belongs to.
            logprobs: λ [P], ordered by (row, position).
        """
        import torch

        row, index = layout.trained_row, layout.trained_index
        rows, sequence = np.unique(row, return_inverse=True)

        def number(values: npt.NDArray[Any]) -> Tensor:
            return torch.tensor(values, dtype=logprobs.dtype, device=logprobs.device)

        def integer(values: npt.NDArray[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=logprobs.device)

        return ObjectiveBatch(
            logprobs=logprobs,
            sequence=integer(sequence),
            rows=integer(rows),
            group=integer(self.group[rows]),
            sequence_tokens=number(self.row_tokens[rows]),
            group_tokens=number(self.group_tokens[self.group[rows]]),
            group_sequences=number(self.group_sequences[self.group[rows]]),
            totals=self.totals,
            **{name: number(_pick(column, row, index)) for name, column in self.columns.items()},
        )


def build_step_data(
    bundle: PlanBundle, tree: RolloutTree, columns: tuple[Column, ...], *, vocab_size: int
) -> StepData:
    """Validate a plan against its tree and collect what a training step needs. Imports no torch.

    Args:
        bundle: the plan.
        tree: the rollout tree.
        columns: metadata that the objective needs for every trained position.
        vocab_size: of the model.

    Raises:
        InvalidPlanError: the plan is of another tree, or breaks a rule of its format.
        ExecError: the plan shares tokens between units, which this version does not execute.
        DataError: a needed column is absent or null in a trained row, nothing is trained, or the tree has
            token ids that the model lacks.
    """
    largest = int(tree.suffix.values.max())
    if largest >= vocab_size:
        raise DataError(
            f"the tree has token id {largest}, the model's vocabulary ends at {vocab_size - 1}",
            hint="use the model whose tokenizer made the rollouts",
        )
    check_tree_of(bundle, tree)
    validate_plan(bundle, tree)
    if np.any(bundle.spans.owner != bundle.spans.unit) or np.any(bundle.units.kind != CONSUMER):
        raise ExecError(
            "the plan has units that use tokens of other units; this version executes plans without them",
            where=f"planner {bundle.planner}",
            hint="plan with --planner harts-l1 or expanded",
        )
    rows = np.unique(bundle.assignments.row)
    row_tokens = np.zeros(tree.num_rows, np.int64)
    row_tokens[rows] = tree.trained_counts[rows]
    trained = np.flatnonzero(row_tokens)
    if not len(trained):
        raise DataError(
            "no trajectory of the plan has a trained position", hint="check loss_spans in the tree"
        )
    names, numbers = np.unique(np.array(tree.group_id, object)[trained].astype(str), return_inverse=True)
    group = np.full(tree.num_rows, -1, np.int64)
    group[trained] = numbers
    units = bundle.units
    return StepData(
        bundle=bundle,
        tree=tree,
        consumers=tuple(np.lexsort((units.replica, units.slot)).tolist()),
        totals=StepTotals(tokens=int(row_tokens.sum()), sequences=len(trained), groups=len(names)),
        row_tokens=row_tokens,
        group=group,
        group_tokens=np.bincount(numbers, weights=row_tokens[trained]).astype(np.int64),
        group_sequences=np.bincount(numbers).astype(np.int64),
        columns={name: _column(tree, name, trained) for name in columns},
    )


def check_tree_of(bundle: PlanBundle, tree: RolloutTree) -> None:
    """Refuse a plan that was made for another rollout tree.

    Raises:
        InvalidPlanError: the content hashes differ.
    """
    if bundle.tree_sha256 != tree.content_sha256:
        raise InvalidPlanError(
            f"the plan is for another rollout tree ({bundle.tree_sha256[:12]}…, not "
            f"{tree.content_sha256[:12]}…)",
            hint="pass the tree that it was planned from, or plan this one",
        )


def _column(tree: RolloutTree, name: Column, trained: Int64) -> Ragged:
    """A column, after checking that every trained row has it."""
    column: Ragged | None = getattr(tree, name)
    hint = f"ingest rollouts with {name}, or choose an objective that does not need them"
    if column is None:
        raise DataError(f"the objective needs the column {name}, which the tree lacks", hint=hint)
    absent = [int(row) for row in trained if column.is_null(int(row))] if column.valid is not None else []
    if absent:
        raise DataError(
            f"the objective needs {name}, which is null in {len(absent)} trained trajectories",
            where=f"trajectory {tree.trajectory_id[absent[0]]}, column {name}",
            hint=hint,
        )
    return column


def _pick(column: Ragged, row: Int64, index: Int64) -> npt.NDArray[Any]:
    """The values of trained positions; a row with one value gives it to all its positions."""
    lengths = column.lengths[row]
    return np.asarray(column.values[column.offsets[:-1][row] + np.where(lengths == 1, 0, index)])
