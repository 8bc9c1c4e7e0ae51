"""The workers of a data loader or of a pool: which of them are at work, and on which line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from holdfast import _text
from holdfast._diagnose.hangs.stacks import (
    Place,
    ThreadStanding,
    main_thread,
    places,
    read_thread,
    trainer_of,
)

Record = dict[str, Any]

_LOOPS = {
    "loader": (re.compile(r"/torch/utils/data/_utils/worker\.py$"), "_worker_loop"),
    "pool": (
        re.compile(
            r"/(?:multiprocessing/pool|concurrent/futures/(?:process|thread)"
            r"|loky/process_executor)\.py$"
        ),
        "worker|_worker|_process_worker",
    ),
}
_WAITS = re.compile(r"/(?:multiprocessing/(?:queues|connection|synchronize)|queue)\.py$")
_BUSY_CORES = 0.2
_DISK = ("fuse", "nfs", "netfs", "disk")
_MOST_LINES = 8


@dataclass
class Crew:
    """The workers that were seen."""

    count: int = 0
    at_work: list[tuple[str, ThreadStanding]] = field(default_factory=list)  # stuck ones first
    on_disk: tuple[str, ThreadStanding] | None = None
    moves: bool = False  # one of those at work gets on

    def lines(self) -> list[str]:
        """Who does what, for the evidence."""
        if not self.count:
            return []
        busy = len(self.at_work)
        told = [f"{who} {standing.tell()}" for who, standing in self.at_work[:_MOST_LINES]]
        idle = self.count - busy
        if idle > 0:
            told.append(f"{_text.count(idle, 'worker')} of {self.count} had nothing to do")
        return told


def crew_of(look: Record, kind: str) -> Crew:
    """The workers of a loader (`loader`) or of a pool (`pool`); no workers of another kind."""
    crew = Crew()
    if kind not in _LOOPS:
        return crew
    found: list[tuple[bool, str, ThreadStanding]] = []
    for process in _text.records(look.get("processes"))[1:]:
        thread = main_thread(process)
        stack = places(thread.get("frames"))
        at = _loop_at(stack, kind)
        is_named = kind == "loader" and "pt_data_worker" in _text.text(process.get("name"))
        if at is None and not (is_named and not stack):
            continue
        crew.count += 1
        standing = read_thread(thread)
        who = f"worker (pid {_text.whole(process.get('pid')) or '?'})"
        if (_text.text(thread.get("state")) or process.get("state")) == "D":
            crew.on_disk = (who, standing)
        if at is not None and not _is_idle(stack, at):
            found.append((_moves(process, thread), who, standing))
            if standing.kind in _DISK:
                crew.on_disk = crew.on_disk or (who, standing)
    if kind == "pool":
        found += _pool_threads(look, crew)
    found.sort(key=lambda each: (each[0], each[2].place is None))
    crew.at_work = [(who, standing) for _, who, standing in found]
    crew.moves = any(moves for moves, _, _ in found) and not crew.on_disk
    return crew


def _pool_threads(look: Record, crew: Crew) -> list[tuple[bool, str, ThreadStanding]]:
    """Of a pool of threads, those that are at work."""
    trainer, found = trainer_of(look), []
    main = main_thread(trainer)
    for thread in _text.records(trainer.get("threads")):
        stack = places(thread.get("frames"))
        at = _loop_at(stack, "pool")
        if thread is main or at is None:
            continue
        crew.count += 1
        # A thread that waits for work is in a call of C, which leaves no frame.
        if at > 0 and not _is_idle(stack, at):
            name = _text.one_line(_text.text(thread.get("name")) or str(thread.get("tid")), 60)
            moves = thread.get("moved") is True
            found.append((moves, f"its thread {name}", read_thread(thread)))
    return found


def _loop_at(stack: list[Place], kind: str) -> int | None:
    """Where in the stack the loop of a worker is."""
    file, names = _LOOPS[kind]
    for index, each in enumerate(stack):
        last = each.name.rsplit(".", 1)[-1]
        if file.search(each.file) and re.fullmatch(names, last):
            return index
    return None


def _is_idle(stack: list[Place], at: int) -> bool:
    """Whether a worker waits for the next task: its loop has called a queue."""
    return at > 0 and _WAITS.search(stack[at - 1].file) is not None


def _moves(process: Record, thread: Record) -> bool:
    """Whether it gets on: by its stack, or, where that cannot be told, by what it computes."""
    moved = thread.get("moved")
    if isinstance(moved, bool):
        return moved
    return (_text.real(process.get("cpu")) or 0.0) > _BUSY_CORES
