"""`holdfast ui` as a process of its own, and a client that speaks to it over a socket."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.command import PROGRAM, environment
from tests.support import SLACK, wait_until

_ADDRESS = re.compile(r"http://(?P<host>\S+):(?P<port>\d+)/\?token=(?P<token>[\w-]+)")
INSTALL = "pip install 'holdfast[ui]'"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Ui:
    """One server; what it prints is kept."""

    def __init__(self, folder: Path, *arguments: str, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [PROGRAM, "ui", str(folder), "--no-open", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(PYTHONUNBUFFERED=""),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = _ADDRESS.search(self.line)
        assert found is not None, self.line + self.end(signal.SIGKILL)[1]
        self.host, self.port, self.token = host, int(found["port"]), found["token"]
        self.visit = self.get("/?token=" + self.token)
        self.place = self.visit.headers.get("location") or ""
        self.cookie = (self.visit.headers.get("set-cookie") or "").partition(";")[0]

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """One request on a connection of its own; the path goes out as it is."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30 * SLACK)
        try:
            given = {"Accept-Encoding": "gzip", **(headers or {})}
            connection.putrequest(
                method, path, skip_host="Host" in given, skip_accept_encoding=True
            )
            for name, value in given.items():
                connection.putheader(name, value)
            if method == "POST" and "Content-Length" not in given:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            found = answer.read()
            if answer.getheader("content-encoding") == "gzip":
                found = gzip.decompress(found)
            return Answer(answer.status, answer.msg, found)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """As anybody could."""
        return self.ask("GET", path, headers)

    def see(self, path: str = "", **headers: str) -> Answer:
        """As the browser that has been there with the token."""
        return self.ask("GET", self.place + path, {"Cookie": self.cookie, **headers})

    def post(self, path: str, body: bytes = b"{}", **headers: str) -> Answer:
        """As a page of the server does."""
        given = {"Cookie": self.cookie, "Origin": f"http://{self.host}:{self.port}"}
        given |= {"X-Holdfast-Token": self.posting(path), "Content-Type": "application/json"}
        return self.ask("POST", self.place + path, given | headers, body)

    def posting(self, path: str) -> str:
        """What a run's page has for its requests."""
        page = self.see("/".join(path.split("/")[:2])).text
        found = re.search(r'data-token="([\w-]+)"', page)
        return found[1] if found else ""

    def rows(self) -> dict[str, dict[str, Any]]:
        """All rows by name, as soon as everything has been read."""
        rows: dict[str, dict[str, Any]] = {}

        def look() -> bool:
            found = self.see("runs?since=0").json()
            rows.clear()
            rows.update({each["name"]: each for each in found["rows"] if not each.get("gone")})
            return bool(found["done"])

        wait_until(look, what="a whole list")
        return rows

    def key(self, name: str) -> str:
        return str(self.rows()[name]["key"])

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30 * SLACK)

    def end(self, number: int = signal.SIGINT) -> tuple[int, str, float]:
        """End it by a signal; returns its status, all that it has printed since, and how long."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
        stream = self.process.stdout
        assert stream is not None
        # Not communicate(): what came along with the first line is in the stream's own buffer.
        printed = "" if stream.closed else stream.read()
        stream.close()
        status = self.process.wait(30 * SLACK)
        return status, printed, time.monotonic() - began
