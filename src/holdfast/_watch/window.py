"""What a process or a thread did between two samples of it."""

from __future__ import annotations

from holdfast._watch.pyspy import PythonThread
from holdfast._watch.threads import ProcessSample, ThreadSample


def state_between(before: str, after: str) -> str:
    """Over the window: a process that waits for the disk now and then is at work."""
    if before == after or after in "TtZX":
        return after
    if "R" in (before, after):
        return "R"
    return before if after == "D" else after


def waits_between(before: ThreadSample, after: ThreadSample, window: float) -> float:
    """The share of the window for which it was ready to run, and others had the processors."""
    counted = (after.waited_seconds or 0.0) - (before.waited_seconds or 0.0)
    if before is not after and before.state == after.state == "R" and before.wakes == after.wakes:
        # A wait is counted when it is over, and it may have lasted for all of the window.
        counted = max(counted, window - (after.cpu_seconds - before.cpu_seconds))
    return min(1.0, rate(counted, window))


def rate(count: float, window: float) -> float:
    return round(max(0.0, count) / window, 3) if window > 0 else 0.0


def wakes_between(before: ProcessSample, after: ProcessSample, window: float) -> float | None:
    if before.wakes is None or after.wakes is None:
        return None
    return rate(after.wakes - before.wakes, window)


def moved_between(thread: PythonThread, later: dict[int, PythonThread]) -> bool | None:
    """Whether a thread stood elsewhere later; None where that is not known."""
    if not later:
        return None
    again = later.get(thread.ident)
    return again is None or again.frames != thread.frames
