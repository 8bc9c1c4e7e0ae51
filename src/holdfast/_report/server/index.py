"""All runs below a folder, read by a few threads: live ones often, others when they change.

The periods grow with the cost of reading, so that the load on the file server and this machine is
limited. A read that does not return (a dead mount) is left behind: its run is shown as unreadable,
and another thread takes the place.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._errors import HoldfastError
from holdfast._report.assemble import warnings_of
from holdfast._report.attempts import Config, read_config
from holdfast._report.json_lines import Lines
from holdfast._report.labels import Labels, read_labels
from holdfast._report.status.gather import (
    JournalHistory,
    RunFinder,
    RunSummary,
    aged,
    summarize,
)
from holdfast._report.status.parts import main_metric
from holdfast._store.folder.attempts import SILENT_SECONDS, is_live_here, read_json
from holdfast._store.folder.layout import RunLayout

_THREADS = 4
_MOST_LEFT = 16  # threads that hang
_HUNG_SECONDS = 20.0
_LIVE_SECONDS = 1.0
_REST_SECONDS = 2.0
_FIND_SECONDS = 2.0
_LONGEST_SECONDS = 30.0  # also where a read costs much
_ANYWAY_SECONDS = 120.0  # states in memory go without a change on disk
_SHARE = 8.0  # a period is so many times as long as the work in it
_GIVE_WAY_SECONDS = 0.5
_WAITING = 0.25  # the cost of a second of waiting
_SETTLED_SECONDS = 2.0  # the clocks of some file systems tick that slowly

Row = dict[str, Any]

_TROUBLED = ("stuck", "died", "failed", "could not start", "unreadable")
_MOST_WARNINGS = 4
_MOST_TEXT = 400
_MOST_NAME = 80
_OLD_SECONDS = 3 * 86400.0


class RunFollower:
    """Follows one run folder; used by one thread at a time."""

    def __init__(self, folder: Path, key: str = "", name: str = "") -> None:
        self.folder = folder
        self.key = key
        self.name = name
        self.run: RunSummary | None = None  # the newest that is certain
        self.looked_at = 0.0
        self.turn = 0  # its newest place in the queue; older ones are void
        self.busy = threading.Lock()
        self.changed_at = 0.0  # of its files, by the clock of the disk
        self.is_watched = False  # more heartbeats are needed to see whether it lives
        self.layout = layout = RunLayout(folder)
        self._paths = (layout.journal, layout.attempts, layout.checkpoints, layout.identity)
        self._journal = Lines(layout.journal)
        self.history = JournalHistory()
        self.is_behind = False  # there is more of the journal to read
        self._signature: tuple[int, ...] = ()
        self._attempt = 0
        self._beat: tuple[int, object] | None = None
        self._beat_at = 0.0
        self._has_beaten = False

    def has_changed(self) -> bool:
        """Whether anything was written since the last look; in doubt, True for some seconds."""
        return self._sign() != self._signature or time.time() - self.changed_at < _SETTLED_SECONDS

    def look(self) -> RunSummary:
        """The run as it is now; FolderError if it cannot be read, NotARun if it is gone."""
        numbers = self.layout.attempt_numbers()
        self._attempt = numbers[-1] if numbers else 0
        # Before the rest is read, so that a write meanwhile counts as a change.
        self._signature = self._sign()
        self.is_watched = False
        return summarize(self.folder, look=self.is_live, history=self.read_journal())

    def read_journal(self) -> JournalHistory:
        """Read on, one piece at a time."""
        piece = next(self._journal.read(), None)
        if self._journal.has_started_over:
            self.history = JournalHistory()
        if piece is not None:
            self.history.take_lines(piece)
        self.is_behind = piece is not None and self._journal.share < 1
        return self.history

    def is_live(self, layout: RunLayout, attempt: int) -> bool:
        """As `attempts.is_live`, but over several looks instead of one that waits."""
        if (known := is_live_here(layout, attempt)) is not None:
            return known
        beat, now = (attempt, read_json(layout.heartbeat(attempt)).get("beat")), time.monotonic()
        if beat != self._beat:
            self._has_beaten = self._beat is not None and self._beat[0] == attempt
            self._beat, self._beat_at = beat, now
        is_recent = now - self._beat_at < SILENT_SECONDS
        self.is_watched = is_recent and not self._has_beaten
        return is_recent and self._has_beaten

    def signature(self) -> tuple[int, ...]:
        """Changes with its files; any thread may ask."""
        attempt = [self.layout.attempt(self._attempt)] if self._attempt else []
        return tuple(map(_changed_ns, [*self._paths, *attempt, self.layout.labels]))

    def _sign(self) -> tuple[int, ...]:
        found = self.signature()
        # The last one is of the labels: a new tag is no sign of life.
        self.changed_at = max(found[:-1]) / 1e9
        return found


def _changed_ns(path: Path) -> int:
    """Its time of change; -1 if it is not there."""
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return -1


def start_thread(name: str, work: Callable[[], object]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


@dataclass
class _Worker:
    at: RunFollower | None = None
    since: float = 0.0
    is_left: bool = False


class RunIndex:
    """The list of runs, kept up to date by threads of its own."""

    def __init__(
        self,
        root: Path,
        *,
        follows_links: bool = False,
        live_seconds: float = _LIVE_SECONDS,
        share: float = _SHARE,
    ) -> None:
        self.root = root
        self._live_seconds = live_seconds
        self._share = share
        self.table = RunTable()
        self.notes: list[str] = []
        self.gives_way: Callable[[], bool] = lambda: False
        self.has_found = False  # one whole pass over the folder is done
        self._runs: dict[str, RunFollower] = {}
        self._due: list[tuple[float, float, int, RunFollower]] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._is_over = threading.Event()
        self._workers: list[_Worker] = []
        self._left = 0
        self._live: set[str] = set()  # keys
        self._finder = RunFinder(root, follows_links=follows_links, rest=self._rest)
        self._walked_since = 0.0

    def start(self) -> None:
        for _ in range(_THREADS):
            self._hire()
        for target in (self._keep_finding, self._keep_watch):
            start_thread("holdfast-ui-index", target)

    def close(self) -> None:
        """Stop all threads, without a wait."""
        self._is_over.set()
        with self._wake:
            self._wake.notify_all()

    def get(self, key: str) -> RunFollower | None:
        return self._runs.get(key)

    def counts(self) -> tuple[int, int]:
        """(runs found, runs read so far)."""
        return len(self._runs), len(self.table)

    def summaries(self) -> list[RunSummary]:
        """The newest summary of every run that could be read, with the ages of this moment."""
        known = list(self._runs.values())
        known.sort(key=lambda each: each.folder)
        now = time.monotonic()
        return [aged(each.run, now - each.looked_at) for each in known if each.run is not None]

    @property
    def is_settled(self) -> bool:
        """Whether every run was found and read, and it is known of each if it lives."""
        runs = list(self._runs.values())
        is_open = any(each.is_watched or each.is_behind for each in runs)
        return self.has_found and len(self.table) >= len(runs) and not is_open

    def look_soon(self, watched: RunFollower) -> None:
        """Read this run next: a request was sent to it."""
        self._schedule(watched, 0.0)

    def _keep_finding(self) -> None:
        is_first = True
        while not self._is_over.is_set():
            began = self._walked_since = time.monotonic()
            try:
                self._find()
            except Exception as error:  # noqa: BLE001 - known runs are still shown
                self.notes = [f"The folder could not be searched: {type(error).__name__}: {error}."]
            # The first pass competes with all the reads, and says nothing about later ones.
            took = 0.0 if is_first else time.monotonic() - began
            is_first = False
            self._is_over.wait(min(max(_FIND_SECONDS, took * self._share), _LONGEST_SECONDS))

    def _find(self) -> None:
        found, notes = self._finder.find(self._add)
        for watched in list(self._runs.values()):
            if watched.folder not in found:
                with self._wake:
                    self._runs.pop(watched.key)
                    self._live.discard(watched.key)
                self.table.remove(watched.key)
        self.notes, self.has_found = notes, True

    def _rest(self) -> None:
        """Pause between two folders, except in the first pass."""
        if self.has_found and time.monotonic() - self._walked_since > 0.02:
            self._is_over.wait(0.02)
            self._walked_since = time.monotonic()

    def _add(self, folder: Path) -> None:
        relative = folder.relative_to(self.root)
        # The name of a run in requests: it is only looked up, never made into a path.
        key = hashlib.blake2b(os.fsencode(relative), digest_size=8).hexdigest()
        name = _text.name(relative if relative.parts else self.root.name)
        watched = RunFollower(folder, key, name)
        watched.has_changed()  # finds out how new it is
        with self._wake:
            if key in self._runs:
                return
            self._runs[key] = watched
        self._schedule(watched, 0.0)

    def _schedule(self, watched: RunFollower, delay: float) -> None:
        with self._wake:
            watched.turn = next(self._count)
            # While all are due, the newest come first.
            newest = -watched.changed_at
            heapq.heappush(self._due, (time.monotonic() + delay, newest, watched.turn, watched))
            self._wake.notify()

    def _hire(self) -> None:
        worker = _Worker()
        self._workers.append(worker)
        start_thread("holdfast-ui-look", lambda: self._work(worker))

    def _work(self, worker: _Worker) -> None:
        while not worker.is_left and (watched := self._next()) is not None:
            worker.since, worker.at = time.monotonic(), watched
            is_here = self._runs.get(watched.key) is watched
            # Another thread that has it schedules it again.
            if is_here and watched.busy.acquire(blocking=False):
                try:
                    delay = self._look(watched)
                finally:
                    watched.busy.release()
                self._schedule(watched, delay)
            worker.at = None
        self._left -= worker.is_left

    def _next(self) -> RunFollower | None:
        with self._wake:
            while not self._is_over.is_set():
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    _, _, turn, watched = heapq.heappop(self._due)
                    if turn == watched.turn:
                        return watched
                    continue
                self._wake.wait(self._due[0][0] - now if self._due else None)
        return None

    def _look(self, watched: RunFollower) -> float:
        """Read the run if it may have changed; returns the seconds until the next look."""
        began, began_cpu = time.monotonic(), time.thread_time()
        is_live, run = watched.key in self._live, watched.run
        is_open = is_live or run is None or watched.is_behind or watched.is_watched
        # A keeper that ends changes no file.
        is_open = is_open or (run is not None and run.process.keeper_pid is not None)
        is_old = began - watched.looked_at > _ANYWAY_SECONDS
        if is_open or is_old or watched.has_changed():
            watched.looked_at = began
            is_live = self._put(watched, self._read(watched))
        if watched.is_behind:
            # A long journal takes the interpreter from a view that is waited for.
            return _GIVE_WAY_SECONDS if self.gives_way() else 0.0
        if watched.is_watched:
            return _LIVE_SECONDS
        # Waiting for a file server is cheap for this machine; waiting for a core costs nothing.
        wall, cpu = time.monotonic() - began, time.thread_time() - began_cpu
        least, count = _REST_SECONDS, len(self._runs) - len(self._live)
        if is_live:
            least, count = self._live_seconds, len(self._live)
        whole_round = count * max(cpu, _WAITING * wall)
        return max(least, min(self._share * whole_round, _LONGEST_SECONDS))

    def _read(self, watched: RunFollower) -> Row:
        try:
            run = watched.look()
            if not (watched.is_watched or watched.is_behind):
                watched.run = run
            return row_of(
                watched.name,
                run,
                watched.changed_at,
                is_watched=watched.is_watched,
                labels=read_labels(watched.layout),
                config=read_config(watched.layout, run.attempt),
            )
        except HoldfastError as error:
            watched.run = None
            return odd_row(watched.name, str(error).partition("\n")[0])
        except Exception as error:  # noqa: BLE001 - one run must not end the list
            return odd_row(watched.name, f"it could not be read: {type(error).__name__}: {error}")

    def _put(self, watched: RunFollower, row: Row) -> bool:
        """Show a row of the list; returns whether its run is live."""
        is_live: bool = row["live"]
        with self._wake:
            if self._runs.get(watched.key) is watched:
                (self._live.add if is_live else self._live.discard)(watched.key)
                self.table.put(watched.key, row)
        return is_live

    def _keep_watch(self) -> None:
        while not self._is_over.wait(1.0):
            for worker in list(self._workers):
                watched = worker.at
                if watched is None or time.monotonic() - worker.since < _HUNG_SECONDS:
                    continue
                worker.is_left = True
                self._workers.remove(worker)
                self._put(watched, odd_row(watched.name, "its files do not answer."))
                self._left += 1
                if self._left <= _MOST_LEFT:
                    self._hire()


# A run as one row of the list. It has moments instead of ages, so an idle row stays the same.


def row_of(
    name: str,
    run: RunSummary,
    changed_at: float,
    *,
    is_watched: bool,
    labels: Labels,
    config: Config,
) -> Row:
    warnings = [_short(text) for text in warnings_of(run)]
    state = "watching" if is_watched else run.state
    ended, job, metric = run.last_exit, run.job, main_metric(run.outlook.metrics)
    row: Row = {
        "name": name,
        "state": state,
        "live": run.is_live,
        "troubled": state in _TROUBLED or (run.is_live and bool(warnings)),
        "at": round(changed_at),
        "step": run.step,
        "total": run.total,
        "epoch": run.outlook.epoch,
        "epochs": run.outlook.epochs,
        "phase": run.outlook.phase and _short(run.outlook.phase, _MOST_NAME),
        "attempt": run.attempt,
        "memory_step": run.safe.memory_step,
        "disk_step": run.safe.disk_step,
        "disk_at": _moment(run.safe.disk_age_seconds, -1),
        "host": run.process.host and _short(run.process.host, _MOST_NAME),
        "ranks": len(run.ranks) or None,
        "job": job and {"id": _short(job.id, _MOST_NAME), "end": _moment(job.seconds_left, 1)},
        "how": None if run.is_live or ended is None else _short(ended.how.partition("\n")[0]),
        "warnings": warnings[:_MOST_WARNINGS],
        "left": None if run.outlook.eta_seconds is None else round(run.outlook.eta_seconds),
        "metric": metric and [_short(metric, _MOST_NAME), run.outlook.metrics[metric]],
        "tags": list(labels.tags),
        "note": labels.note and _short(labels.note),
        "archived": labels.is_archived or None,
        # In one line, to be searched: `lr=0.1 seed=7`.
        "config": " ".join(f"{key}={value}" for key, value in config.items())[:_MOST_TEXT],
    }
    return {key: value for key, value in row.items() if value not in (None, [], "")}


def odd_row(name: str, sentence: str) -> Row:
    return {
        "name": name,
        "state": "unreadable",
        "live": False,
        "troubled": True,
        "at": 0,
        "warnings": [_short(sentence)],
    }


def attention(row: Row) -> tuple[int, float, str]:
    """The order of the list: live and troubled runs first, then the newest."""
    rank = (0 if row["troubled"] else 1) if row["live"] else (2 if row["troubled"] else 3)
    if rank == 2 and row["at"] and time.time() - row["at"] > _OLD_SECONDS:
        rank = 3  # old trouble
    # Live ones by name: all of them have just changed, and rows must not move around.
    return rank, 0.0 if row["live"] else -row["at"], row["name"]


def _moment(seconds: float | None, sign: int) -> int | None:
    return None if seconds is None else round(time.time() + sign * seconds)


def _short(text: str, most: int = _MOST_TEXT) -> str:
    """One short line of printable characters."""
    shown = _text.name(text[:most])
    return shown if len(text) <= most else shown + "…"


# Each change of a row gives it the next revision, and the table is in the order of revisions. So an
# answer costs as much as has changed since the revision that a page has.


@dataclass(slots=True)
class _TableEntry:
    revision: int
    row: Row | None  # None: it is gone
    text: str  # as JSON, made once


class RunTable:
    """Rows by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _TableEntry] = OrderedDict()
        self._revision = 0

    def put(self, key: str, row: Row) -> bool:
        """Set a row; False if it is not new."""
        with self._lock:
            known = self._entries.get(key)
            if known is not None and known.row == row:
                return False
            text = json.dumps({"key": key, **row}, separators=(",", ":"))
            self._set(key, row, text)
            return True

    def remove(self, key: str) -> None:
        with self._lock:
            known = self._entries.get(key)
            if known is None or known.row is None:
                return
            self._set(key, None, json.dumps({"key": key, "gone": True}))

    def _set(self, key: str, row: Row | None, text: str) -> None:
        self._revision += 1
        self._entries[key] = _TableEntry(self._revision, row, text)
        self._entries.move_to_end(key)

    def __len__(self) -> int:
        with self._lock:
            return sum(each.row is not None for each in self._entries.values())

    @property
    def revision(self) -> int:
        return self._revision

    def since(self, revision: int, limit: int) -> tuple[str, int, bool, bool]:
        """(a JSON list of rows, revision reached, whether there is more, whether to start over)."""
        with self._lock:
            starts_over = revision > self._revision
            revision = 0 if starts_over else revision
            newer: list[_TableEntry] = []
            for entry in reversed(self._entries.values()):
                if entry.revision <= revision:
                    break
                newer.append(entry)
            piece = newer[::-1][:limit]
            reached = piece[-1].revision if piece else self._revision
        return (
            f"[{','.join(each.text for each in piece)}]",
            reached,
            len(newer) > limit,
            starts_over,
        )

    def first(self, count: int) -> str:
        with self._lock:
            entries = [each for each in self._entries.values() if each.row is not None]
        best = heapq.nsmallest(count, entries, key=lambda each: attention(each.row or {}))
        return f"[{','.join(each.text for each in best)}]"
