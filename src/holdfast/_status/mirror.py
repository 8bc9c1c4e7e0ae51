"""What is known of a run's mirror, for `holdfast status`: by what was noted, without asking it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast._record.attempts import read_json
from holdfast._record.layout import RunLayout
from holdfast._status import words


@dataclass(frozen=True, slots=True)
class MirrorSummary:
    """A mirror as the process that copies to it saw it last."""

    address: str
    step: int | None  # the newest there
    age_seconds: float | None  # of that checkpoint
    count: int
    copying_step: int | None
    copied_bytes: int | None
    copying_bytes: int | None
    trouble: str | None


def read_mirror(layout: RunLayout) -> MirrorSummary | None:
    """None if the run has none, or never had."""
    record = read_json(layout.mirror)
    address = record.get("address")
    if not isinstance(address, str):
        return None
    found = record.get("checkpoints")
    held = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    under_way = record.get("under_way")
    copying = under_way if isinstance(under_way, dict) else {}
    saved_at = record.get("newest_saved_at")
    return MirrorSummary(
        address=address,
        step=held[-1].get("step") if held else None,
        age_seconds=max(0.0, time.time() - saved_at) if isinstance(saved_at, float) else None,
        count=len(held),
        copying_step=copying.get("step"),
        copied_bytes=copying.get("done_bytes"),
        copying_bytes=copying.get("total_bytes"),
        trouble=record.get("trouble") or None,
    )


def describe_mirror(mirror: MirrorSummary | None) -> str:
    """In one line."""
    if mirror is None:
        return ""
    text = "nothing yet"
    if mirror.step is not None:
        noun = "checkpoint" if mirror.count == 1 else "checkpoints"
        text = f"step {mirror.step}"
        if mirror.age_seconds is not None:
            text += f", {words.duration(mirror.age_seconds)} old"
        text += f" ({mirror.count} {noun})"
    text += f" in {words.name(mirror.address)}"
    if mirror.trouble:
        trouble = mirror.trouble.partition("\n")[0].removeprefix(f"{mirror.address}: ")
        return f"{text}; {words.name(trouble)}"
    if mirror.copying_step is not None and mirror.copied_bytes is not None:
        done = words.size(mirror.copied_bytes)
        text += f"; copying step {mirror.copying_step}: {done}"
        if mirror.copying_bytes is not None:
            text += f" of {words.size(mirror.copying_bytes)}"
    return text
