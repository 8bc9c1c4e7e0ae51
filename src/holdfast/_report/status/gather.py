"""The summary of a run, read from its folder and from shared memory; nothing there is changed."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from holdfast import _errors, _text
from holdfast._errors import CheckpointError, HoldfastError, NotARun
from holdfast._report.status import parts
from holdfast._store.folder import attempts, journal
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, trace_line
from holdfast._store.format import manifest
from holdfast._store.format.image import decode_scalars
from holdfast._store.memory.backing import find_all
from holdfast._store.read.find import attempts_in_memory, open_leftovers

if TYPE_CHECKING:
    from holdfast._store.memory.arena import Arena, SlotRecord


def states_in_memory(
    run_id: str, line: dict[int, int | None], *, are_checked: bool = True
) -> list[tuple[int, int, float]]:
    """(attempt, step, when captured) of states of a dead run in shared memory, the newest last.

    A start could resume from each of these: they are in the run's own lineage. Of several ranks
    each has left a part; a state counts only where all parts are there. While a run trains, its
    newest snapshots have no checksums yet.
    """
    by_state: dict[tuple[int, int, int], dict[int, float]] = {}
    for leftover in open_leftovers(run_id):
        arena = leftover.arena
        for record in on_this_line(arena, line):
            if are_checked and not record.is_hashed:
                continue
            key = (arena.attempt, record.mark, world_of(arena, record))
            by_state.setdefault(key, {})[leftover.rank] = record.captured_at
        arena.close()
    return [
        (attempt, mark // 2, max(ranks.values()))
        for (attempt, mark, size), ranks in sorted(by_state.items())
        if set(ranks) == set(range(size))
    ]


def on_this_line(arena: Arena, line: dict[int, int | None]) -> list[SlotRecord]:
    """The complete snapshots of an arena that are in the run's own lineage."""
    return [r for r in arena.whole() if is_on_line(line, arena.attempt, r.step)]


def world_of(arena: Arena, record: SlotRecord) -> int:
    """The number of ranks of a snapshot."""
    size = 1
    with contextlib.suppress(ValueError):  # its scalars cannot be read
        place = arena.plan(record.slot).scalars
        image = arena.image(record.slot)
        head = decode_scalars(image[place.offset : place.offset + place.size_bytes])
        size = head.get("world", 1)
    return size if isinstance(size, int) else 1


@dataclass(frozen=True, slots=True)
class WaitingMemory:
    """The memory of a dead attempt, which waits for the next one on this machine."""

    step: int
    size_bytes: int
    seconds_left: float


def find_waiting(run_id: str) -> WaitingMemory | None:
    """The arena of this run that waits, if there is one."""
    found = None
    for leftover in open_leftovers(run_id):
        with leftover.arena as arena:
            newest, until = arena.newest(), arena.waits_until
            if newest is not None and until is not None:
                size, left = len(arena.mapped), max(0.0, until - time.time())
                found = WaitingMemory(newest.step, size, round(left, 1))
    return found


def describe_waiting(waiting: WaitingMemory | None) -> str:
    if waiting is None:
        return ""
    size, left = _text.size(waiting.size_bytes), _text.duration(waiting.seconds_left)
    return f"step {waiting.step} waits for the next attempt: {size}, for another {left}"


_DEPTH = 3
_MOST_RUNS = 20_000
_MOST_FOLDERS = 200_000
_THREADS = 256  # which mostly sleep
_NAMED = 8
_ASKED = ("stop", "stop-asked", "signal")  # events that ask the run to stop
HISTORY_KINDS = ("start", "loop", "finished", "request", "rank-died", *_ASKED)
_TOLD = re.compile(rb'"event":\s*"(' + "|".join(HISTORY_KINDS).encode() + rb')"')
_STOPPED = (*_errors.ASKED, _errors.NOT_DURABLE)


