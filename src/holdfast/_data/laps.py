"""The beginning of a lap: fresh, or where the life before had been.

To draw the same order again, the generators are put back to where they were when the lap
began, the source draws, and the generators go to where they were at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast._data.course import Lap
from holdfast._data.feed import Feed
from holdfast._data.seeds import digest_states, generator_states, restore_held
from holdfast._save.capture import adapters, capture_generators, restore_generators
from holdfast._say import say


def owned_generators(state: Mapping[str, Any]) -> list[Any]:
    """The generators that the user has given to the run."""
    return [v for v in state.values() if any(a.is_generator(v) for a in adapters())]


def begin_fresh(feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
    """A lap from its first batch; also returns what it takes to begin it again."""
    states: dict[str, Any] = {
        "global": capture_generators(devices=False),
        "owned": generator_states(feed.owned),
    }
    start = {**states, "seed": digest_states(states), "base": feed.base}
    return start, feed.open(lap, start["seed"])


def begin_in_the_middle(feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
    """The rest of a lap that was interrupted; the generators end as they were at the boundary."""
    assert lap.goal is not None
    start = lap.goal.start
    if lap.is_over:
        return start, iter(())
    if lap.goal.length != feed.length and None not in (lap.goal.length, feed.length):
        say(
            f"the loader had {lap.goal.length} batches and has {feed.length} now: the run goes on "
            f"behind the first {lap.skip}, but these are not the ones it had used."
        )
    feed.base = start["base"]  # a generator that the script did not seed is another in each life
    before = capture_generators(devices=False), generator_states(feed.owned)
    restore_generators(start["global"])
    restore_held(feed.owned, start["owned"])
    try:
        batches = feed.open(lap, start["seed"])
    finally:
        restore_generators(before[0])
        restore_held(feed.owned, before[1])
    return start, batches
