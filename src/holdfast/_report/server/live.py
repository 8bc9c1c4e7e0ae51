"""The views of the runs that pages show, alone and side by side, and the threads that make them.

A journal of a million lines takes seconds to read for the first time. So a view is made of what
is known after a moment, while a thread reads on: the page requests it again.

The event loop must answer other requests meanwhile. Pools of the standard library are joined at the
interpreter's end, where a thread that hangs on a dead mount would delay Ctrl-C: these are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast._errors import HoldfastError
from holdfast._report import html as report_page
from holdfast._report.compare import ComparedFacts, assemble_comparison, gather_facts
from holdfast._report.model import RunModel
from holdfast._report.server.index import RunFollower, start_thread

_MOST_MODELS = 24  # a long run takes some tens of megabytes
_MOST_RUNS = 300
_FIRST_SECONDS = 0.3
_SLICE_SECONDS = 0.3  # for which a requested view may have to wait

T = TypeVar("T")


@dataclass(frozen=True)
class Sent:
    tag: str
    body: bytes  # JSON


@dataclass(eq=False)
class _Kept:
    """What is kept of a run: facts and answer are small, a model takes megabytes."""

    watched: RunFollower
    lock: threading.Lock = field(default_factory=threading.Lock)
    model: RunModel | None = None
    count: int = 0
    is_stale: bool = True
    is_read_on: bool = False  # by a thread of its own
    sent: Sent | None = None
    stamp: object = None  # of the facts
    facts: ComparedFacts | None = None

    def open_model(self) -> RunModel:
        run = self.watched
        self.model = model = self.model or RunModel(run.folder, look=run.is_live)
        return model


class LiveViews:
    """Views and comparisons of the runs that were asked for last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def newest(self, watched: RunFollower) -> Sent:
        """The view as it is now; FolderError if the folder cannot be read."""
        kept = self._get(watched)
        with self._counted(), kept.lock:
            model = kept.open_model()
            is_new = model.update(_FIRST_SECONDS)
            if is_new or kept.is_stale or kept.sent is None:
                kept.is_stale, kept.count = False, kept.count + 1
                body = report_page.to_json(model.view()).encode()
                kept.sent = Sent(f'"{kept.count}-{len(body)}"', body)
            if not kept.is_read_on and model.reading < 1:
                kept.is_read_on = True
                start_thread("holdfast-ui-read", lambda: self._read_on(kept))
            return kept.sent

    def compare(self, runs: Sequence[RunFollower], metric: str | None) -> Sent:
        """Those of the runs that can be read, as they are now."""
        facts = []
        for watched in runs:
            with contextlib.suppress(HoldfastError, OSError):
                facts.append(self._facts(watched))
        found = assemble_comparison(facts, metric, has_all_curves=False)
        body = report_page.to_json(found).encode()
        # The time at which it was made is no news.
        same = report_page.to_json({**found, "made_at": 0}).encode()
        return Sent(f'"{hashlib.blake2b(same, digest_size=12).hexdigest()}"', body)

    def is_busy(self) -> bool:
        """Whether a request waits for a view."""
        return self._waiting > 0

    def _get(self, watched: RunFollower) -> _Kept:
        with self._lock:
            kept = self._kept.get(watched.key)
            # A run that was removed and made again has the same key.
            if kept is None or kept.watched is not watched:
                kept = self._kept[watched.key] = _Kept(watched)
            self._kept.move_to_end(watched.key)
            while len(self._kept) > _MOST_RUNS:
                self._kept.popitem(last=False)
            for each in [each for each in self._kept.values() if each.model][:-_MOST_MODELS]:
                each.model = None
            return kept

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def _read_on(self, kept: _Kept) -> None:
        try:
            while (model := kept.model) is not None:
                with kept.lock:
                    before = model.reading
                    model.update(_SLICE_SECONDS)
                    kept.is_stale = True
                    if model.reading >= 1 or model.reading == before:
                        return
        except (HoldfastError, OSError):
            return  # the next request gets the error
        finally:
            kept.is_read_on = False

    def _facts(self, watched: RunFollower) -> ComparedFacts:
        kept = self._get(watched)
        with kept.lock:
            stamp = watched.signature()
            if kept.facts is None or kept.stamp != stamp or kept.facts.run["is_live"]:
                model = kept.open_model()
                model.update()
                kept.facts = gather_facts(model, watched.key, watched.name)
                kept.stamp, kept.is_stale = stamp, True
                if not kept.facts.run["is_live"] and kept.sent is None:
                    kept.model = None
            return kept.facts


class TooBusy(Exception):
    """All threads are busy."""


class ThreadLimit:
    def __init__(self, most: int) -> None:
        self._free = threading.Semaphore(most)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        if not self._free.acquire(blocking=False):
            raise TooBusy
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # its thread goes on when a request is cancelled

        def work() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - it goes to the waiting task
                future.set_exception(error)
            finally:
                self._free.release()

        start_thread("holdfast-ui-aside", work)
        return await asyncio.wrap_future(future)