@dataclass(frozen=True, slots=True)
class Exit:
    attempt: int
    status: int | None  # None: it was killed
    how: str
    step: int | None
    durable_step: int | None
    age_seconds: float | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """How it gets on; most of it is of a live run only."""

    epoch: int | None = None  # counted from 1
    epochs: int | None = None
    phase: str | None = None
    boundary_age_seconds: float | None = None
    rate_per_second: float | None = None
    eta_seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of each


@dataclass(frozen=True, slots=True)
class SafeStates:
    """From where it could resume."""

    memory_step: int | None = None
    memory_age_seconds: float | None = None
    disk_step: int | None = None
    disk_age_seconds: float | None = None
    disk_size_bytes: int | None = None
    slots: int | None = None
    slots_bytes: int | None = None  # the memory that they take
    in_shm: bool | None = None  # None: no snapshots yet
    mirror: parts.MirrorSummary | None = None
    waiting: WaitingMemory | None = None


@dataclass(frozen=True, slots=True)
class RunProcess:
    pid: int | None = None
    host: str | None = None
    keeper_pid: int | None = None  # of a keeper that lives on this machine


@dataclass(frozen=True, slots=True)
class RunTrouble:
    deaths: list[parts.RankDeath] = field(default_factory=list)  # of ranks, in the newest attempt
    straggler: parts.Straggler | None = None  # of a live run, as the next ones
    stuck: parts.Stuck | None = None
    paused: parts.Paused | None = None
    disturbed: parts.Disturbed | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    folder: str
    run_id: str
    state: str  # new, starting, training, stuck, paused, stopping, finished, stopped, failed, …
    is_live: bool
    step: int | None = None
    total: int | None = None
    attempt: int | None = None
    outlook: Outlook = field(default_factory=Outlook)
    safe: SafeStates = field(default_factory=SafeStates)
    process: RunProcess = field(default_factory=RunProcess)
    trouble: RunTrouble = field(default_factory=RunTrouble)
    last_exit: Exit | None = None
    ranks: list[parts.RankSummary] = field(default_factory=list)  # of one process alone: none
    job: parts.JobSummary | None = None  # of SLURM

    def as_record(self) -> dict[str, Any]:
        """For `holdfast status --json`: without the groups."""
        found = asdict(self)
        for group in ("outlook", "safe", "process", "trouble"):
            found |= found.pop(group)
        return found


_Found = TypeVar("_Found")


def aged(found: _Found, more_seconds: float | None) -> _Found:
    """A summary so much later: ages grow, and what is left shrinks. None: without either.

    >>> aged(Outlook(boundary_age_seconds=2.0), 3.0).boundary_age_seconds
    5.0
    """
    if isinstance(found, list):
        return cast(_Found, [aged(each, more_seconds) for each in found])
    if not is_dataclass(found) or isinstance(found, type):
        return found
    changed: dict[str, Any] = {}
    for name in (each.name for each in fields(found)):
        value = getattr(found, name)
        sign = 1.0 if name.endswith("age_seconds") else -1.0 if name == "seconds_left" else None
        if sign is None:
            changed[name] = aged(value, more_seconds)
        elif value is None or more_seconds is None:
            changed[name] = None
        else:
            changed[name] = max(0.0, value + sign * more_seconds)
    return replace(found, **changed)


@dataclass(slots=True)
class JournalHistory:
    """What the journal says about the newest attempt that began."""

    attempt: int | None = None
    start_step: int | None = None
    total: int | None = None
    keep_last: int | None = None
    keep_best: str | None = None
    finished_step: int | None = None  # of the newest `finished`, in any attempt
    asked_to_stop: bool = False
    deaths: list[parts.RankDeath] = field(default_factory=list)

    def take_lines(self, data: bytes) -> None:
        """The next whole lines of the journal, most of which do not matter here."""
        past = 0
        for match in _TOLD.finditer(data):
            if match.start() < past:
                continue
            start = data.rfind(b"\n", 0, match.start()) + 1
            past = data.find(b"\n", match.end()) + 1 or len(data)
            line = data[start:past]
            # There may be as many requests to save as checkpoints.
            if match[1] == b"request" and b'"stop"' not in line:
                continue
            if (event := journal.parse(line)) is not None:
                self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "start":
            self.attempt = _text.whole(event.get("attempt"))
            self.start_step = _text.whole(event.get("step"))
            self.keep_last = _text.whole(event.get("keep_last"))
            self.keep_best = _text.text(event.get("keep_best")) or None
            self.asked_to_stop, self.deaths = False, []
        elif kind == "loop":
            self.total = _text.whole(event.get("total"))
        elif kind == "finished":
            self.finished_step = _text.whole(event.get("step"))
            self.total = _text.whole(event.get("total"))
        elif kind in _ASKED or (kind == "request" and event.get("kind") == "stop"):
            self.asked_to_stop = True
        elif kind == "rank-died":
            self.deaths.append(parts.read_death(event))


