"""One optimizer step's data: units, the order of their work, step-wide counts, metadata of the positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harts_core.errors import ConfigError, DataError, InvalidPlanError
from harts_core.exec.objectives.protocol import Column, ObjectiveBatch, StepTotals
from harts_core.exec.schedule import minibatch_units
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.schedule.units import Event, unit_events, unit_links
from harts_core.plan.validate import validate_plan
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.layout import UnitLayout

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepData:
    """One optimizer step: a validated plan, or a minibatch of it, joined with its tree.

    Make it with ``build_step_data`` or ``build_minibatches``.

    Attributes:
        bundle, tree: the plan and the rollout tree that it is for.
        units: unit ids of the step, replica after replica, in forward order.
        events: when each unit runs forward and backward and is freed.
        original_tokens: token occurrences that the step evaluates.
        rounds: packed linear-attention calls of its units, per layer.
        totals: counts over the whole step.
        row_tokens: int64 [N], trained positions of each tree row that the step evaluates; 0 for the others.
        group: int64 [N], group index of each row; −1 where the row is not trained.
        group_tokens, group_sequences: int64 [groups].
        columns: the metadata columns that the objective needs.
    """

    bundle: PlanBundle
    tree: RolloutTree
    units: tuple[int, ...]
    events: tuple[Event, ...]
    original_tokens: int
    rounds: int
    totals: StepTotals
    row_tokens: Int64
    group: Int64
    group_tokens: Int64
    group_sequences: Int64
    columns: dict[Column, Ragged]

    def batch(self, layout: UnitLayout, logprobs: Tensor, entropy: Tensor | None = None) -> ObjectiveBatch:
        """A unit's log-probabilities with the metadata of their positions.

        Args:
            layout: the unit's; it says which trained position each value belongs to.
            logprobs: λ [P], ordered by (row, position).
            entropy: H [P], where the objective reads it.
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
            entropy=entropy,
            **{name: number(_pick(column, row, index)) for name, column in self.columns.items()},
        )


def build_step_data(
    bundle: PlanBundle, tree: RolloutTree, columns: tuple[Column, ...], *, vocab_size: int
) -> StepData:
    """Validate a plan against its tree and collect what one optimizer step on it needs. Imports no torch.

    Args:
        bundle: the plan.
        tree: the rollout tree.
        columns: metadata that the objective needs for every trained position.
        vocab_size: of the model.

    Raises:
        InvalidPlanError: the plan is of another tree, or breaks a rule of its format.
        DataError: a needed column is absent or null in a trained row, nothing is trained, or the tree has
            token ids that the model lacks.
    """
    return build_minibatches(bundle, tree, columns, vocab_size=vocab_size, num_minibatches=1)[0]


def build_minibatches(
    bundle: PlanBundle,
    tree: RolloutTree,
    columns: tuple[Column, ...],
    *,
    vocab_size: int,
    num_minibatches: int,
) -> list[StepData]:
    """``build_step_data`` for a plan whose slots are split, in order, into several optimizer steps.

    Every minibatch has its own normalisers, as an optimizer step of PPO does.

    Raises:
        InvalidPlanError, DataError: as ``build_step_data``.
        ConfigError: sharing between the slots does not allow that many minibatches.
    """
    check_plan_fits(bundle, tree, vocab_size=vocab_size)
    links = unit_links(bundle)
    parts = minibatch_units(bundle, links, num_minibatches)
    return [_step_data(bundle, tree, columns, units, unit_events(links, units)) for units in parts]


def check_plan_fits(bundle: PlanBundle, tree: RolloutTree, *, vocab_size: int) -> None:
    """Check that a plan can run on a tree with a model of this vocabulary.

    Raises:
        InvalidPlanError: the plan is of another tree, or breaks a rule of its format.
        DataError: the tree has token ids that the model lacks.
    """
    largest = int(tree.suffix.values.max())
    if largest >= vocab_size:
        raise DataError(
            f"the tree has token id {largest}, the model's vocabulary ends at {vocab_size - 1}",
            hint="use the model whose tokenizer made the rollouts",
        )
    check_tree_of(bundle, tree)
    validate_plan(bundle, tree)


def _step_data(
    bundle: PlanBundle,
    tree: RolloutTree,
    columns: tuple[Column, ...],
    units: Sequence[int],
    events: tuple[Event, ...],
) -> StepData:
    table, calls = bundle.assignments, bundle.sequences
    mine = np.flatnonzero(np.isin(table.unit, units))
    rows = np.unique(table.row[mine])
    row_tokens = np.zeros(tree.num_rows, np.int64)
    row_tokens[rows] = tree.trained_counts[rows]
    trained = np.flatnonzero(row_tokens)
    if not len(trained):
        raise DataError(
            "no trajectory of the step has a trained position", hint="check loss_spans in the tree"
        )
    names, numbers = np.unique(np.array(tree.group_id, object)[trained].astype(str), return_inverse=True)
    group = np.full(tree.num_rows, -1, np.int64)
    group[trained] = numbers
    rounds = np.stack([calls.unit, calls.round])[:, np.isin(calls.unit, units)]
    return StepData(
        bundle=bundle,
        tree=tree,
        units=tuple(units),
        events=events,
        original_tokens=int((table.stop[mine].astype(np.int64) - table.start[mine]).sum()),
        rounds=np.unique(rounds, axis=1).shape[1],
        totals=StepTotals(tokens=int(row_tokens.sum()), sequences=len(trained), groups=len(names)),
        row_tokens=row_tokens,
        group=group,
        group_tokens=np.bincount(numbers, weights=row_tokens[trained]).astype(np.int64),
        group_sequences=np.bincount(numbers).astype(np.int64),
        columns={name: _column(tree, name, trained) for name in columns},
    )


def check_whole_trajectories(step: StepData, objective: str) -> None:
    """Refuse a step whose units share the trained positions of a trajectory among them.

    Args:
        step: of a run.
        objective: the name of one that needs them together.

    Raises:
        ConfigError: a trajectory is split.
    """
    table = step.bundle.assignments
    parts = np.flatnonzero(np.isin(table.unit, step.units) & (step.row_tokens[table.row] > 0))
    for part in parts.tolist():
        row = int(table.row[part])
        trained = step.tree.trained_positions(row)
        here = int(((trained >= table.start[part]) & (trained < table.stop[part])).sum())
        if 0 < here < len(trained):
            raise ConfigError(
                f"the objective {objective} couples all positions of a trajectory, but the plan splits some",
                where=f"row {row}",
                hint="use a plan of whole trajectories, or an objective of single tokens",
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
