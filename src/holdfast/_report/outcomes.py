"""How an attempt ended, as one word and as a sentence."""

from __future__ import annotations

from holdfast._leave import statuses
from holdfast._report.lives import Life
from holdfast._report.view import Outcome

QUIET: tuple[Outcome, ...] = ("running", "finished", "closed", "stopped", "interrupted")
_BY_STATUS: dict[int, Outcome] = {
    statuses.FINISHED: "closed",
    statuses.BAD: "bad",
    statuses.NOT_DURABLE: "failed",
    statuses.REQUEUE: "interrupted",
    statuses.IDLE: "failed",
    statuses.HUNG: "hung",
    statuses.PERSON: "stopped",
    statuses.TERMINATED: "stopped",
    statuses.HUNG_UP: "stopped",
}
_BY_CAUSE: dict[str, Outcome] = {
    **dict.fromkeys(("oom-cgroup", "oom-machine", "oom-worker", "cuda-oom"), "out-of-memory"),
    **dict.fromkeys(
        ("segfault", "abort", "cxx-exception", "bus-error", "illegal-instruction"), "crashed"
    ),
    **dict.fromkeys(("preempted", "time-limit"), "interrupted"),
    **dict.fromkeys(("asked", "terminated"), "stopped"),
    **dict.fromkeys(("machine-lost", "unknown"), "lost"),
    "killed": "killed",
    "finished": "finished",
    "bad-training": "bad",
}
_NOW = {
    "starting": "It starts.",
    "stuck": "It stands still.",
    "paused": "It is held.",
    "stopping": "It was asked to stop, and is about to.",
}
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")


def by_record(life: Life, *, is_live: bool) -> Outcome:
    """By what its own records say, without a verdict."""
    if is_live:
        return "running"
    if life.is_finished and life.status in (0, None):
        return "finished"
    if life.lost_ranks and life.status in (None, statuses.REQUEUE):
        return _of_death(life.lost_ranks[0])
    if life.status is not None:
        found = _BY_STATUS.get(life.status, "failed")
        # What ends a job is the scheduler, and it comes back.
        is_job = life.status == statuses.TERMINATED and life.job is not None
        return "interrupted" if is_job else found
    return _of_death(life.how)


def _of_death(how: str) -> Outcome:
    if "SIGKILL" in how:
        return "killed"
    return "crashed" if any(name in how for name in _CRASHES) else "lost"


def by_verdict(cause: str, otherwise: Outcome) -> Outcome:
    """What `holdfast why` found, where the records alone say little."""
    if cause.startswith("hang-"):
        return "hung"
    if cause == "unknown":
        return otherwise
    return _BY_CAUSE.get(cause, "failed" if otherwise in ("lost", "closed") else otherwise)


def sentence(life: Life, outcome: Outcome, state: str = "training") -> str:
    """How it ended, where there is no verdict."""
    how = life.how.partition("\n")[0]
    why = "" if how in ("", "closed", "died", "left") else f": {how}"
    if outcome == "running":
        return _NOW.get(state, "It trains.")
    if outcome == "finished":
        return "It trained to its end."
    if outcome == "closed":
        return "It left by itself, before its end."
    if outcome == "stopped":
        return f"It was asked to stop{_stop(why)}"
    if outcome == "interrupted":
        return f"It was interrupted, to be started again{_stop(why)}"
    if outcome == "bad":
        return f"A rule called the training bad{_stop(why)}"
    if life.status is not None:
        return f"It left with status {life.status}{_stop(why)}"
    if why:
        return f"It {_stop(how)}" if how.startswith("was ") else f"It died{_stop(why)}"
    return "It ended without a word: nothing has been recorded of its end."


def _stop(text: str) -> str:
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
