"""One verdict: why it ended, how sure that is, by what, and what to do now."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Cause(enum.Enum):
    """Why a run ended; the value is the word that scripts may rely on."""

    RUNNING = "running"
    FINISHED = "finished"
    ASKED = "asked"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    TERMINATED = "terminated"  # a signal from somebody that no handler answered
    OOM_CGROUP = "oom-cgroup"
    OOM_MACHINE = "oom-machine"
    OOM_WORKER = "oom-worker"
    KILLED = "killed"  # SIGKILL by somebody: by exclusion
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
    # It did not end, or was ended since it stood still:
    HANG_LOCK = "hang-lock"  # waits for a lock, an event or a queue
    HANG_LOADER = "hang-loader"  # for a worker of its data loader
    HANG_POOL = "hang-pool"  # for the result of a pool of processes or threads
    HANG_GIL = "hang-gil"  # in a call that holds the interpreter
    HANG_CALL = "hang-call"  # in a call of C
    HANG_DISK = "hang-disk"  # for a file system that does not answer
    HANG_RANK = "hang-rank"  # one rank stands elsewhere, the others wait for it
    HANG_BRANCHES = "hang-branches"  # ranks are in different collectives
    HANG_COMPUTING = "hang-computing"  # computes at one place and does not get on
    STOPPED = "stopped"  # by SIGSTOP
    FROZEN = "frozen"  # with its cgroup
    DEBUGGER = "debugger"  # somebody looks at it
    SLOW = "slow"
    UNKNOWN = "unknown"


class Sure(enum.Enum):
    """How far a verdict can be relied on."""

    CERTAIN = "certain"
    LIKELY = "likely"
    BY_EXCLUSION = "by-exclusion"  # nothing else is left
    UNKNOWN = "unknown"


class Restart(enum.Enum):
    """What a supervisor does after such an end."""

    FREE = "free"  # at once, and it counts for nothing
    BACKOFF = "backoff"  # after a pause that grows
    ONCE = "once"  # it will most likely happen again
    NEVER = "never"  # it will happen again
    DONE = "done"  # it finished or was asked to end


_RESTART = {
    Restart.DONE: (
        Cause.RUNNING,
        Cause.FINISHED,
        Cause.ASKED,
        Cause.TERMINATED,
        Cause.TIME_LIMIT,
        Cause.STOPPED,
        Cause.FROZEN,
        Cause.DEBUGGER,
        Cause.SLOW,
    ),
    Restart.FREE: (Cause.PREEMPTED, Cause.KILLED, Cause.MACHINE_LOST),
    Restart.ONCE: (
        Cause.OOM_CGROUP,
        Cause.OOM_MACHINE,
        Cause.OOM_WORKER,
        Cause.CUDA_OOM,
        Cause.SHM_FULL,
    ),
    Restart.NEVER: (
        Cause.CONFIGURATION,
        Cause.ENVIRONMENT,
        Cause.BAD_TRAINING,
        Cause.NO_PROGRESS,
        Cause.NOT_DURABLE,
        Cause.LYING_STATUS,
    ),
}
_BY_CAUSE = {cause: restart for restart, causes in _RESTART.items() for cause in causes}


def restart_after(cause: Cause) -> Restart:
    """What to do after an end of this kind."""
    return _BY_CAUSE.get(cause, Restart.BACKOFF)


@dataclass(frozen=True)
class Verdict:
    """Why it ended, in words for people and in values for programs."""

    cause: Cause
    sentence: str  # one line, complete in itself
    sure: Sure
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()  # what to do next, with commands spelled out
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    step: int | None = None
    durable_step: int | None = None
    others: tuple[str, ...] = ()  # what the other ranks then saw
    restart: Restart = field(default=Restart.BACKOFF)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON has it; these keys stay."""
        return {
            "cause": self.cause.value,
            "sentence": self.sentence,
            "sure": self.sure.value,
            "evidence": list(self.evidence),
            "advice": list(self.advice),
            "rank": self.rank,
            "host": self.host,
            "time": self.time,
            "step": self.step,
            "durable_step": self.durable_step,
            "others": list(self.others),
            "restart": self.restart.value,
        }
