"""One question to a metadata service, with a bound on everything.

No proxy is asked and no redirection followed: the service is a hop away or not there, and what
answers from elsewhere is somebody's login page. A size and a time bound what is read.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import io
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from holdfast._environment.cloud.notice import NoAnswer

ADDRESS = "http://169.254.169.254"
ANSWER_SECONDS = 2.0
_MOST_BYTES = 1 << 18


@dataclass(frozen=True)
class Answer:
    """What came back, and when it was said by the clock of whoever said it."""

    status: int
    text: str
    headers: dict[str, str]

    def header(self, name: str) -> str:
        return self.headers.get(name.lower(), "")

    def now(self) -> float:
        """The service's own clock, that its times are told by; ours if it does not show it."""
        try:
            told = email.utils.parsedate_tz(self.header("date"))
            return time.time() if told is None else float(email.utils.mktime_tz(told))
        except (ValueError, OverflowError):  # the year 99999, say
            return time.time()


class Metadata:
    """The service at one address."""

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address

    def _place(self) -> tuple[str, int]:
        with contextlib.suppress(ValueError):
            parts = urlsplit(self._address)
            if parts.scheme == "http" and parts.hostname:
                return parts.hostname, parts.port or 80
        raise NoAnswer(f"{self._address[:80]!r} is no address: http://HOST:PORT")

    def ask(
        self,
        path: str,
        headers: dict[str, str] | None = None,
        *,
        method: str = "GET",
        seconds: float = ANSWER_SECONDS,
    ) -> Answer:
        """Ask once; NoAnswer if there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        connection = http.client.HTTPConnection(*self._place(), timeout=seconds)
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            try:
                connection.request(method, path, headers=headers or {})
                stack.enter_context(connection.sock)
                # http.client would wait so long for each byte, and one that drips is never late.
                connection.sock = _Bounded(connection.sock, deadline)
                response = connection.getresponse()
                text = response.read(_MOST_BYTES).decode("utf-8", errors="replace")
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise NoAnswer(_words(error)) from error
            kept = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, text, kept)


class _Bounded(io.RawIOBase):
    """A socket that is read from until a deadline, however slowly the bytes come.

    To close it leaves the socket open: http.client closes its own before the answer is read.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Bounded(self._sock, self._deadline))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = str(getattr(error, "strerror", None) or error) or type(error).__name__
    # It may be what came instead of HTTP, and goes to a terminal.
    return text if text.isprintable() and len(text) <= 80 else ascii(text[:40])
