"""Connections that cannot be held open for nothing.

uvicorn bounds the time between two requests, but not the time that one takes to come in or its
answer to be fetched. Everybody on the machine can connect, so both are bounded here, and so is
the number of connections: the one that has been silent the longest makes place for a new one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 64
HEAD_SECONDS = 10.0  # from the connection, or the last answer, to a whole request
ANSWER_SECONDS = 90.0  # stacks of a run that hangs take half a minute
HEAD_BYTES = 16 << 10


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 for people and pages that are on the same machine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._since = self.loop.time()
        self._was_busy = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(transport)
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._check_time)
        if len(self.connections) > MOST_CONNECTIONS:
            others = [each for each in self.connections if isinstance(each, BoundedProtocol)]
            oldest = min(others, key=lambda each: (each.is_busy, each is self, each._since))
            oldest.transport.abort()
            # Its end is told later; until then the next one that comes must not choose it again.
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _note(self) -> None:
        if self.is_busy != self._was_busy:
            self._since, self._was_busy = self.loop.time(), self.is_busy

    def _check_time(self) -> None:
        left = self._since + (ANSWER_SECONDS if self.is_busy else HEAD_SECONDS) - self.loop.time()
        if left <= 0:
            # Not close(): that waits until everything is fetched, which may be never.
            self.transport.abort()
            return
        self._timer = self.loop.call_later(min(left, HEAD_SECONDS), self._check_time)
