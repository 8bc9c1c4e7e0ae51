"""How a run has fared so far: how often it died, and how long it lived.

Read once, when a run is opened. A life that was asked to leave, or left by an exception, has made
its state durable and is no death; one that was killed, or whose host is gone, is.
"""

from __future__ import annotations

from holdfast._plan.rate import Lives
from holdfast._record.attempts import read_json
from holdfast._record.layout import RunLayout

_REMEMBERED = 200  # lives: those of last year say little of the machines of today
_HUNG = 77  # as _leave/statuses.py has it: ended from outside, in the middle of a step


def read_lives(layout: RunLayout, before: int) -> Lives:
    """What the lives before this attempt have shown."""
    deaths, seconds = 0, 0.0
    for number in [each for each in layout.attempt_numbers() if each < before][-_REMEMBERED:]:
        ended = read_json(layout.exit(number))
        deaths += ended.get("status") in (None, _HUNG)
        seconds += _lived_seconds(layout, number, ended.get("time"))
    return Lives(deaths, seconds)


def _lived_seconds(layout: RunLayout, number: int, ended: object) -> float:
    began = read_json(layout.lease(number)).get("since")
    ends = [
        ended,
        *(read_json(p).get("time") for p in (layout.heartbeat(number), layout.death(number))),
    ]
    last = max((each for each in ends if isinstance(each, int | float)), default=0.0)
    return max(0.0, last - began) if isinstance(began, int | float) else 0.0
