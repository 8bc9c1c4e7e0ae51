"""The views of the runs that somebody looks at, kept so that only what is new is read.

A journal of a million lines takes seconds to read for the first time. So a view is made of what
is known after a moment, and a thread reads on meanwhile: the page asks again.
"""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast._errors import HoldfastError
from holdfast._report import html as report_page
from holdfast._report.model import RunModel
from holdfast._report.server.index import Watched
from holdfast._report.view import View

_MOST_MODELS = 8  # one of a long run takes some tens of megabytes
_FIRST_SECONDS = 0.3
_SLICE_SECONDS = 0.3  # in which a view that is asked for has to wait


@dataclass(frozen=True)
class Sent:
    """One view as it is sent."""

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
    sent: Sent | None = None


class LiveViews:
    """Models of the runs looked at last. Called from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def newest(self, watched: Watched) -> Sent:
        """The view as it is now; Odd if the folder is not to be read."""
        watched.follower.check()
        kept = self._get(watched)
        with self._counted(), kept.lock:
            is_new = kept.model.update(_FIRST_SECONDS)
            if is_new or kept.is_stale or kept.sent is None:
                kept.is_stale, kept.count = False, kept.count + 1
                view = kept.model.view()
                body = report_page.to_json(view).encode()
                tag = f'"{kept.count}-{len(body)}"'
                kept.sent = Sent(tag, view, body, gzip.compress(body, 1))
            sent = kept.sent
            self._read_on(watched, kept)
        return sent

    def is_busy(self) -> bool:
        """Whether somebody waits for a view."""
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
            return  # whoever asks next hears of it
        finally:
            kept.is_read_on = False

    def _get(self, watched: Watched) -> _Kept:
        with self._lock:
            kept = self._kept.get(watched.key)
            # One that was removed and made anew has the same key, and is another run.
            if kept is None or kept.watched is not watched:
                follower = watched.follower
                kept = _Kept(watched, RunModel(follower.folder, look=follower.is_live))
                self._kept[watched.key] = kept
                while len(self._kept) > _MOST_MODELS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(watched.key)
            return kept
