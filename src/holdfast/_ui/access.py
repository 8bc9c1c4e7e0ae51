"""Who may come in: every request passes here before anything else sees it.

Everybody on this machine can reach the port, and so can every page in the browser. So a request
must name this server as its host (else a foreign name may have been made to point here), must not
come from a page of another origin, and must know a secret: the token once, then a cookie. Cookies
do not know of ports; hence the cookie is for a path that nobody else can guess, and a browser does
not hand it to whoever listens at another port.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

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

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Keys:
    """The secrets of one server, made anew each time."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))  # in the printed address
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))  # in the cookie
    place: str = field(default_factory=lambda: secrets.token_urlsafe(12))  # in every path
    posting: str = field(default_factory=lambda: secrets.token_urlsafe(32))  # in pages, for POST

    def __repr__(self) -> str:  # of what is logged or shown in a traceback
        return "Keys(…)"


@dataclass(frozen=True)
class Refusal:
    """Why a request is not let in."""

    status: int
    sentence: str


@dataclass(frozen=True)
class Asked:
    """What of a request decides whether it may come in."""

    method: str
    path: str
    query: bytes
    headers: Headers

    def header(self, name: str) -> str | None:
        """A header that comes once; None if it is missing, "" if it comes twice."""
        found = [value for key, value in self.headers if key == name.encode()]
        if not found:
            return None
        return found[0].decode("latin-1") if len(found) == 1 else ""

    def token(self) -> str:
        """The token in the address."""
        try:
            found = parse_qs(self.query.decode("ascii"), max_num_fields=8).get("token", [])
        except ValueError:
            return ""
        return found[0] if len(found) == 1 else ""

    def bearer(self) -> str:
        """The token in the header that programs send."""
        scheme, _, token = (self.header("authorization") or "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""


class Gate:
    """Decides about requests to one port."""

    def __init__(self, keys: Keys, port: int) -> None:
        self.keys = keys
        self.cookie = f"holdfast-{port}"
        names = (f"[{each}]" if ":" in each else each for each in LOOPBACK)
        self._hosts = {f"{name}:{port}" for name in names}
        if port == 80:
            self._hosts |= {host.removesuffix(":80") for host in self._hosts}

    def refuse(self, asked: Asked) -> Refusal | None:
        """Why not, whoever asks; None if the request may go on to where secrets are asked for."""
        host = (asked.header("host") or "").lower()
        if host not in self._hosts:
            return Refusal(421, "This server answers only to 127.0.0.1 and localhost.")
        origin = asked.header("origin")
        if origin is not None and origin.lower() != f"http://{host}":
            return Refusal(403, "Requests from other origins are refused.")
        site = asked.header("sec-fetch-site")
        is_visit = asked.method == "GET" and asked.header("sec-fetch-mode") == "navigate"
        if site not in (None, "none", "same-origin") and not is_visit:
            return Refusal(403, "Requests from other sites are refused.")
        length = asked.header("content-length")
        if length is not None and not _is_small(length):
            return Refusal(413, "That is more than this server takes.")
        if asked.method not in ("GET", "HEAD", "POST"):
            return Refusal(405, "There is no such request here.")
        return None

    def has_token(self, asked: Asked) -> bool:
        """Whether the address has the printed token, or a program has sent it."""
        return _is_same(asked.token(), self.keys.token) or _is_same(asked.bearer(), self.keys.token)

    def has_session(self, asked: Asked) -> bool:
        """Whether the browser has been here with the token, and asks in the place for that."""
        # Whoever listens at another port of this machine may have set some of the same name.
        pairs = (each.strip().partition("=") for each in (asked.header("cookie") or "").split(";"))
        values = [value for name, _, value in pairs if name == self.cookie]
        return self.is_in_place(asked) and any(_is_same(v, self.keys.session) for v in values)

    def is_in_place(self, asked: Asked) -> bool:
        """Whether the path begins with what only visitors know."""
        return _is_same(asked.path.split("/")[1] if "/" in asked.path else "", self.keys.place)

    def may_post(self, asked: Asked) -> bool:
        """Whether a page of ours has sent it: no form and no foreign script can set a header."""
        return _is_same(asked.header("x-holdfast-token") or "", self.keys.posting)

    def comes_from_outside(self, asked: Asked) -> bool:
        """Whether a link elsewhere was followed: a strict cookie stays behind then."""
        return (
            asked.method == "GET"
            and asked.header("sec-fetch-mode") == "navigate"
            and asked.header("sec-fetch-site") in ("cross-site", "same-site")
        )

    def cookie_header(self) -> str:
        """What the first visit leaves in the browser; it is gone when that ends."""
        where = f"Path=/{self.keys.place}/; HttpOnly; SameSite=Strict"
        return f"{self.cookie}={self.keys.session}; {where}"


def _is_small(length: str) -> bool:
    is_number = length.isascii() and length.isdigit() and len(length) < 9
    return is_number and int(length) <= MOST_BODY_BYTES


def _is_same(given: str, secret: str) -> bool:
    # compare_digest takes the same time whatever differs, but no text beyond ASCII.
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode())
