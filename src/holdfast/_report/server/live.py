"""The views of the runs that pages show, alone and side by side, and the threads that make them.

A journal of a million lines takes seconds to read for the first time. So a view is made of what
is known after a moment, while a thread reads on: the page requests it again.

The event loop must answer other requests meanwhile. Pools of the standard library are joined at the
interpreter's end, where a thread that hangs on a dead mount would delay Ctrl-C: these are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from holdfast._errors import HoldfastError
from holdfast._report import html as report_page
from holdfast._report.compare import ComparedFacts, assemble_comparison, gather_facts
from holdfast._report.model import RunModel
from holdfast._report.server.find import Odd
from holdfast._report.server.index import Watched, start_thread

_MOST_MODELS = 8  # a long run takes some tens of megabytes
_MOST_COMPARED = 24  # models of live runs that are compared
_MOST_FACTS = 300
_FIRST_SECONDS = 0.3
_SLICE_SECONDS = 0.3  # for which a requested view may have to wait

T = TypeVar("T")


class Recent(Generic[T]):
    """What is kept of the runs that were asked for last. Thread-safe."""

    def __init__(self, most: int, make: Callable[[Watched], T]) -> None:
        self._most = most
        self._make = make
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Watched, T]] = OrderedDict()

    def get(self, watched: Watched) -> T:
        with self._lock:
            known = self._kept.get(watched.key)
            # A run that was removed and made again has the same key.
            if known is None or known[0] is not watched:
                known = self._kept[watched.key] = (watched, self._make(watched))
            self._kept.move_to_end(watched.key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return known[1]

    def values(self) -> list[T]:
        """The oldest first."""
        with self._lock:
            return [each for _, each in self._kept.values()]


def _model(watched: Watched) -> RunModel:
    return RunModel(watched.follower.folder, look=watched.follower.is_live)


@dataclass(frozen=True)
class Sent:
    tag: str
    body: bytes  # JSON
    packed: bytes  # by gzip: there may be a tunnel between page and server


@dataclass(eq=False)
class _Kept:
    model: RunModel
    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0
    is_stale: bool = True
    is_read_on: bool = False  # by a thread of its own
    sent: Sent | None = None


class LiveViews:
    """The views of the runs shown last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._recent = Recent(_MOST_MODELS, lambda watched: _Kept(_model(watched)))

    def newest(self, watched: Watched) -> Sent:
        """The view as it is now; Odd if the folder cannot be read."""
        watched.follower.check()
        kept = self._recent.get(watched)
        with self._counted(), kept.lock:
            is_new = kept.model.update(_FIRST_SECONDS)
            if is_new or kept.is_stale or kept.sent is None:
                kept.is_stale, kept.count = False, kept.count + 1
                body = report_page.to_json(kept.model.view()).encode()
                kept.sent = Sent(f'"{kept.count}-{len(body)}"', body, gzip.compress(body, 1))
            if not kept.is_read_on and kept.model.reading < 1:
                kept.is_read_on = True
                start_thread("holdfast-ui-read", lambda: self._read_on(kept))
            return kept.sent

    def is_busy(self) -> bool:
        """Whether a request waits for a view."""
        return self._waiting > 0

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
            while kept in self._recent.values():
                with kept.lock:
                    before = kept.model.reading
                    kept.model.update(_SLICE_SECONDS)
                    kept.is_stale = True
                    if kept.model.reading >= 1 or kept.model.reading == before:
                        return
        except (HoldfastError, OSError):
            return  # the next request gets the error
        finally:
            kept.is_read_on = False


@dataclass
class _KeptFacts:
    """A model takes megabytes, so it is kept only while the run lives; its facts are small."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: object = None
    facts: ComparedFacts | None = None
    model: RunModel | None = None


class Comparisons:
    """Facts of the runs compared last. Thread-safe."""

    def __init__(self) -> None:
        self._recent = Recent(_MOST_FACTS, lambda _: _KeptFacts())

    def newest(self, runs: Sequence[Watched], metric: str | None) -> Sent:
        """Those of the runs that can be read, as they are now."""
        facts = []
        for watched in runs:
            with contextlib.suppress(Odd, HoldfastError, OSError):
                facts.append(self._facts(watched))
        found = assemble_comparison(facts, metric, has_all_curves=False)
        body = report_page.to_json(found).encode()
        # The time at which it was made is no news.
        same = report_page.to_json({**found, "made_at": 0}).encode()
        tag = f'"{hashlib.blake2b(same, digest_size=12).hexdigest()}"'
        return Sent(tag, body, gzip.compress(body, 1))

    def _facts(self, watched: Watched) -> ComparedFacts:
        watched.follower.check()
        kept = self._recent.get(watched)
        models = [each for each in self._recent.values() if each.model is not None]
        for each in models[:-_MOST_COMPARED]:
            each.model = None
        with kept.lock:
            stamp = watched.follower.signature()
            if kept.facts is None or kept.stamp != stamp or kept.facts.run["is_live"]:
                model = kept.model or _model(watched)
                model.update()
                kept.facts = gather_facts(model, watched.key, watched.name)
                kept.stamp = stamp
                kept.model = model if kept.facts.run["is_live"] else None
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
