"""How a broken rule is reported: the first offender by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from harts_core.errors import InvalidPlanError


def reject(what: str, where: str) -> InvalidPlanError:
    """The error of one broken rule."""
    return InvalidPlanError(what, where=where, hint="plan again; if a planner made this plan, report it")


def require(ok: npt.NDArray[np.bool_], what: str, where: Callable[[int], str]) -> None:
    """Raise for the first line that is not ok.

    Args:
        ok: bool [lines].
        what: the rule that is broken there.
        where: names a line.
    """
    if not ok.all():
        raise reject(what, where(int(np.flatnonzero(~ok)[0])))
