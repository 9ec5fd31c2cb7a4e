"""Limits for continuous integration: ``--fail-under METRIC=VALUE``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harts_core.errors import ConfigError


def parse_gates(texts: Sequence[str]) -> list[tuple[str, float]]:
    """(metric, least value) of every ``METRIC=VALUE``.

    Raises:
        ConfigError: another form, or the value is not a finite number.
    """
    gates = []
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            least = float(value)
        except ValueError:
            least = math.nan
        if not name or not separator or not math.isfinite(least):
            raise ConfigError(
                f"{text!r} is not METRIC=VALUE with a number", where="--fail-under", hint="e.g. balance=0.95"
            )
        gates.append((name, least))
    return gates


def missed_gates(gates: Sequence[tuple[str, float]], metrics: Mapping[str, float]) -> list[str]:
    """A sentence for every metric that is below its least value.

    Raises:
        ConfigError: an unknown metric; the known ones are listed.
    """
    for name, _ in gates:
        if name not in metrics:
            known = ", ".join(sorted(metrics))
            raise ConfigError(f"there is no metric {name!r}", where="--fail-under", hint=f"one of {known}")
    return [
        f"{name} is {metrics[name]:.6g}, under {least:.6g}" for name, least in gates if metrics[name] < least
    ]