def read_history(layout: RunLayout) -> JournalHistory:
    found = JournalHistory()
    for piece in journal.read_pieces(layout.journal):
        found.take_lines(piece)
    return found


def find_runs(path: Path) -> list[Path]:
    """The run folder at `path`, or those in the folders below it."""
    found = sorted(RunFinder(path).find()[0])
    if not found:
        raise NotARun(
            f"{path}: there is no run here, nor in the folders below.\n"
            "A run folder is what holdfast.Run was given. To see how it works: holdfast demo"
        )
    return found


def only_run(path: Path) -> Path:
    """The run folder at `path`, or the only one below it."""
    found = find_runs(path)
    if len(found) > 1:
        names = "\n  ".join(str(each) for each in found[:_NAMED])
        more = f"\n  and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise NotARun(
            f"{path}: there are {len(found)} runs below. Name one of them.\n  {names}{more}"
        )
    return found[0]


def is_run(path: Path) -> bool:
    return bool(attempts.read_json(RunLayout(path).identity).get("run_id"))


class RunFinder:
    """Finds runs below one folder.

    Where links are not followed, the folder has none in its own path.
    """

    def __init__(
        self,
        root: Path,
        *,
        follows_links: bool = True,
        rest: Callable[[], None] = lambda: None,
        deadline_seconds: float = math.inf,
    ) -> None:
        self._root = root
        self._follows_links = follows_links
        self._rest = rest  # called for every folder, to make pauses
        self._deadline_seconds = deadline_seconds  # monotonic
        self._known: set[Path] = set()  # a folder is read only once to see that it is a run

    def find(self, on_new: Callable[[Path], None] = lambda _: None) -> tuple[set[Path], list[str]]:
        """The runs there are now, and sentences on what is not shown.

        `on_new` gets each that was not known before, at once: the first pass may be long.
        """
        found: set[Path] = set()
        links = folders = 0
        waiting = [(self._root, 0)]
        while waiting and folders < _MOST_FOLDERS and len(found) < _MOST_RUNS:
            if time.monotonic() > self._deadline_seconds:
                break
            path, depth = waiting.pop()
            if path in self._known or is_run(path):
                found.add(path)
                if path not in self._known:
                    on_new(path)
            elif depth < _DEPTH:
                self._rest()
                folders += 1
                below, outside = self._list(path)
                waiting += [(each, depth + 1) for each in below]
                links += outside
        self._known = found
        notes = [] if found or self._root.is_dir() else ["This folder is gone."]
        if links:
            what = "1 link leads" if links == 1 else f"{links} links lead"
            verb = "is" if links == 1 else "are"
            notes.append(f"{what} out of this folder and {verb} not followed.")
        if waiting:
            notes.append(f"There is more here than {_MOST_RUNS} runs; the rest is not shown.")
        return found, notes

    def _list(self, folder: Path) -> tuple[list[Path], int]:
        """The folders in a folder, and how many links in it lead out of the root."""
        below, outside = [], 0
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_symlink() and not self._follows_links:
                        # The target of a link inside is found at its own place.
                        outside += not self._leads_inside(Path(entry.path))
                    elif entry.is_dir():
                        below.append(folder / entry.name)
        except OSError:  # not readable
            pass
        return below, outside

    def _leads_inside(self, link: Path) -> bool:
        try:
            return link.resolve(strict=True).is_relative_to(self._root)
        except (OSError, RuntimeError):
            return False


