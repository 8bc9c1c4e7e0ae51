"""Access: every request is checked here before anything else.

Every user of this machine can reach the port, and so can every page in the browser. So a request
must name this server as its host (a foreign name may point here), must not come from a page of
another origin, and must have a secret: the token once, then a cookie. Cookies ignore ports. So the
cookie is for a path with a secret in it, and a browser does not send it to other ports.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, field

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
NO_CONTENT_POLICY = (
    "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
MOST_BODY_BYTES = 4096


@dataclass(frozen=True)
class Keys:
    """The secrets of one server, new each time."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))  # in the printed address
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))  # in the cookie
    place: str = field(default_factory=lambda: secrets.token_urlsafe(12))  # in every path
    posting: str = field(default_factory=lambda: secrets.token_urlsafe(32))  # in pages, for POST

    def __repr__(self) -> str:  # for logs and tracebacks
        return "Keys(…)"


def header(request: Request, name: str) -> str | None:
    """A header that comes once; None if it is missing, "" if it comes twice."""
    found = request.headers.getlist(name)
    return None if not found else found[0] if len(found) == 1 else ""


class Gate:
    def __init__(self, keys: Keys, port: int) -> None:
        self.keys = keys
        self.cookie = f"holdfast-{port}"
        names = (f"[{each}]" if ":" in each else each for each in LOOPBACK)
        self._hosts = {f"{name}:{port}" for name in names}
        if port == 80:
            self._hosts |= {host.removesuffix(":80") for host in self._hosts}

    def refuse(self, request: Request) -> tuple[int, str] | None:
        """Status and sentence for one that not even the right secrets let in; None: check them."""
        host = (header(request, "host") or "").lower()
        if host not in self._hosts:
            return 421, "This server answers only to 127.0.0.1 and localhost."
        origin = header(request, "origin")
        if origin is not None and origin.lower() != f"http://{host}":
            return 403, "Requests from other origins are refused."
        site = header(request, "sec-fetch-site")
        is_visit = request.method == "GET" and header(request, "sec-fetch-mode") == "navigate"
        if site not in (None, "none", "same-origin") and not is_visit:
            return 403, "Requests from other sites are refused."
        length = header(request, "content-length")
        if length is not None and not _is_small(length):
            return 413, "That is more than this server takes."
        if request.method not in ("GET", "HEAD", "POST"):
            return 405, "There is no such request here."
        return None

    def has_token(self, request: Request) -> bool:
        """Whether the address has the printed token, or a program has sent it in a header."""
        found = request.query_params.getlist("token")
        scheme, _, bearer = (header(request, "authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            found = [bearer.strip()]
        return len(found) == 1 and _is_same(found[0], self.keys.token)

    def has_session(self, request: Request) -> bool:
        """Whether the browser has the cookie, and the path has the secret place."""
        # A server at another port of this machine may have set cookies of the same name.
        pairs = (
            each.strip().partition("=") for each in (header(request, "cookie") or "").split(";")
        )
        values = [value for name, _, value in pairs if name == self.cookie]
        return self.is_in_place(request) and any(_is_same(v, self.keys.session) for v in values)

    def is_in_place(self, request: Request) -> bool:
        return _is_same(f"{request.scope['path']}/".split("/")[1], self.keys.place)

    def may_post(self, request: Request) -> bool:
        """Whether our own page has sent it: no form and no foreign script can set this header."""
        return _is_same(header(request, "x-holdfast-token") or "", self.keys.posting)

    def comes_from_outside(self, request: Request) -> bool:
        """Whether a link on another site was followed: the browser then sends no strict cookie."""
        return (
            request.method == "GET"
            and header(request, "sec-fetch-mode") == "navigate"
            and header(request, "sec-fetch-site") in ("cross-site", "same-site")
        )

    def cookie_header(self) -> str:
        where = f"Path=/{self.keys.place}/; HttpOnly; SameSite=Strict"
        return f"{self.cookie}={self.keys.session}; {where}"


def _is_small(length: str) -> bool:
    is_number = length.isascii() and length.isdigit() and len(length) < 9
    return is_number and int(length) <= MOST_BODY_BYTES


def _is_same(given: str, secret: str) -> bool:
    # compare_digest takes constant time, but no text beyond ASCII.
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode())


# uvicorn limits the time between two requests, but not the time that a request takes to arrive.
# Every user of the machine can connect, so that is limited here, and so is the number of
# connections: a new one replaces the one that has been silent the longest.
MOST_CONNECTIONS = 64
HEAD_SECONDS = 10.0  # from the connection, or the last answer, to a whole request
HEAD_BYTES = 16 << 10


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with limits on time and connections."""

    @property
    def is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(transport)
        self._since = self.loop.time()  # of the connection, or the last answer
        self._check_time()
        if len(self.connections) > MOST_CONNECTIONS:
            others = [each for each in self.connections if isinstance(each, BoundedProtocol)]
            oldest = min(others, key=lambda each: (each.is_busy, each is self, each._since))
            oldest.transport.abort()
            # Its end is reported later; until then it must not be chosen again.
            self.connections.discard(oldest)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def _check_time(self) -> None:
        # An answer may take long: stacks of a run that hangs take half a minute.
        left = HEAD_SECONDS if self.is_busy else self._since + HEAD_SECONDS - self.loop.time()
        if left <= 0:
            # Not close(): that waits until everything is sent, which may be never.
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(left, self._check_time)
