"""What the keeper is told of times: of the watch over hangs, and of the grace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from holdfast._environment import variables
from holdfast._errors import SettingsError
from holdfast._run.past import Lives, read_lives
from holdfast._run.saving.cadence import Cadence, Tempo
from holdfast._settings import Settings, parse_seconds
from holdfast._store.commit.checkpoint import Policy
from holdfast._text import count, duration, say


def hang_policy(settings: Settings) -> dict[str, Any]:
    """How long a step may take, and whether the run leaves if it takes longer.

    Only `holdfast run --hang-timeout` has it leave: else nobody would start it again.
    """
    wish = variables.hang_timeout().strip().lower()
    seconds = settings.hang_seconds
    if wish and wish != "auto":
        with contextlib.suppress(SettingsError):
            seconds = parse_seconds(wish if wish[-1].isalpha() else f"{wish}s", "--hang-timeout")
    return {"hang_seconds": seconds or None, "hang_restarts": bool(wish)}


def grace_of(settings: Settings) -> float | None:
    """What a SIGTERM leaves, by the settings, or else by whoever has written the pod's manifest."""
    text = variables.grace_seconds()
    if settings.grace_seconds is not None or not text:
        return settings.grace_seconds
    try:
        seconds = parse_seconds(text if text[-1].isalpha() else f"{text}s", "")
    except SettingsError:
        seconds = 0.0
    if seconds > 0:
        return seconds
    say(
        f"HOLDFAST_GRACE_SECONDS={text!r} is not a time, and is passed over.\n"
        "Write seconds above 0: those between SIGTERM and the kill, less a few."
    )
    return None


# -- The cadence of an attempt, and what is said of it where the run itself finds the interval.


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
