"""The cadence of an attempt, and what is said of it where the run itself finds the interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from holdfast._keeper.keep import Policy
from holdfast._plan.rate import Lives
from holdfast._record.past import read_lives
from holdfast._save.cadence import Cadence
from holdfast._save.tempo import Tempo
from holdfast._say import say
from holdfast._settings import Settings
from holdfast._why.words import count, duration


def begin_cadence(
    settings: Settings, policy: Policy, step: int, note: Callable[..., None]
) -> Cadence:
    """When this attempt saves."""
    now = time.monotonic()
    if not settings.is_auto:
        return Cadence(settings, now, step)

    def tell(tempo: Tempo) -> None:
        if not tempo.is_known:
            say(sentence_of(tempo))
        note("cadence", **facts_of(tempo))

    # Of several ranks the first proposes; the others need not read what it has read.
    lives = Lives() if policy.rank else read_lives(policy.layout, policy.attempt)
    return Cadence(settings, now, step, Tempo(lives, now, tell))


def sentence_of(tempo: Tempo) -> str:
    """Why the interval is what it is."""
    past = f" after {count(tempo.lives.deaths, 'death')} so far" if tempo.lives.deaths else ""
    return (
        f"a checkpoint every {duration(tempo.seconds)}: one takes {duration(tempo.cost_seconds)} "
        f"from training, and a death is expected every {duration(tempo.mtbf_seconds)}{past}."
    )


def facts_of(tempo: Tempo) -> dict[str, Any]:
    """The same for the journal."""
    return {
        "seconds": round(tempo.seconds, 3),
        "cost_seconds": round(tempo.cost_seconds, 6),
        "mtbf_seconds": round(tempo.mtbf_seconds, 1),
        "deaths": tempo.lives.deaths,
    }
