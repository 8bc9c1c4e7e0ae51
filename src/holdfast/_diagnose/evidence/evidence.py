"""All that is known of a death, from every record of it.

The records were written by processes that were about to die, or by other versions, or on another
machine: any key may be missing or hold a value of another kind. So they are read by `whole`,
`real`, `text` … of `_text.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

Record = dict[str, Any]
# Of a job in SLURM that is not over.
LIVE_STATES = (
    *("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING", "COMPLETING"),
)


@dataclass
class RankEvidence:
    """What is known of one process of the job."""

    rank: int = 0
    host: str | None = None
    pid: int | None = None
    error: Record = field(default_factory=dict)  # error.json: the exception, by itself
    death: Record = field(default_factory=dict)  # death.json: its end, by its keeper
    exit: Record = field(default_factory=dict)  # exit.json, which the first rank has
    process: Record = field(default_factory=dict)  # ranks/00001.json: its host and pid
    led: Record = field(default_factory=dict)  # led.json, where each rank had a leader
    stacks: str = ""  # what faulthandler wrote
    step: int | None = None  # the last that it finished
    durable_step: int | None = None


@dataclass
class RunFacts:
    """Facts of a run folder that few rules use."""

    newest: int | None = None  # the newest attempt
    durable_step: int | None = None  # on disk, by this attempt or the one that it resumed
    ranks_planned: int | None = None
    requeue: Record = field(default_factory=dict)
    is_here: bool = False  # it ran on this machine since its last boot, in any container
    has_rebooted: bool = False  # it ran on this machine before its last boot
    is_disk_full: bool = False  # the file system of the run folder has no room now


@dataclass
class Evidence:
    """All evidence of one end."""

    subject: str = ""  # the run, log, job or process, as the user named it
    ranks: list[RankEvidence] = field(default_factory=list)
    led: Record | None = None  # what `holdfast run` saw
    output: str = ""  # the end of what was printed
    signs: list[Sign] = field(default_factory=list)  # what that text tells
    job: Record | None = None  # what SLURM says of it: state, exit_code, reason, node, end …
    beat: Record = field(default_factory=dict)  # the last heartbeat
    journal: list[Record] = field(default_factory=list)  # the attempt's events
    is_live: bool = False
    kind: str = ""  # "run", "led", "log", "pid" or "slurm"
    attempt: int | None = None
    lease: Record = field(default_factory=dict)
    exit: Record = field(default_factory=dict)
    hang: Record = field(default_factory=dict)  # hang.json: the findings of the watch over hangs
    look: Record = field(default_factory=dict)  # of a live run: a fresh inspection (`looks`)
    disks: list[Record] = field(default_factory=list)  # of this machine, where one was full
    process: Record | None = None  # a living process, as /proc has it
    run: RunFacts = field(default_factory=RunFacts)
    notes: list[str] = field(default_factory=list)  # sentences for the reader
    files: list[Path] = field(default_factory=list)  # the records that were read
