"""The view of a run as JSON. Every string in it may be hostile.

The page, the live server and `holdfast report --json` all use exactly this. Keys are only added; a
change of the meaning of one raises SCHEMA.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

SCHEMA = 1

# How an attempt ended, or that it has not.
Outcome = Literal[
    "running",
    "finished",  # trained to its end
    "closed",  # left by itself before, with all of it durable
    "stopped",  # a person or a service asked for it; all work is safe
    "interrupted",  # the same, by the scheduler: it comes back
    "bad",  # a rule called the training bad
    "failed",  # an exception, or a state that could not be made durable
    "hung",  # ended for a hang
    "killed",  # by a signal from outside that it did not answer
    "crashed",  # by a signal of its own: a segmentation fault, an abort
    "out-of-memory",
    "lost",  # with its machine, or for an unknown reason
]

# What a stretch of time was spent on. Segments tile the run's time and never overlap.
SegmentKind = Literal[
    "starting",  # from the process's start to its first step
    "training",  # made steps that count
    "saving",  # the main thread waited for a save, for long
    "phase",  # within `run.phase`: evaluation and the like
    "stuck",  # in a hang
    "paused",  # held by a debugger, a profiler, SIGSTOP
    "lost",  # trained, and had to be repeated
    "leaving",  # asked to stop, or dying, until the process had gone
    "queue",  # no process; the job waited in SLURM's queue
    "down",  # no process, and no job in the queue
    "stopped",  # no process: a person had stopped it, or it had left by itself
]

# Where the time went that made no progress: segments, and two that are spread over all of them.
PartKind = Literal[
    "progress",
    "phase",  # counts as progress
    "starting",
    "saving",
    "waiting",  # for other ranks, in every step
    "stuck",
    "paused",
    "lost",
    "leaving",
    "queue",
    "down",
    "stopped",  # neither progress nor loss
]
Level = Literal["info", "good", "warn", "bad"]


class JobView(TypedDict):
    id: str
    seconds_left: float | None
    text: str


class RunView(TypedDict):
    name: str
    folder: str
    id: str
    state: str
    is_live: bool
    headline: str
    step: int | None
    total: int | None
    epoch: int | None
    epochs: int | None
    phase: str | None
    attempt: int | None
    rate_per_second: float | None
    eta_seconds: float | None
    memory_step: int | None
    memory_age_seconds: float | None
    disk_step: int | None
    disk_age_seconds: float | None
    pid: int | None
    host: str | None
    ranks: int
    job: JobView | None
    warnings: list[str]
    config: dict[str, str | int | float | bool | None]  # hyperparameters of the newest attempt
    tags: list[str]
    note: str
    is_archived: bool


class Span(TypedDict):
    start: float
    end: float


class Origin(TypedDict):
    """The state that an attempt resumed from; `source` is memory, disk, …"""

    attempt: int
    step: int
    source: str


class AttemptView(TypedDict):
    number: int
    start: float
    end: float | None
    first_step: int | None
    last_step: int | None
    origin: Origin | None
    outcome: Outcome
    how: str
    status: int | None
    host: str | None
    pid: int | None
    job: str | None


class Segment(TypedDict):
    kind: SegmentKind
    start: float
    end: float
    attempt: int | None
    text: NotRequired[str]


class Event(TypedDict):
    """`count` events of one kind, up to `until`, were folded into it."""

    t: float
    kind: str
    attempt: int | None
    step: int | None
    level: Level
    title: str
    text: str
    count: NotRequired[int]
    until: NotRequired[float]


class GoodputPart(TypedDict):
    """`share` is of the wall time."""

    kind: PartKind
    seconds: float
    share: float
    label: str


class Goodput(TypedDict):
    """`parts` has the progress too, and sums to the wall time.

    `share` is the progress divided by the wall time without `stopped_seconds`: the time in which
    a person had stopped the run is not lost.
    """

    wall_seconds: float
    progress_seconds: float
    stopped_seconds: float
    share: float
    parts: list[GoodputPart]
    sentence: str


class LostMetric(TypedDict):
    """Values of steps that were repeated; null between two stretches."""

    step: list[int | None]
    value: list[float | None]


class Metric(TypedDict):
    """Columns of one length; a point that stands for many has their last, lowest and highest.

    `value`, `low` and `high` are null where nothing finite was logged; `bad` has the steps of
    values that were not finite.
    """

    name: str
    attempt: list[int]
    step: list[int]
    value: list[float | None]
    low: list[float | None]
    high: list[float | None]
    bad: list[int]
    lost: LostMetric


class Percentiles(TypedDict):
    p50: float
    p90: float
    p99: float
    max: float
    count: int


class AttemptTimes(TypedDict):
    number: int
    p50: float
    p90: float
    p99: float


class StepTime(TypedDict):
    """Seconds per step; null where no step was made (a gap between attempts)."""

    percentiles: Percentiles | None
    t: list[float]
    p50: list[float | None]
    p99: list[float | None]
    max: list[float | None]
    attempts: list[AttemptTimes]


class Rank(TypedDict):
    """`wait_seconds`: how long it waits for the others in each step; about 0 for a straggler."""

    rank: int
    host: str | None
    step: int | None
    wait_seconds: float | None
    share: NotRequired[float]
    is_straggler: bool


class MemoryView(TypedDict):
    """Bytes; null where it was not measured. `gpu` only where there is one.

    `used` is of the cgroup or of the machine, whichever has the limit. `run` is of the run's own
    processes.
    """

    t: list[float]
    used: list[int | None]
    run: list[int | None]
    limit: list[int | None]
    gpu: NotRequired[list[int | None]]
    limit_name: str


class GpuView(TypedDict):
    """The GPUs of the run together; `busy` is a percentage, `celsius` of the hottest."""

    t: list[float]
    busy: list[float | None]
    used: list[float | None]
    total: float | None
    watts: list[float | None]
    celsius: list[float | None]


class Checkpoint(TypedDict):
    t: float
    step: int
    attempt: int | None
    size_bytes: int | None
    written_bytes: int | None
    seconds: float | None
    reason: str
    name: str
    is_kept: bool


class Death(TypedDict):
    """The verdict of `holdfast why`."""

    t: float
    attempt: int
    rank: int | None
    cause: str
    sentence: str
    evidence: list[str]
    advice: list[str]
    stacks: str


class Hang(Death):
    seconds: float | None


class ProofInterruption(TypedDict):
    step: int | None
    kind: str
    result: str


class ProofRecord(TypedDict):
    """The result of `holdfast prove`."""

    t: float | None
    verdict: str
    sentence: str
    interruptions: list[ProofInterruption]


class View(TypedDict):
    """`reading` is there while a long journal is still being read: the share so far."""

    reading: NotRequired[float]

    schema: int
    made_at: float
    version: str
    run: RunView
    time: Span
    attempts: list[AttemptView]
    segments: list[Segment]
    events: list[Event]
    goodput: Goodput
    metrics: list[Metric]
    step_time: StepTime
    ranks: list[Rank]
    stragglers: list[str]
    memory: MemoryView
    gpus: GpuView | None
    checkpoints: list[Checkpoint]
    deaths: list[Death]
    hangs: list[Hang]
    proofs: list[ProofRecord]
