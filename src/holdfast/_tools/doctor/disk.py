"""Whether checkpoints find room on the disk, and whether one is written in the time there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast._text import duration, size
from holdfast._tools.doctor.finding import Check

MOST_BYTES = 256 << 20
LEAST_BYTES = 32 << 20  # of less a cache says more than the disk
WRITE_SECONDS = 2.0
_LITTLE_ROOM = 1 << 30
_FEW_INODES = 1000
_SLOW = 20e6  # bytes per second


@dataclass(frozen=True)
class Grace:
    """The time from a signal until SIGKILL, and who says so."""

    seconds: float
    by: str
    shorter: Grace | None = None  # of another end, which comes with less of a warning


def bytes_to_write(state: int | None, free: int | None) -> int:
    """How much is worth writing to know the speed; never what would fill a disk."""
    wanted = MOST_BYTES if state is None else min(MOST_BYTES, max(LEAST_BYTES, state))
    return wanted if free is None else max(0, min(wanted, free // 4))


def judge_room(
    free: int | None, inodes: int | None, state: int | None, kept: int, held: int
) -> Check | None:
    """Room for the checkpoints that a run keeps and the one being written.

    `held` is what the run's checkpoints take already: it is used again as old ones go.
    """
    if free is None:
        return None
    data = {"free": free, "free_inodes": inodes, "state": state, "kept": kept, "held": held}
    if inodes is not None and inodes < _FEW_INODES:
        return Check(
            "disk room",
            "fail" if inodes < 50 else "warn",
            f"{inodes} more files can be made, though {size(free)} are free",
            "df -i .   (many small files use up the inodes)",
            data,
        )
    if state is None:
        if free < _LITTLE_ROOM:
            found = f"{size(free)} free; how much a checkpoint takes is not known yet"
            return Check("disk room", "warn", found, "holdfast clean   (or make room)", data)
        most = free // (kept + 1)
        found = f"{size(free)} free: {kept + 1} checkpoints of up to {size(most)} fit"
        return Check("disk room", "ok", found, "", data)
    needed = max(0, (kept + 1) * state - held)
    if free < state:
        return Check(
            "disk room",
            "fail",
            f"{size(free)} free, and one checkpoint takes {size(state)}",
            "holdfast clean   (removes what no run needs), or make room",
            data,
        )
    if free < needed:
        return Check(
            "disk room",
            "warn",
            f"{size(free)} free, and {kept} kept checkpoints of {size(state)} and the one being "
            f"written need {size(needed)}",
            "holdfast clean   (or make room, or holdfast.Settings(keep_last=1))",
            data,
        )
    found = f"{size(free)} free: {kept} kept checkpoints of {size(state)} and the next one fit"
    return Check("disk room", "ok", found, "", data)


def judge_speed(
    measured: Mapping[str, Any] | None,
    state: int | None,
    grace: Grace,
    taken_seconds: float | None = None,
) -> Check:
    """A save against the grace; `taken_seconds` is the longest that the run has had of late."""
    written, seconds = _measured(measured)
    if measured is not None and measured.get("error"):
        return Check(
            "write speed",
            "fail",
            f"writing failed after {size(written)}: {measured['error']}",
            "df -h .   (a quota or a full disk says so there)",
            {"bytes": written, "error": measured["error"]},
        )
    if not written or seconds <= 0:
        return Check(
            "write speed",
            "fail",
            f"the disk did not take a file within {WRITE_SECONDS + 1.5:.0f} s",
            "use a run folder on another disk",
        )
    speed = written / seconds
    fast = f"{size(speed)}/s with fsync"
    data = {
        "bytes_per_second": round(speed),
        "bytes": written,
        "seconds": round(seconds, 3),
        "state": state,
        "grace_seconds": grace.seconds,
        "save_seconds": taken_seconds,
    }
    if state is None:
        most = speed * grace.seconds / 2
        if speed < _SLOW:
            found = f"{fast}: in the {duration(grace.seconds)} of grace ({grace.by}) "
            found += f"{size(2 * most)} are written"
            return Check("write speed", "warn", found, "use a run folder on a faster disk", data)
        found = f"{fast}: a state of up to {size(most)} fits well into the "
        return Check(
            "write speed",
            "ok",
            found + f"{duration(grace.seconds)} of grace ({grace.by})",
            "",
            data,
        )
    needed = state / speed
    how = f"{fast}, so {size(state)} take {duration(needed)}"
    if taken_seconds is not None and taken_seconds > needed:
        needed, how = (
            taken_seconds,
            f"{fast}, and a save of this run took {duration(taken_seconds)}",
        )
    data["needed_seconds"] = round(needed, 3)
    against = f"{how}; the grace is {duration(grace.seconds)} ({grace.by})"
    if needed > grace.seconds:
        return Check(
            "write speed", "fail", f"{against}: a save does not fit", _more_time(needed), data
        )
    if grace.shorter is not None and needed > grace.shorter.seconds:
        return Check(
            "write speed",
            "warn",
            f"{against}, but only {duration(grace.shorter.seconds)} by {grace.shorter.by}",
            _more_time(needed),
            data,
        )
    if needed > grace.seconds / 2:
        # The step that is under way has to end first.
        return Check(
            "write speed",
            "warn",
            f"{against}: a save fits only if the step ends soon",
            _more_time(needed),
            data,
        )
    return Check("write speed", "ok", against, "", data)


def _more_time(needed: float) -> str:
    lead = max(30, int(-(-3 * needed // 10) * 10))
    return (
        f"be warned earlier: holdfast submit --lead {lead} …, docker stop -t {lead}, "
        f"terminationGracePeriodSeconds: {lead}; or use a faster disk"
    )


def _measured(measured: Mapping[str, Any] | None) -> tuple[int, float]:
    if measured is None:
        return 0, 0.0
    return int(measured.get("bytes") or 0), float(measured.get("seconds") or 0.0)
