"""Requests to a run: to stop, to save, and for the stacks of all its processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._environment.processes.identity import ProcessIdentity
from holdfast._environment.processes.inspect import Looker
from holdfast._environment.processes.proc import FairDeadline, read_bytes
from holdfast._environment.processes.tree import ranks_below
from holdfast._errors import FolderError
from holdfast._report.json_lines import Lines, parse
from holdfast._report.status.gather import RunSummary, summarize
from holdfast._report.status.parts import keepers_of
from holdfast._store.folder.attempts import (
    find_run,
    identity_in,
    is_live,
    keeper_of,
    lease_holder,
    read_json,
)
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.requests import ask

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RunRequest:
    layout: RunLayout
    attempt: int
    pid: int
    host: str
    journal: Lines  # read up to the request
    beat: dict[str, Any]  # the last heartbeat


def ask_run(folder: Path, kind: str, **details: object) -> RunRequest:
    """Write a request; FolderError if no process trains there now."""
    layout, _ = find_run(folder)
    journal = Lines(layout.journal)
    for _ in journal.read():
        pass
    attempt = ask(folder, kind, **details)
    holder = lease_holder(layout, attempt)
    assert holder is not None  # else it would not count as live
    beat = read_json(layout.heartbeat(attempt))
    return RunRequest(layout, attempt, holder.pid, holder.host, journal, beat)


def wait_until_gone(folder: Path, asked: RunRequest) -> RunSummary:
    """Wait without a limit until that attempt has ended and everything is on disk."""
    while is_live(asked.layout, asked.attempt):
        time.sleep(_LOOK_SECONDS)
    # Its end is recorded. Wait for its process, and for the keepers of all ranks.
    holder = lease_holder(asked.layout, asked.attempt)
    for process in filter(None, [holder, *keepers_of(asked.layout, asked.attempt)]):
        while process.is_here() and process.is_alive():
            time.sleep(_LOOK_SECONDS)
    return summarize(folder)


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    step: int | None = None
    error: str | None = None


def wait_until_saved(asked: RunRequest) -> SaveOutcome:
    """Wait until the checkpoint is durable, has failed, or the run has ended."""
    live = True
    while True:
        outcome = _look(asked)
        if outcome is not None:
            return outcome
        if not live:
            return SaveOutcome(error="the run ended before its next boundary")
        live = is_live(asked.layout, asked.attempt)  # and check once more after its end
        time.sleep(_LOOK_SECONDS)


def _look(asked: RunRequest) -> SaveOutcome | None:
    for event in itertools.chain.from_iterable(map(parse, asked.journal.read())):
        if event.get("event") == "save-failed":
            return SaveOutcome(error=str(event.get("error")))
        if event.get("event") == "checkpoint" and "holdfast save" in str(event.get("reason")):
            return SaveOutcome(step=event.get("step"))
    return None


# Stacks: a keeper answers even if its trainer hangs, since it is another process. Where there is
# none, or it does not answer, the processes on this machine are inspected from here.

Look = dict[str, Any]

LOOK_SECONDS = 20.0  # the keepers of all ranks inspect, and that of rank 0 collects
_POLL_SECONDS = 0.05
_OWN_SECONDS = 8.0  # without progress of an inspection, which has limits of its own


def ask_look(folder: Path, seconds: float = LOOK_SECONDS) -> Look | None:
    """`looks` of the ranks and `missing`, those without; None if nothing can be read.

    FolderError if no process trains there now. `by` is "keeper" if the run has answered, and
    "here" if its processes were inspected from this one.
    """
    layout, _ = find_run(folder)
    attempt = max(layout.attempt_numbers(), default=0)
    token = os.urandom(8).hex()
    is_asked = False
    if attempt and is_live(layout, attempt):
        # A user who may only read the folder can still inspect their own processes.
        with contextlib.suppress(FolderError):
            attempt = ask(folder, "stacks", token=token)
            is_asked = True
    else:
        raise FolderError(f"{folder}: no process trains here now.\nSee: holdfast status {folder}")
    answer = _await_answer(layout, attempt, token, seconds) if is_asked else None
    if answer is not None:
        return {**answer, "by": "keeper", "attempt": attempt}
    if is_asked:
        with contextlib.suppress(OSError):
            layout.request("stacks", attempt).unlink()  # not needed any more
    looks, missing = _look_from_here(layout, attempt)
    if not looks:
        return None
    return {"looks": looks, "missing": missing, "by": "here", "attempt": attempt}


def look_at_process(pid: int) -> list[Look]:
    """Inspect a process and its descendants; of a launcher, each of its ranks by itself.

    Empty if that did not end in time.
    """
    ranks = ranks_below(pid)
    if not ranks:
        return [look for look in _bounded([pid]) if look is not None]
    seen = zip(ranks, _bounded([*ranks.values()]), strict=True)
    return [{"rank": rank, **look} for rank, look in seen if look is not None]


def _await_answer(layout: RunLayout, attempt: int, token: str, seconds: float) -> Look | None:
    deadline = FairDeadline(seconds, lambda: _at_work(keeper_of(layout, attempt)))
    while True:
        answer = read_json(layout.look(attempt))
        if answer.get("token") == token and isinstance(answer.get("looks"), list):
            return answer
        keeper = keeper_of(layout, attempt)
        is_gone = keeper is not None and keeper.is_here() and not keeper.is_alive()
        if is_gone or deadline.is_over():
            return None
        time.sleep(_POLL_SECONDS)


def _at_work(keeper: ProcessIdentity | None) -> list[int]:
    """A keeper of this machine and the readers that it has started."""
    if keeper is None or not keeper.is_here():
        return []
    started = (read_bytes(f"/proc/{keeper.pid}/task/{keeper.pid}/children") or b"").split()
    return [keeper.pid, *map(int, started)]


def _look_from_here(layout: RunLayout, attempt: int) -> tuple[list[Look], list[int]]:
    """The ranks on this machine, and the numbers of the others."""
    trainers = _trainers(layout, attempt)
    here = {rank: pid for rank, pid in trainers.items() if pid is not None}
    beat = read_json(layout.heartbeat(attempt))
    looks = []
    for (rank, pid), look in zip(here.items(), _bounded(list(here.values())), strict=True):
        if look is not None:
            ranks = beat.get("ranks")
            each = ranks[rank] if isinstance(ranks, list) and rank < len(ranks) else beat
            standing = {"rank": rank, "step": each.get("step"), "phase": each.get("phase")}
            looks.append({**standing, "pid": pid, **look})
    seen = {look["rank"] for look in looks}
    return looks, [rank for rank in trainers if rank not in seen]


def _trainers(layout: RunLayout, attempt: int) -> dict[int, int | None]:
    """The process of each rank; None if it is on another machine."""
    found: dict[int, int | None] = {}
    for path in sorted(layout.ranks(attempt).glob("*.json")):  # none, if it is not there
        record = read_json(path)
        keeper, pid = identity_in(record.get("keeper")), _text.whole(record.get("trainer_pid"))
        if keeper is not None and path.stem.isdecimal():
            # The keeper is on the machine of its trainer.
            found[int(path.stem)] = pid if keeper.is_here() else None
    holder = lease_holder(layout, attempt)
    if holder is not None:
        found[0] = holder.pid if holder.is_here() else None
    return dict(sorted(found.items()))


def _bounded(pids: list[int]) -> list[Look | None]:
    """Inspect all at once, in daemon threads: one that blocks in the kernel is left behind."""
    found: list[Look | None] = [None] * len(pids)
    lookers = [Looker(pid) for pid in pids]

    def look(at: int) -> None:
        seen = lookers[at].look()
        found[at] = seen if seen.get("processes") else None

    began = time.monotonic()
    threads = [threading.Thread(target=look, args=(at,), daemon=True) for at in range(len(pids))]
    for thread in threads:
        thread.start()
    for thread, looker in zip(threads, lookers, strict=True):
        # On a crowded machine it takes longer, and says that it gets on.
        while thread.is_alive() and time.monotonic() < max(began, looker.alive_at) + _OWN_SECONDS:
            thread.join(_POLL_SECONDS)
    return list(found)


# What a look has found, in words.

_STATES = {"R": "runs", "S": "sleeps", "D": "waits in the kernel", "T": "stopped"}
_STATES |= {"t": "held by a tracer", "Z": "ended", "I": "idle"}
_BUSY_CORES = 0.05


def describe_stacks(looks: Sequence[Look]) -> Iterator[tuple[str, bool]]:
    """Every process and thread, innermost call first; True with the line of a process."""
    for look in looks:
        for number, process in enumerate(look.get("processes") or []):
            yield "", False
            yield _text.name(_describe_process(look, process, is_trainer=number == 0)), True
            for thread in process.get("threads") or []:
                yield _text.name(f"  {_describe_thread(thread)}"), False
                for frame in thread.get("frames") or []:
                    place = f"{frame.get('file')}:{frame.get('line')}"
                    yield _text.name(f"    {frame.get('name')} ({place})"), False


def _describe_process(look: Look, process: Look, *, is_trainer: bool) -> str:
    rank = look.get("rank")
    of = f"rank {rank}, " if isinstance(rank, int) else ""
    of = of if is_trainer else f"child of pid {process.get('parent')}, "
    text = f"{of}pid {process.get('pid')}"
    text += f" on {look['host']}" if is_trainer and look.get("host") else ""
    text += f": {process.get('command') or process.get('name') or '?'}"
    is_frozen, state = process.get("frozen"), process.get("state") or ""
    found = ["frozen" if is_frozen else _STATES.get(state, "?")]
    if process.get("tracer"):
        found.append(f"traced by {process.get('tracer_name') or 'pid'} {process['tracer']}")
    cores = process.get("cpu")
    if isinstance(cores, int | float) and cores > _BUSY_CORES:
        found.append(f"{cores:.1f} cores")
    if isinstance(process.get("rss"), int):
        found.append(_text.size(process["rss"]))
    return f"{text} ({', '.join(found)})"


def _describe_thread(thread: Look) -> str:
    name = thread.get("name") or ("main" if thread.get("is_main") else "?")
    text = f"thread {thread.get('tid')} {name}: {_STATES.get(thread.get('state') or '', '?')}"
    text += f" in {thread['wchan']}" if thread.get("wchan") else ""
    return text + (", holds the GIL" if thread.get("owns_gil") else "")
