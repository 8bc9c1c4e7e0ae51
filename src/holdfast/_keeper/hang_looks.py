"""What one look tells the judge: what a trainer does, who holds it, and what it waits for."""

from __future__ import annotations

from typing import Any

from holdfast._watch.patience import FIRST, OUTSIDE, PHASE, WORK

_MOST_CROWDED = 60.0
_WAIT_SECONDS = 5.0  # for a save
_LONGEST_WAIT_SECONDS = 60.0  # for a phase that may take longer
AT_WORK = ("BUSY", "POLLS")  # perhaps: these get more time
_WAITS = ("wait4", "waitid")
_HELD_BY = {
    "STOPPED": "SIGSTOP",
    "FROZEN": "its cgroup",
    "UNREAD": "its own output, which nobody reads",
}


def activity(look: dict[str, Any]) -> str:
    """What a trainer and all below it do, in the words of `_watch/activity.py`."""
    from holdfast._watch.activity import activity_of  # only in trouble

    if look.get("paused"):
        return "PAUSED"
    if not look.get("processes"):
        return "MOVING"  # nothing was seen: the benefit of the doubt
    return activity_of(look).name


def held_by(act: str, look: dict[str, Any]) -> str:
    """In words: what holds it."""
    if look.get("paused"):
        return str(look["paused"])
    processes = look.get("processes") or [{}]
    if act == "TRACED":
        return str(next((p["tracer_name"] for p in processes if p.get("tracer_name")), "a tracer"))
    return _HELD_BY.get(act) or _debugger(look)


def _debugger(look: dict[str, Any]) -> str:
    from holdfast._watch.activity import held_thread  # only in trouble

    found = held_thread(look)
    if found is None:
        return "a debugger"
    by, process, _ = found
    is_trainer = process is (look.get("processes") or [{}])[0]
    return by if is_trainer else f"{by} in its process {process.get('pid')}"


def is_deaf(act: str, look: dict[str, Any]) -> bool:
    """Whether it could say that it is held only when that is over; strace lets it speak."""
    processes = look.get("processes") or [{}]
    if act == "UNREAD":
        from holdfast._watch.activity import unread_of  # only in trouble

        return 2 in unread_of(look)  # what is said would wait there as well
    return act in ("STOPPED", "FROZEN") or processes[0].get("state") == "t"


def wait_for(bound: dict[int, dict[str, Any]]) -> float | None:
    """For how long others must wait for a rank that may take its time; None if none may."""
    waits = []
    for look in bound.values():
        if look.get("stretch") in (PHASE, FIRST, OUTSIDE, WORK) and look.get("patience"):
            left = look["patience"] - (look.get("stood") or 0.0)
            most = _WAIT_SECONDS if look["stretch"] == WORK else _LONGEST_WAIT_SECONDS
            if left > 0:
                waits.append(min(max(left, 1.0), most))
    return min(waits, default=None)


def crowding(look: dict[str, Any]) -> float:
    """How many times longer the work of one takes, since others have the processors.

    Not for the main thread of the trainer: its patience leaves out what that waits.
    """
    from holdfast._watch.activity import waiting_share  # only in trouble

    shares = [0.0]
    for number, process in enumerate(look.get("processes") or []):
        threads = [
            each for each in process.get("threads") or [] if number > 0 or not each.get("is_main")
        ]
        shares.append(waiting_share({"threads": threads}))
    return min(_MOST_CROWDED, 1.0 / max(1.0 - max(shares), 1e-3))


def computes_on(look: dict[str, Any]) -> bool:
    """Whether a process that computes does so at another place from one moment to the next."""
    for number, process in enumerate(look.get("processes") or []):
        stack, has_moved = main_stack(process)
        # Where a program below it stands that is not Python is not known: the benefit of the doubt.
        is_unknown = number > 0 and not stack
        if _computes(process) and (has_moved or is_unknown):
            return True
    return False


def _computes(process: dict[str, Any]) -> bool:
    from holdfast._watch.activity import computes  # only in trouble

    return computes(process)


def main_stack(process: dict[str, Any]) -> tuple[tuple[Any, ...], bool]:
    """Where the main thread of a process stands, and whether it was seen to move."""
    for thread in process.get("threads") or []:
        if thread.get("is_main"):
            frames = thread.get("frames") or []
            stack = tuple((f.get("file"), f.get("line"), f.get("name")) for f in frames)
            return stack, bool(thread.get("moved"))
    return (), False


def by_cpu(look: dict[str, Any]) -> dict[int, Any]:
    """The stacks of the processes that compute, by pid."""
    found = {}
    for process in look.get("processes") or []:
        if _computes(process):
            found[process.get("pid", 0)] = main_stack(process)[0]
    return found


def awaited_processes(look: dict[str, Any]) -> frozenset[int]:
    """If it waits for a program that it has started: all that runs below it."""
    processes = look.get("processes") or []
    threads = [each for process in processes[:1] for each in process.get("threads") or []]
    for main in (each for each in threads if each.get("is_main")):
        files = [str(each.get("file")) for each in main.get("frames") or []]
        if main.get("call") in _WAITS or any(each.endswith("/subprocess.py") for each in files):
            return frozenset(each.get("pid", 0) for each in processes[1:])
    return frozenset()
