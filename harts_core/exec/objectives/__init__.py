"""Objectives: functions of log-probabilities in trajectory order, chosen by ``[objective] name``.

Nothing here imports torch: tensors bring their own operations.
"""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from typing import Any

from harts_core.errors import ConfigError
from harts_core.exec.config import ObjectiveSection
from harts_core.exec.config_table import parse_section, suggest
from harts_core.exec.objectives.grpo import Dapo, DrGrpo, Grpo, Ppo
from harts_core.exec.objectives.gspo import Gspo
from harts_core.exec.objectives.protocol import (
    MetricSum,
    Objective,
    ObjectiveBatch,
    ObjectiveOutput,
    StepTotals,
    needs_entropy,
    needs_whole_trajectories,
)
from harts_core.exec.objectives.score import Cispo, Reinforce

__all__ = [
    "OBJECTIVES",
    "Cispo",
    "Dapo",
    "DrGrpo",
    "Grpo",
    "Gspo",
    "MetricSum",
    "Objective",
    "ObjectiveBatch",
    "ObjectiveOutput",
    "Ppo",
    "Reinforce",
    "StepTotals",
    "build_objective",
    "needs_entropy",
    "needs_whole_trajectories",
]

OBJECTIVES: dict[str, type[Any]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "ppo": Ppo,
    "gspo": Gspo,
    "cispo": Cispo,
    "reinforce": Reinforce,
}
"""Built-in objectives by name; docs/objectives.md has their formulas and defaults."""


def build_objective(section: ObjectiveSection, where: str = "train config") -> Objective:
    """The configured objective with its options.

    Args:
        section: name (of ``OBJECTIVES``, or an import path ``package.module:Name`` of a dataclass that
            follows ``Objective``) and options.
        where: named in errors.

    Raises:
        ConfigError: no such objective, an unknown option, or a wrong value.
    """
    cls = OBJECTIVES.get(section.name)
    if cls is None:
        if ":" not in section.name:
            raise ConfigError(
                f"[objective] unknown name {section.name}",
                where=where,
                hint=f"{suggest(section.name, OBJECTIVES, 'names')}; or an import path package.module:Name",
            )
        cls = _import_objective(section.name, where)
    objective: Objective = parse_section(cls, section.options, "objective", where)
    return objective


def _import_objective(path: str, where: str) -> type[Any]:
    module_name, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"[objective] cannot import {path} ({error})", where=where) from error
    if not (isinstance(found, type) and is_dataclass(found) and _is_objective(found)):
        raise ConfigError(
            f"[objective] {path} is not an objective: a dataclass with columns and __call__ is needed",
            where=where,
            hint="docs/objectives.md shows one",
        )
    taken = {f.name for f in fields(found)} & {f.name for f in fields(ObjectiveSection)}
    if taken:
        raise ConfigError(
            f"[objective] {path} has an option {min(taken)}, which is a key of the table itself",
            where=where,
            hint="rename the option",
        )
    return found


def _is_objective(cls: type[Any]) -> bool:
    defines_call = any("__call__" in base.__dict__ for base in cls.__mro__)  # hasattr sees the metaclass's
    return defines_call and hasattr(cls, "columns")
