"""What the keeper is told of the watch over hangs."""

from __future__ import annotations

import contextlib
from typing import Any

from holdfast import _env
from holdfast._errors import SettingsError
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
