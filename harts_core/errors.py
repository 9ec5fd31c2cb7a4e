"""The errors that HARTS raises on purpose.

::

    HartsError                    exit code
    ├── ConfigError               2   usage or configuration
    ├── DataError                 3   input data
    │   ├── SchemaMismatchError       a file has other columns or types than its format
    │   └── CorruptFileError          a file cannot be read or its hash is wrong
    ├── PlanError                 4   planning
    │   ├── InfeasiblePlanError       no plan exists under the given limits
    │   └── InvalidPlanError          a plan breaks a rule of the bundle format
    └── ExecError                 5   execution
        ├── MissingBackendError       an optional package or device is absent
        └── NonFiniteError            NaN or infinity in a loss or gradient

Only these are caught at the command line; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class HartsError(Exception):
    """An expected failure: what happened, where, and what to do about it.

    Args:
        what: one sentence, the failure itself.
        where: file, record, field, row or config key it was found in.
        hint: what the user can do, ideally the next command to type.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n".join(parts)


class ConfigError(HartsError):
    """Wrong usage or configuration."""

    exit_code = 2


class DataError(HartsError):
    """Input data is wrong."""

    exit_code = 3


class SchemaMismatchError(DataError):
    """A file lacks a column of its format or has it with another type."""


class CorruptFileError(DataError):
    """A file is truncated, unreadable, or its content does not match its hash."""


class PlanError(HartsError):
    """Planning failed."""

    exit_code = 4


class InfeasiblePlanError(PlanError):
    """No plan exists under the given limits."""


class InvalidPlanError(PlanError):
    """A plan breaks a rule of the bundle format, or belongs to another rollout-tree file."""


class ExecError(HartsError):
    """Executing a plan failed."""

    exit_code = 5


class MissingBackendError(ExecError):
    """An optional package or a device is absent."""


class NonFiniteError(ExecError):
    """A loss, gradient or log-probability is NaN or infinite."""
