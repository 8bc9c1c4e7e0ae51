"""The beginning of a lap: fresh, or where the life before had been.

To draw the same order again, the generators are put back to where they were when the lap
began, the source draws, and the generators go to where they were at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast._data.course import Lap
from holdfast._data.feed import Feed
from holdfast._data.seeds import generator_states, restore_held, seeds_of
from holdfast._save.capture import capture_generators, restore_generators
from holdfast._say import say


def begin_fresh(feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
    """A lap from its first batch; also returns what it takes to begin it again."""
    states = capture_generators(devices=False)
    start = {
        "global": states,
        "owned": generator_states(feed.kit.owned),
        "seeds": seeds_of(states),
        "bases": feed.bases,
    }
    lap.usual_length = feed.usual_length
    return start, feed.open(lap, start["seeds"])


def begin_in_the_middle(feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
    """The rest of a lap that was interrupted; the generators end as they were at the boundary."""
    assert lap.goal is not None
    start = lap.goal.start
    if lap.is_over:
        return start, iter(())
    if not feed.fits(lap.goal):
        lap.goal = feed.carry_over(lap.goal)
    lap.usual_length = feed.usual_length
    feed.bases = start["bases"]
    before = capture_generators(devices=False), generator_states(feed.kit.owned)
    restore_generators(start["global"])
    restore_held(feed.kit.owned, start["owned"])
    try:
        batches = feed.open(lap, start["seeds"])
    finally:
        restore_generators(before[0])
        restore_held(feed.kit.owned, before[1])
    # A lap that other ranks have begun has its length since it is open.
    if lap.goal.length != feed.length and None not in (lap.goal.length, feed.length):
        say(
            f"the loader had {lap.goal.length} batches and has {feed.length} now: the run goes on "
            f"behind the first {lap.skip}, but these are not the ones it had used."
        )
    return start, batches


def say_reached(made: int, total: int, unit: str = "") -> str:
    """How far it is; an earlier life may have been asked for more.

    >>> say_reached(3, 3, " epochs"), say_reached(3, 2, " epochs")
    ('3 of 3 epochs', '3 epochs (2 were asked for)')
    """
    return f"{made} of {total}{unit}" if made == total else f"{made}{unit} ({total} were asked for)"
