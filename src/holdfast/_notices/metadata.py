"""One question to a metadata service, with a bound on everything.

No proxy is asked and no redirection followed: the service is a hop away or not there, and what
answers from elsewhere is somebody's login page. A size and a time bound what is read.
"""

from __future__ import annotations

import email.utils
import http.client
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from holdfast._notices.notice import NoAnswer

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
        told = email.utils.parsedate_tz(self.header("date"))
        return time.time() if told is None else float(email.utils.mktime_tz(told))


class Metadata:
    """The service at one address."""

    def __init__(self, address: str = ADDRESS) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "", parts.port or 80

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
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        try:
            connection.request(method, path, headers=headers or {})
            response = connection.getresponse()
            text = _read(response, connection, deadline)
            kept = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, text, kept)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(_words(error)) from error
        finally:
            connection.close()


def _read(
    response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float
) -> str:
    found = b""
    while len(found) < _MOST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:  # one that sends a byte now and then would never be late by itself
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = response.read1(_MOST_BYTES - len(found))
        if not part:
            break
        found += part
    return found.decode("utf-8", errors="replace")


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
