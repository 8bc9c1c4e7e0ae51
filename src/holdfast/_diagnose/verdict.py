"""The verdict: why a run ended, how certain that is, the evidence, and what to do now."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Any


class Cause(enum.Enum):
    """Why a run ended; the value is the word that scripts may rely on."""

    RUNNING = "running"
    FINISHED = "finished"
    ASKED = "asked"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    TERMINATED = "terminated"  # by a signal that no handler answered
    OOM_CGROUP = "oom-cgroup"
    OOM_MACHINE = "oom-machine"
    OOM_WORKER = "oom-worker"
    KILLED = "killed"  # by another process's SIGKILL: found by exclusion
    SEGFAULT = "segfault"
    ABORT = "abort"
    CXX_EXCEPTION = "cxx-exception"
    BUS_ERROR = "bus-error"
    ILLEGAL_INSTRUCTION = "illegal-instruction"
    PYTHON_EXCEPTION = "python-exception"
    CONFIGURATION = "configuration"
    WORKER_DIED = "worker-died"
    SHM_FULL = "shm-full"
    DISK_FULL = "disk-full"
    CUDA_OOM = "cuda-oom"
    CUDA_ERROR = "cuda-error"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    PEER_LOST = "peer-lost"
    RENDEZVOUS = "rendezvous"
    ENVIRONMENT = "environment"
    LYING_STATUS = "lying-status"
    BAD_TRAINING = "bad-training"
    NO_PROGRESS = "no-progress"
    NOT_DURABLE = "not-durable"
    MACHINE_LOST = "machine-lost"
    # It has not ended, or it was ended because it hung:
    HANG_LOCK = "hang-lock"  # waits for a lock, an event or a queue
    HANG_LOADER = "hang-loader"  # waits for a worker of its data loader
    HANG_POOL = "hang-pool"  # waits for the result of a pool of processes or threads
    HANG_GIL = "hang-gil"  # in a call that holds the interpreter
    HANG_CALL = "hang-call"  # in a call into C
    HANG_DISK = "hang-disk"  # waits for a file system that does not answer
    HANG_RANK = "hang-rank"  # one rank is elsewhere, the others wait for it
    HANG_BRANCHES = "hang-branches"  # ranks are in different collectives
    HANG_COMPUTING = "hang-computing"  # computes on one line without progress
    STOPPED = "stopped"  # by SIGSTOP
    FROZEN = "frozen"  # with its cgroup
    DEBUGGER = "debugger"  # held by a debugger or a prompt
    SLOW = "slow"
    UNKNOWN = "unknown"


class Sure(enum.Enum):
    """How far a verdict can be relied on."""

    CERTAIN = "certain"
    LIKELY = "likely"
    BY_EXCLUSION = "by-exclusion"  # no other cause is left
    UNKNOWN = "unknown"


class Restart(enum.Enum):
    """What a supervisor does after such an end."""

    FREE = "free"  # restart at once, without counting it
    BACKOFF = "backoff"  # restart after a pause that grows
    ONCE = "once"  # it will most likely happen again
    NEVER = "never"  # it will happen again
    DONE = "done"  # it finished or was asked to end


_RESTART = {
    Restart.DONE: "running finished asked terminated time-limit stopped frozen debugger slow",
    Restart.FREE: "preempted killed machine-lost",
    Restart.ONCE: "oom-cgroup oom-machine oom-worker cuda-oom shm-full",
    Restart.NEVER: "configuration environment bad-training no-progress not-durable lying-status",
}
_BY_CAUSE = {Cause(word): restart for restart, names in _RESTART.items() for word in names.split()}


def restart_after(cause: Cause) -> Restart:
    return _BY_CAUSE.get(cause, Restart.BACKOFF)


@dataclass(frozen=True)
class Verdict:
    """Why it ended, in words for people and in values for programs."""

    cause: Cause
    sentence: str  # one line, complete in itself
    sure: Sure
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()  # what to do next, with the commands to type
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    step: int | None = None
    durable_step: int | None = None
    others: tuple[str, ...] = ()  # what the other ranks then saw
    restart: Restart = field(default=Restart.BACKOFF)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON has it; scripts rely on these keys."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value
