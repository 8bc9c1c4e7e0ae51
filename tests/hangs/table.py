"""The table of hangs: how each one is made, and the verdict that it must get.

`make nightly` makes each by real processes. `make test` makes a few (`often`), and judges the
recorded evidence of all: tests/unit/diagnose/test_recorded_hangs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast._diagnose.verdict import Cause

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """One way to stand still."""

    name: str
    script: str = "hanging.py"
    how: str  # the word for the script
    cause: Cause
    at: tuple[str, ...] = ()  # the marks of the lines that the verdict must name
    rank: int | None = None  # which one is guilty, of several
    says: tuple[str, ...] = ()  # what must stand in the sentence or in the evidence
    timeout: float = 1.0  # that is given
    often: bool = False  # `make test` makes it for real

    def places(self, scripts: Path = SCRIPTS) -> tuple[str, ...]:
        """Those lines as a verdict writes them."""
        return tuple(place_of(self.script, mark, scripts) for mark in self.at)


def cases(hangs: Iterable[Hang]) -> list[ParameterSet]:
    """For a test of each."""
    return [
        pytest.param(hang, id=hang.name, marks=[] if hang.often else [pytest.mark.nightly])
        for hang in hangs
    ]


def place_of(script: str, mark: str, scripts: Path = SCRIPTS) -> str:
    """`script.py:LINE` of the line with this mark."""
    lines = (scripts / script).read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, 1) if re.search(rf"# stuck: {mark}$", line))
    return f"{script}:{number}"


# Of one process of plain Python.
HANGS = (
    Hang(
        name="Python lock",
        how="lock",
        cause=Cause.HANG_LOCK,
        at=("lock",),
        says=("lock",),
        often=True,
    ),
    Hang(
        name="queue that nobody fills",
        how="queue",
        cause=Cause.HANG_LOCK,
        at=("queue",),
        says=("queue",),
    ),
    Hang(
        name="C call that sleeps and holds the GIL",
        how="gil-asleep",
        cause=Cause.HANG_GIL,
        at=("call",),
        says=("GIL|interpreter",),
    ),
    Hang(
        name="C call that computes and holds the GIL",
        how="gil-spinning",
        cause=Cause.HANG_GIL,
        at=("regex",),
        says=("GIL|interpreter",),
        timeout=3.0,  # after twice that; its own thread must have been silent for five seconds
    ),
    Hang(
        name="C call without the GIL",
        how="call",
        cause=Cause.HANG_CALL,
        at=("call",),
    ),
    Hang(
        name="result of a pool whose worker is stuck",
        how="pool-stuck",
        cause=Cause.HANG_POOL,
        at=("pool", "lock"),
        says=("pool", r"\bpid \d+"),
    ),
    Hang(
        name="result of a pool whose worker has died",
        how="pool-dead",
        cause=Cause.HANG_POOL,
        at=("dead pool",),
        says=("pool", "died|gone|dead|lost"),
    ),
    Hang(
        name="result of a thread that waits for itself",
        how="threads",
        cause=Cause.HANG_POOL,
        at=("future", "task"),
    ),
)
DISK = Hang(
    name="file system that does not answer",
    how="disk",
    cause=Cause.HANG_DISK,
    at=("disk",),
    says=("file system|disk|NFS",),
)
LOADER = Hang(
    name="deadlock in a data-loader worker",
    script="hanging_torch.py",
    how="loader",
    cause=Cause.HANG_LOADER,
    at=("worker",),
    says=("worker", r"\bpid \d+"),
    often=True,
)
RANKS = (
    Hang(
        name="one rank stuck in DDP",
        script="hanging_ranks.py",
        how="stuck",
        cause=Cause.HANG_RANK,
        rank=1,
        at=("data of one rank", "the other rank"),
        says=("rank 1", "rank 0"),
        often=True,
    ),
    Hang(
        name="ranks on different branches",
        script="hanging_ranks.py",
        how="branches",
        cause=Cause.HANG_BRANCHES,
        at=("one branch", "the other branch"),
        says=("all_gather", "all_reduce"),
    ),
)
