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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._errors import HoldfastError
from holdfast._report.assemble import warnings_of
from holdfast._report.attempts import Config, read_config
from holdfast._report.json_lines import Lines
from holdfast._report.labels import Labels, read_labels
from holdfast._report.server.find import Odd, PlainCheck, RunFinder, changed_ns
from holdfast._report.status.gather import JournalHistory, RunSummary, summarize
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
_LIVE_SHARE, _REST_SHARE, _FIND_SHARE = 4.0, 8.0, 8.0  # times the cost of a whole round
_RECENT_SECONDS = 86400.0
_GIVE_WAY_SECONDS = 0.5
_WAITING = 0.25  # the cost of a second of waiting
_SMOOTH = 0.05
_SETTLED_SECONDS = 2.0  # the clocks of some file systems tick that slowly

Row = dict[str, Any]

_TROUBLED = ("stuck", "died", "failed", "could not start", "unreadable")
_MOST_WARNINGS = 4
_MOST_TEXT = 400
_MOST_NAME = 80
_OLD_SECONDS = 3 * 86400.0


class RunFollower:
    """Follows one run folder; used by one thread at a time."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        """With a root, anything in the folder that is no plain file below it is refused."""
        self.folder = folder
        self.changed_at = 0.0  # of its files, by the clock of the disk
        self.is_watched = False  # more heartbeats are needed to see whether it lives
        self._plain = None if root is None else PlainCheck(folder, root)
        self.layout = layout = RunLayout(folder)
        known = (layout.journal, layout.attempts, layout.checkpoints, layout.identity)
        self._paths = tuple(map(str, known))
        self._labels = str(layout.labels)
        self._journal = Lines(layout.journal)
        self.history = JournalHistory()
        self.is_behind = False  # there is more of the journal to read
        self._signature: tuple[int, ...] = ()
        self._attempt = 0
        self._beat: tuple[int, object] | None = None
        self._beat_at = 0.0
        self._has_beaten = False

    def check(self) -> None:
        if self._plain is not None:
            self._plain.check()

    def has_changed(self) -> bool:
        """Whether anything was written since the last look; in doubt, True for some seconds."""
        return self._sign() != self._signature or time.time() - self.changed_at < _SETTLED_SECONDS

    def look(self) -> RunSummary:
        """The run as it is now; Odd if it cannot be read, NotARun if it is gone."""
        self.check()
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
        paths = self._paths
        if self._attempt:
            paths = (*paths, str(self.layout.attempt(self._attempt)))
        return (*map(changed_ns, paths), changed_ns(self._labels))

    def _sign(self) -> tuple[int, ...]:
        found = self.signature()
        # The last one is of the labels: a new tag is no sign of life.
        self.changed_at = max(found[:-1]) / 1e9
        return found


def start_thread(name: str, work: Callable[[], object]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


@dataclass
class Watched:
    key: str
    name: str
    follower: RunFollower
    run: RunSummary | None = None
    kind: str = "new"  # which period it has: live, recent, old
    looked_at: float = 0.0
    turn: int = 0  # its newest place in the queue; older ones are void
    busy: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Worker:
    at: Watched | None = None
    since: float = 0.0
    is_left: bool = False


class RunIndex:
    """The list of runs, kept up to date by threads of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.table = RunTable()
        self.notes: list[str] = []
        self.gives_way: Callable[[], bool] = lambda: False
        self.has_found = False  # one whole pass over the folder is done
        self._runs: dict[str, Watched] = {}
        self._due: list[tuple[float, float, int, Watched]] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._is_over = threading.Event()
        self._workers: list[_Worker] = []
        self._left = 0
        self._kinds = {"live": 0, "recent": 0, "old": 0, "new": 0}
        self._costs = {"live": 0.002, "recent": 0.0001, "old": 0.0001}  # seconds
        self._finder = RunFinder(root, self._rest)
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

    def get(self, key: str) -> Watched | None:
        return self._runs.get(key)

    def counts(self) -> tuple[int, int]:
        """(runs found, runs read so far)."""
        return len(self._runs), len(self.table)

    def summaries(self) -> list[RunSummary]:
        """The newest summary of every run that could be read."""
        return [each.run for each in list(self._runs.values()) if each.run is not None]

    def look_soon(self, watched: Watched) -> None:
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
            self._is_over.wait(min(max(_FIND_SECONDS, took * _FIND_SHARE), _LONGEST_SECONDS))

    def _find(self) -> None:
        found = self._finder.find(self._add)
        here = set(found.runs)
        for watched in list(self._runs.values()):
            if watched.follower.folder not in here:
                with self._wake:
                    if self._runs.pop(watched.key, None) is not None:
                        self._kinds[watched.kind] -= 1
                self.table.remove(watched.key)
        self.notes, self.has_found = found.notes(), True

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
        watched = Watched(key, name, RunFollower(folder, self.root))
        watched.follower.has_changed()  # finds out how new it is
        with self._wake:
            if key in self._runs:
                return
            self._runs[key] = watched
            self._kinds["new"] += 1
        self._schedule(watched, 0.0)

    def _schedule(self, watched: Watched, delay: float) -> None:
        with self._wake:
            watched.turn = next(self._count)
            # While all are due, the newest come first.
            newest = -watched.follower.changed_at
            heapq.heappush(self._due, (time.monotonic() + delay, newest, watched.turn, watched))
            self._wake.notify()

    def _hire(self) -> None:
        worker = _Worker()
        self._workers.append(worker)
        start_thread("holdfast-ui-look", lambda: self._work(worker))

    def _work(self, worker: _Worker) -> None:
        while not worker.is_left:
            watched = self._next()
            if watched is None:
                return
            worker.since, worker.at = time.monotonic(), watched
            try:
                self._look(watched)
            finally:
                worker.at = None
        self._left -= 1

    def _next(self) -> Watched | None:
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

    def _look(self, watched: Watched) -> None:
        if self._runs.get(watched.key) is not watched:
            return  # it is gone
        if not watched.busy.acquire(blocking=False):
            return  # another thread has it, and schedules it again
        try:
            delay = self._look_closely(watched)
        finally:
            watched.busy.release()
        self._schedule(watched, delay)

    def _look_closely(self, watched: Watched) -> float:
        follower, began, began_cpu = watched.follower, time.monotonic(), time.thread_time()
        is_at_rest = watched.kind in ("recent", "old") and not (
            follower.is_behind or follower.is_watched
        )
        is_fresh = began - watched.looked_at < _ANYWAY_SECONDS
        if is_at_rest and is_fresh and not follower.has_changed():
            self._note_cost(watched.kind, began, began_cpu)
            return self._period(watched.kind)
        watched.looked_at = began
        try:
            watched.run = follower.look()
            row = row_of(
                watched.name,
                watched.run,
                follower.changed_at,
                is_watched=follower.is_watched,
                labels=read_labels(follower.layout),
                config=read_config(follower.layout, watched.run.attempt),
            )
        except (Odd, HoldfastError) as error:
            row = odd_row(watched.name, str(error).partition("\n")[0])
        except Exception as error:  # noqa: BLE001 - one run must not end the list
            row = odd_row(watched.name, f"it could not be read: {type(error).__name__}: {error}")
        self._put(watched, row)
        if follower.is_behind:
            # A long journal takes the interpreter from a view that is waited for.
            return _GIVE_WAY_SECONDS if self.gives_way() else 0.0
        if row["live"]:
            self._note_cost("live", began, began_cpu)
        return _LIVE_SECONDS if follower.is_watched else self._period(watched.kind)

    def _put(self, watched: Watched, row: Row) -> None:
        is_recent = time.time() - row["at"] < _RECENT_SECONDS
        kind = "live" if row["live"] else "recent" if is_recent else "old"
        with self._wake:
            if self._runs.get(watched.key) is not watched:
                return
            self._kinds[watched.kind] -= 1
            self._kinds[kind] += 1
            watched.kind = kind
            self.table.put(watched.key, row)

    def _period(self, kind: str) -> float:
        least, share = _REST_SECONDS, _REST_SHARE
        if kind == "live":
            least, share = _LIVE_SECONDS, _LIVE_SHARE
        whole_round = self._kinds[kind] * self._costs[kind]
        return min(max(least, share * whole_round), _LONGEST_SECONDS)

    def _note_cost(self, kind: str, began: float, began_cpu: float) -> None:
        if self._kinds["new"]:
            return  # all threads are busy, and each read takes as long as all of theirs
        # Waiting for a file server is cheap for this machine; waiting for a core costs nothing.
        wall, cpu = time.monotonic() - began, time.thread_time() - began_cpu
        seconds = max(cpu, _WAITING * wall)
        self._costs[kind] += _SMOOTH * (seconds - self._costs[kind])

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
        self._gone = 0

    def put(self, key: str, row: Row) -> bool:
        """Set a row; False if it is not new."""
        with self._lock:
            known = self._entries.get(key)
            if known is not None and known.row == row:
                return False
            self._gone -= known is not None and known.row is None
            text = json.dumps({"key": key, **row}, separators=(",", ":"))
            self._set(key, row, text)
            return True

    def remove(self, key: str) -> None:
        with self._lock:
            known = self._entries.get(key)
            if known is None or known.row is None:
                return
            self._gone += 1
            self._set(key, None, json.dumps({"key": key, "gone": True}))

    def _set(self, key: str, row: Row | None, text: str) -> None:
        self._revision += 1
        self._entries[key] = _TableEntry(self._revision, row, text)
        self._entries.move_to_end(key)

    def __len__(self) -> int:
        return len(self._entries) - self._gone

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
