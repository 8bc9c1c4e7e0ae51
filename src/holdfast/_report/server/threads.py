"""Work that may take long, in threads that nobody waits for when the server ends.

The event loop must answer others meanwhile. Pools of the standard library are joined at the
interpreter's end, and what hangs on a dead mount would hold Ctrl-C up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class TooBusy(Exception):
    """As many threads as there may be are at work."""


class Aside:
    """A bounded number of threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0  # only touched in the event loop

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it in a thread of its own, and return what it returns."""
        if self._count >= self._most:
            raise TooBusy
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
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
            except BaseException as raised:  # noqa: BLE001 - it goes to whoever waits
                error = raised
            with contextlib.suppress(RuntimeError):  # the server may have ended meanwhile
                loop.call_soon_threadsafe(settle, value, error)

        self._count += 1
        threading.Thread(target=work, name="holdfast-ui-aside", daemon=True).start()
        return await future
