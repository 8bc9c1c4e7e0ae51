"""The views of the runs that pages show, and the threads that make them.

A journal of a million lines takes seconds to read for the first time. So a view is made of what
is known after a moment, while a thread reads on: the page requests it again.

The event loop must answer other requests meanwhile. Pools of the standard library are joined at the
interpreter's end, where a thread that hangs on a dead mount would delay Ctrl-C: these are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast._errors import HoldfastError
from holdfast._report import html as report_page
from holdfast._report.model import RunModel
from holdfast._report.server.index import Watched
from holdfast._report.view import View

_MOST_MODELS = 8  # a long run takes some tens of megabytes
_FIRST_SECONDS = 0.3
_SLICE_SECONDS = 0.3  # for which a requested view may have to wait


T = TypeVar("T")


@dataclass(frozen=True)
class SentView:
    tag: str
    view: View
    body: bytes
    packed: bytes  # by gzip: there may be a tunnel between page and server


@dataclass
class _Kept:
    watched: Watched
    model: RunModel
    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0
    is_stale: bool = True
    is_read_on: bool = False  # by a thread of its own
    sent: SentView | None = None


class LiveViews:
    """Models of the runs shown last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def newest(self, watched: Watched) -> SentView:
        """The view as it is now; Odd if the folder cannot be read."""
        watched.follower.check()
        kept = self._get(watched)
        with self._counted(), kept.lock:
            is_new = kept.model.update(_FIRST_SECONDS)
            if is_new or kept.is_stale or kept.sent is None:
                kept.is_stale, kept.count = False, kept.count + 1
                view = kept.model.view()
                body = report_page.to_json(view).encode()
                tag = f'"{kept.count}-{len(body)}"'
                kept.sent = SentView(tag, view, body, gzip.compress(body, 1))
            sent = kept.sent
            self._read_on(watched, kept)
        return sent

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

    def _read_on(self, watched: Watched, kept: _Kept) -> None:
        if kept.is_read_on or kept.model.reading >= 1:
            return
        kept.is_read_on = True
        work = threading.Thread(
            target=self._read_all, args=(watched, kept), name="holdfast-ui-read", daemon=True
        )
        work.start()

    def _read_all(self, watched: Watched, kept: _Kept) -> None:
        try:
            while self._kept.get(watched.key) is kept:
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

    def _get(self, watched: Watched) -> _Kept:
        with self._lock:
            kept = self._kept.get(watched.key)
            # A run that was removed and made again has the same key.
            if kept is None or kept.watched is not watched:
                follower = watched.follower
                kept = _Kept(watched, RunModel(follower.folder, look=follower.is_live))
                self._kept[watched.key] = kept
                while len(self._kept) > _MOST_MODELS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(watched.key)
            return kept


class TooBusy(Exception):
    """All threads are busy."""


class ThreadLimit:
    """A limited number of threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0  # only touched in the event loop

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._count >= self._most:
            raise TooBusy
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def resolve(value: Any, error: BaseException | None) -> None:
            self._count -= 1
            if future.cancelled():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def work() -> None:
            value, error = None, None
            try:
                value = function(*arguments)
            except BaseException as raised:  # noqa: BLE001 - it goes to the waiting task
                error = raised
            with contextlib.suppress(RuntimeError):  # the server may have ended meanwhile
                loop.call_soon_threadsafe(resolve, value, error)

        self._count += 1
        threading.Thread(target=work, name="holdfast-ui-aside", daemon=True).start()
        return await future
