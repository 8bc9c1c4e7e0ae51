"""Goodput: the share of the time that made progress, and where the rest went."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast._report.timeline import Held
from holdfast._report.view import Goodput, Part, PartKind, Segment
from holdfast._status import words

PROGRESS: tuple[PartKind, ...] = ("progress", "phase")
_LABELS: dict[PartKind, str] = {
    "progress": "training",
    "phase": "evaluation and other phases",
    "saving": "saving",
    "waiting": "waiting for other ranks",
    "lost": "repeated work",
    "starting": "starting",
    "leaving": "leaving",
    "stuck": "standing still",
    "paused": "held by a debugger or a signal",
    "queue": "waiting for the queue",
    "down": "down",
}
_MOST_NAMED = 4
_CRUMB_SHARE = 2e-4  # of the whole time
_LEAST_SHARE = 0.01  # of what was lost, to be named


def account(segments: Sequence[Segment], held: Held) -> Goodput:
    """The parts of the whole time, which sum to it."""
    seconds: dict[PartKind, float] = dict.fromkeys(_LABELS, 0.0)
    for each in segments:
        kind: PartKind = "progress" if each["kind"] == "training" else each["kind"]
        seconds[kind] += each["end"] - each["start"]
    # What is spread over steps was drawn as training, and cannot be more than that.
    spread: tuple[tuple[PartKind, float], ...] = (
        ("phase", held.phase),
        ("saving", held.save),
        ("waiting", held.agree),
    )
    for kind, wanted in spread:
        taken = min(max(0.0, wanted), seconds["progress"])
        seconds["progress"] -= taken
        seconds[kind] += taken
    _fold_crumbs(seconds)
    wall = sum(seconds.values())
    progress = sum(seconds[kind] for kind in PROGRESS)
    parts = [
        Part(kind=kind, seconds=each, share=each / wall, label=_label(kind, segments))
        for kind, each in seconds.items()
        if each > 0
    ]
    return Goodput(
        wall_seconds=wall,
        progress_seconds=progress,
        share=progress / wall if wall else 0.0,
        parts=parts,
        sentence=_sentence(parts, wall - progress),
    )


def _fold_crumbs(seconds: dict[PartKind, float]) -> None:
    """What nobody could see goes to the greatest loss."""
    wall = sum(seconds.values())
    lost = [kind for kind in seconds if kind not in PROGRESS and seconds[kind] > 0]
    greatest = max(lost, key=lambda kind: seconds[kind], default=None)
    for kind in lost:
        if kind != greatest and seconds[kind] < _CRUMB_SHARE * wall and greatest is not None:
            seconds[greatest] += seconds[kind]
            seconds[kind] = 0.0


def _label(kind: PartKind, segments: Sequence[Segment]) -> str:
    if kind != "lost":
        return _LABELS[kind]
    newest = max(each["attempt"] or 0 for each in segments)
    lost = {each["attempt"] for each in segments if each["kind"] == "lost"}
    # What the newest attempt lost nobody has made again so far.
    return "work to be made again" if lost == {newest} else _LABELS[kind]


def _sentence(parts: Sequence[Part], lost: float) -> str:
    """What was lost, with the greatest causes first."""
    if not parts:
        return "no time has passed yet"
    if lost < 0.001:
        return "nothing lost"
    found = [each for each in parts if each["kind"] not in PROGRESS]
    found.sort(key=lambda each: -each["seconds"])
    named = [each for each in found if each["seconds"] >= _LEAST_SHARE * lost][:_MOST_NAMED]
    told = [f"{100 * each['seconds'] / lost:.0f}% {each['label']}" for each in named]
    rest = lost - sum(each["seconds"] for each in named)
    if rest >= _LEAST_SHARE * lost:
        told.append(f"{100 * rest / lost:.0f}% other")
    return f"lost {words.duration(lost)}: {', '.join(told)}"
