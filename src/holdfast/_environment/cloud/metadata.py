"""One question to a metadata service, with a limit on size and time.

No proxy is used and no redirection followed: the real service is one hop away, and another answer
comes from something else, such as a login page.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import io
import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from holdfast._environment.cloud.notice import Closed, NoAnswer

ADDRESS = "http://169.254.169.254"
ANSWER_SECONDS = 2.0
_MOST_BYTES = 1 << 18


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: dict[str, str]

    def header(self, name: str) -> str:
        return self.headers.get(name.lower(), "")

    def now(self) -> float:
        """The service's clock, which its times refer to; ours if it has none."""
        try:
            date = email.utils.parsedate_tz(self.header("date"))
            return time.time() if date is None else float(email.utils.mktime_tz(date))
        except (ValueError, OverflowError):  # the year 99999, say
            return time.time()

    def tree(self) -> dict[str, Any]:
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise self.not_understood() from error
        if not isinstance(found, dict):
            raise self.not_understood()
        return found

    def checked(self) -> Answer:
        """This answer, if the service agreed to give one."""
        if self.status == 403:
            raise Closed("the metadata service refuses")
        if self.status != 200:
            raise NoAnswer(f"status {self.status}")
        return self

    def not_understood(self) -> NoAnswer:
        return NoAnswer(f"not understood: {self.text[:80]!r}")


class Metadata:
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
                # The timeout of http.client is for each byte: a slow sender would never be late.
                connection.sock = _Bounded(connection.sock, deadline)
                response = connection.getresponse()
                text = response.read(_MOST_BYTES).decode("utf-8", errors="replace")
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise NoAnswer(_words(error)) from error
            kept = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, text, kept)


class _Bounded(io.RawIOBase):
    """A socket that can be read until a deadline, however slowly the bytes come.

    Closing it leaves the socket open: http.client closes its own before the answer is read.
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
    # It may be what came instead of HTTP, and it is printed on a terminal.
    return text if text.isprintable() and len(text) <= 80 else ascii(text[:40])