class _OfAnotherMachine(Exception):
    """Only its heartbeat shows whether it lives."""


def summarize_all(folders: list[Path]) -> list[RunSummary]:
    """One after the other; but those of other machines are watched all at once."""
    found: dict[Path, RunSummary] = {}
    distant, with_arenas = [], {run_id for run_id, _ in find_all()}
    for folder in folders:
        try:
            found[folder] = summarize(folder, look=_look_here, with_arenas=with_arenas)
        except _OfAnotherMachine:
            distant.append(folder)
        except HoldfastError:
            if len(folders) == 1:
                raise
            # One of many must not hide the others.
            found[folder] = RunSummary(str(folder), "", "unreadable", False)
    if distant:
        with ThreadPoolExecutor(min(len(distant), _THREADS)) as pool:
            found.update(zip(distant, pool.map(summarize, distant), strict=True))
    return [found[folder] for folder in folders]


def _look_here(layout: RunLayout, attempt: int) -> bool:
    if (known := attempts.is_live_here(layout, attempt)) is None:
        raise _OfAnotherMachine
    return known


def summarize(
    folder: Path,
    *,
    look: Callable[[RunLayout, int], bool] = attempts.is_live,
    history: JournalHistory | None = None,
    with_arenas: Collection[str] | None = None,
) -> RunSummary:
    """Everything that `holdfast status` shows of a run.

    A follower has its own `look` at whether an attempt lives, and has read its `history`. For many
    runs, the ids of those `with_arenas` are listed once.
    """
    layout, run_id = attempts.find_run(folder)
    numbers = layout.attempt_numbers()
    attempt = numbers[-1] if numbers else 0
    live = bool(attempt) and look(layout, attempt)
    history = read_history(layout) if history is None else history
    beat = attempts.read_json(layout.heartbeat(attempt)) if attempt else {}
    ended = next((e for n in reversed(numbers) if (e := _read_exit(layout, n))), None)
    if attempt and not live and (ended is None or ended.attempt < attempt):
        ended = Exit(attempt, None, "died", _text.whole(beat.get("step")), None, None)
    has_arenas = with_arenas is None or run_id in with_arenas
    in_memory = {attempt} if live else attempts_in_memory(run_id) if has_arenas else set()
    line = trace_line(attempts.known_origins(layout, in_memory), attempt)
    disk_step, disk_age, disk_size = _newest_on_disk(layout, line)
    in_shm: tuple[int | None, Any] = None, None  # the newest step, and when it was captured
    if live:
        in_shm = _text.whole(beat.get("memory_step")), beat.get("memory_time")
    elif in_memory and (states := states_in_memory(run_id, line)):
        in_shm = states[-1][1:]
    safe_step = max((s for s in (disk_step, in_shm[0]) if s is not None), default=None)
    known = _Known(layout, attempt, live, beat, ended, history)
    step = _newest_step(known, safe_step)
    holder = attempts.lease_holder(layout, attempt) if attempt else None
    keeper = attempts.identity_in(beat.get("keeper"))
    keeper_here = keeper is not None and keeper.is_here() and keeper.is_alive()
    slots = _text.whole(beat.get("slots")) if live else None
    pace, metrics = (
        parts.read_progress(layout.series(attempt), time.time()) if attempt else (None, {})
    )
    rate = pace if live else None
    shown = beat if live else {}
    then, aged = _text.real(shown.get("boundary_age_seconds")), _age(shown.get("time"))
    return RunSummary(
        folder=str(folder),
        run_id=run_id,
        state=_state(known, step),
        is_live=live,
        step=step,
        total=history.total,
        attempt=attempt or None,
        outlook=parts.read_fields(
            Outlook,
            shown,
            boundary_age_seconds=None if then is None or aged is None else then + aged,
            rate_per_second=rate,
            eta_seconds=parts.seconds_left(step, history.total, rate),
            metrics=metrics,
        ),
        safe=SafeStates(
            memory_step=in_shm[0],
            memory_age_seconds=_age(in_shm[1]),
            disk_step=disk_step,
            disk_age_seconds=disk_age,
            disk_size_bytes=disk_size,
            slots=slots,
            slots_bytes=_text.whole(shown.get("slots_bytes")),
            in_shm=None if slots is None else bool(beat.get("in_shm")),
            mirror=parts.read_mirror(layout),
            waiting=find_waiting(run_id) if in_memory and not live else None,
        ),
        process=RunProcess(
            pid=_text.whole(holder.pid) if holder else None,
            host=(_text.text(holder.host) or None) if holder else None,
            keeper_pid=keeper.pid if keeper is not None and keeper_here else None,
        ),
        trouble=RunTrouble(
            deaths=history.deaths if history.attempt == attempt else [],
            straggler=parts.read_straggler(shown),
            stuck=parts.read_stuck(shown),
            paused=parts.read_paused(shown),
            disturbed=parts.read_disturbed(shown),
        ),
        last_exit=ended,
        ranks=parts.read_ranks(beat),
        job=parts.read_job(layout, attempt, beat, live),
    )


