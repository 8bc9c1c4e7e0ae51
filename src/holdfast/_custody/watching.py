"""What the keeper is told of times: of the watch over hangs, and of the grace."""

from __future__ import annotations

import contextlib
from typing import Any

from holdfast import _env
from holdfast._errors import SettingsError
from holdfast._say import say
from holdfast._settings import Settings, parse_seconds


def hang_policy(settings: Settings) -> dict[str, Any]:
    """How long a step may take, and whether the run leaves if it takes longer.

    Only `holdfast run --hang-timeout` has it leave: else nobody would start it again.
    """
    wish = _env.hang_timeout().strip().lower()
    seconds = settings.hang_seconds
    if wish and wish != "auto":
        with contextlib.suppress(SettingsError):
            seconds = parse_seconds(wish if wish[-1].isalpha() else f"{wish}s", "--hang-timeout")
    return {"hang_seconds": seconds or None, "hang_restarts": bool(wish)}


def grace_of(settings: Settings) -> float | None:
    """What a SIGTERM leaves, by the settings, or else by whoever has written the pod's manifest."""
    text = _env.grace_seconds()
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
