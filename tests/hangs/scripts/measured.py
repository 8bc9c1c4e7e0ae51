"""Whether the keeper has seen how long a step takes: only then is there a measure of a hang."""

from __future__ import annotations

import json
from pathlib import Path

_EVERY = 10  # steps


def is_measured(folder: str, step: int) -> bool:
    """By the heartbeat of the run; only now and then, since it costs a file."""
    if step % _EVERY:
        return False
    for path in Path(folder).glob("attempts/*/heartbeat.json"):
        pace = json.loads(path.read_text()).get("pace")
        return bool(pace) and pace.get("usual") is not None
    return False
