"""The run's lineage: which (attempt, step) states lead to the newest attempt.

An attempt starts from a state of an earlier one. What the earlier one saved beyond that state (a
late writer, a checkpoint that came back) belongs to another history, and must not be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping

Origin = tuple[int, int] | None


def trace_line(origins: Mapping[int, Origin], newest: int) -> dict[int, int | None]:
    """For each attempt on the lineage of `newest`, the last step that counts (None: all).

    `origins` has the attempts that began to train, each with the (attempt, step)
    it came from, or None for one that began from scratch.

    >>> trace_line({1: None, 2: (1, 50), 3: (1, 40)}, newest=3)
    {3: None, 1: 40}
    """
    begun = [number for number in origins if number <= newest]
    if not begun:
        return {}
    attempt = max(begun)
    line: dict[int, int | None] = {attempt: None}
    origin = origins[attempt]
    while origin is not None and origin[0] < attempt:
        attempt, step = origin
        line[attempt] = step
        origin = origins.get(attempt)
    return line


def is_on_line(line: Mapping[int, int | None], attempt: int, step: int) -> bool:
    """Whether the state that `attempt` saved at `step` is on the lineage."""
    if attempt not in line:
        return False
    last = line[attempt]
    return last is None or step <= last
