"""Second forwards: a unit that waits for its backward keeps no graph, and runs forward again before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harts_core.plan.recompute import Recompute, recomputes_units
from harts_core.plan.schedule.units import Event


def with_second_forwards(events: Sequence[Event], recompute: Recompute) -> tuple[Event, ...]:
    """The events of one process, with a ``recompute`` before every backward that needs one.

    A backward needs one unless the pass before it is its own unit's forward: then the graph of that forward
    is the only one alive. The ``recompute`` comes before the unit's gradient is received from the next stage
    of a pipeline, so that it runs while that is under way.

    Args:
        events: in order; without backwards (a forward-only pass) nothing is added.
        recompute: without units nothing is added.
    """
    if not recomputes_units(recompute):
        return tuple(events)
    result: list[Event] = []
    last: Event | None = None  # pass
    for event in events:
        if event.kind == "backward" and last != Event(kind="forward", unit=event.unit):
            again = Event(kind="recompute", unit=event.unit)
            receives = bool(result) and result[-1] == Event(kind="receive_gradient", unit=event.unit)
            result.insert(len(result) - receives, again)
        if event.kind in ("forward", "backward"):
            last = event
        result.append(event)
    return tuple(result)


def peak_graphs(events: Sequence[Event], weight: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> int:
    """The largest total weight of the units whose graph is alive at once.

    A graph is alive from the last forward of its unit to its backward.

    Args:
        events: of one process or one pipeline stage, with second forwards.
        weight: [units of the plan], a unit's weight; True counts units.
    """
    second = {event.unit for event in events if event.kind == "recompute"}
    alive = peak = 0
    for event in events:
        makes = event.kind == ("recompute" if event.unit in second else "forward")
        alive += int(weight[event.unit]) * (makes - (event.kind == "backward"))
        peak = max(peak, alive)
    return peak