class _Known(NamedTuple):
    layout: RunLayout
    attempt: int  # the newest; 0: there is none
    live: bool
    beat: dict[str, Any]
    ended: Exit | None
    history: JournalHistory


def _state(known: _Known, step: int | None) -> str:
    layout, attempt, live, beat, ended, history = known
    if not attempt:
        return "new"
    if live and history.attempt != attempt:
        return "starting"
    if not live and ended is not None and ended.how.startswith("could not start"):
        return "could not start"
    if history.finished_step is not None and history.finished_step == step:
        return "finished"
    if live:
        if history.asked_to_stop or layout.request("stop", attempt).exists():
            return "stopping"
        held = "stuck" if parts.read_stuck(beat) else "paused" if parts.read_paused(beat) else ""
        return held or "training"
    assert ended is not None
    if ended.status is None or (history.deaths and history.attempt == attempt):
        return "died"
    if ended.status == _errors.FINISHED:
        return "closed"
    return "stopped" if ended.status in _STOPPED else "failed"


def _read_exit(layout: RunLayout, attempt: int) -> Exit | None:
    path = layout.exit(attempt)
    record = attempts.read_json(path)
    if not record:
        return None
    ended_at = _text.real(record.get("time"))
    if not ended_at:
        with contextlib.suppress(OSError):
            ended_at = path.stat().st_mtime
    how = str(record.get("how", ""))
    return parts.read_fields(Exit, record, attempt=attempt, how=how, age_seconds=_age(ended_at))


def _newest_step(known: _Known, safe_step: int | None) -> int | None:
    _, attempt, live, beat, ended, history = known
    if not attempt:
        return None
    if not live and ended is not None and ended.attempt == attempt:
        if ended.how.startswith("could not start"):
            # It made no step: the step in its own record is not the run's.
            return history.start_step if safe_step is None else safe_step
        if ended.step is not None:
            return ended.step
    # The first beat can come before the trainer has sent the step where it begins.
    start = history.start_step if history.attempt == attempt else None
    steps = (_text.whole(beat.get("step")), start)
    return max((step for step in steps if step is not None), default=None)


def _newest_on_disk(
    layout: RunLayout, line: dict[int, int | None]
) -> tuple[int | None, float | None, int | None]:
    for step, attempt, path in reversed(layout.checkpoint_folders()):
        if is_on_line(line, attempt, step):
            try:
                saved_at, size_bytes = _committed(path, path.stat().st_mtime_ns)
            except (CheckpointError, OSError):
                continue
            return step, _age(saved_at), size_bytes
    return None, None, None


@functools.lru_cache(4096)
def _committed(path: Path, _: int) -> tuple[float, int]:
    """When it was saved, and its size; cached, since a committed checkpoint never changes."""
    return manifest.read_size(path)


def _age(moment: object) -> float | None:
    found = _text.real(moment)
    return None if found is None else max(0.0, time.time() - found)
