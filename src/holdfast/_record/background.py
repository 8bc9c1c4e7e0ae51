"""One piece of work in a thread of its own, whose error is raised where it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs at once; `join` waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised again by join
            self._error = error
