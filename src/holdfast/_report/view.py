"""What the page shows of a run: plain JSON, and every string in it may be hostile.

The page, the live server and `holdfast report --json` all use exactly this. A key is only ever
added; whoever changes the meaning of one raises SCHEMA.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

SCHEMA = 1

# How an attempt ended, or that it has not.
Outcome = Literal[
    "running",
    "finished",  # trained to its end
    "closed",  # left by itself before, with all of it durable
    "stopped",  # a person or a service asked for it, with what had been trained safe
    "interrupted",  # the same, by the scheduler: it is to come back
    "bad",  # a rule called the training bad
    "failed",  # an exception, or a state that could not be made durable
    "hung",  # stood still, and was ended for it
    "killed",  # SIGKILL, from outside
    "crashed",  # any other signal: a segmentation fault, an abort
    "out-of-memory",
    "lost",  # with its machine, or nobody knows
]
OUTCOMES: tuple[Outcome, ...] = (
    *("running", "finished", "closed", "stopped", "interrupted", "bad"),
    *("failed", "hung", "killed", "crashed", "out-of-memory", "lost"),
)

# What a stretch of time was spent on. They tile the run's time and never overlap.
SegmentKind = Literal[
    "starting",  # from the process's start to its first step
    "training",  # made steps that count
    "saving",  # the main thread waited for a save, for long
    "phase",  # within `run.phase`: evaluation and the like
    "stuck",  # stood still, and it was called a hang
    "paused",  # held by a debugger, a profiler, SIGSTOP
    "lost",  # trained, and had to be made again
    "leaving",  # asked to stop, or dying, until the process had gone
    "queue",  # no process; the job waited in SLURM's queue
    "down",  # no process, and nobody waited for the queue
]
SEGMENT_KINDS: tuple[SegmentKind, ...] = (
    *("training", "phase", "starting", "saving", "lost"),
    *("leaving", "stuck", "paused", "queue", "down"),
)

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
]
Level = Literal["info", "good", "warn", "bad"]


class Job(TypedDict):
    """The job of SLURM that the run is part of."""

    id: str
    seconds_left: float | None
    text: str


class Run(TypedDict):
    """The run as it stands."""

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
    job: Job | None
    warnings: list[str]


class Span(TypedDict):
    start: float
    end: float


class Origin(TypedDict):
    """The state that an attempt went on from; `source` is memory, disk, …"""

    attempt: int
    step: int
    source: str


class Attempt(TypedDict):
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
    """`count` says how many of one kind were folded into it, `until` how far they reach."""

    t: float
    kind: str
    attempt: int | None
    step: int | None
    level: Level
    title: str
    text: str
    count: NotRequired[int]
    until: NotRequired[float]


class Part(TypedDict):
    """`share` is of the wall time."""

    kind: PartKind
    seconds: float
    share: float
    label: str


class Goodput(TypedDict):
    """`parts` has the progress too, and sums to the wall time."""

    wall_seconds: float
    progress_seconds: float
    share: float
    parts: list[Part]
    sentence: str


class LostMetric(TypedDict):
    """Values of steps that were made again; null between two stretches."""

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
    """`wait_seconds`: what it waits for the others in each step, about 0 for a straggler."""

    rank: int
    host: str | None
    step: int | None
    wait_seconds: float | None
    share: NotRequired[float]
    is_straggler: bool


class Memory(TypedDict):
    """Bytes; null where it was not measured. `gpu` only where there is one."""

    t: list[float]
    used: list[int | None]
    limit: list[int | None]
    gpu: NotRequired[list[int | None]]
    limit_name: str


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
    """A post-mortem, as `holdfast why` gives it."""

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


class Interruption(TypedDict):
    step: int | None
    kind: str
    result: str


class Proof(TypedDict):
    """What `holdfast prove` has found."""

    t: float | None
    verdict: str
    sentence: str
    interruptions: list[Interruption]


class View(TypedDict):
    """All of it. `reading` is there while a long journal is still being read: the share so far."""

    reading: NotRequired[float]

    schema: int
    made_at: float
    version: str
    run: Run
    time: Span
    attempts: list[Attempt]
    segments: list[Segment]
    events: list[Event]
    goodput: Goodput
    metrics: list[Metric]
    step_time: StepTime
    ranks: list[Rank]
    stragglers: list[str]
    memory: Memory
    checkpoints: list[Checkpoint]
    deaths: list[Death]
    hangs: list[Hang]
    proofs: list[Proof]
