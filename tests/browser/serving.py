"""`holdfast ui` as a process, and a page of somebody else's beside it."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from tests.cli.command import PROGRAM
from tests.support import environment, wait_until

_ADDRESS = re.compile(r"http://\S+")


class Ui:
    """The server of a folder; `address` is what it has printed."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [str(PROGRAM), "ui", str(folder), "--no-open", "--port", "0", *options]
        self._output: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = wait_until(self._find_address, 30, "the address of holdfast ui")

    @property
    def output(self) -> str:
        return "".join(self._output)

    @property
    def origin(self) -> str:
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}"

    def end(self) -> int:
        """Ctrl-C, as its user ends it; returns the status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(20)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._reader.join(10)

    def _find_address(self) -> str | None:
        if self._process.poll() is not None:
            self._reader.join(10)
            raise AssertionError(f"holdfast ui has ended:\n{self.output}")
        found = _ADDRESS.search(self.output)
        return found[0] if found else None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._output.append(line)


@contextmanager
def serving_page(html: str) -> Iterator[str]:
    """A page of another origin on this machine, whatever is asked for; yields its address."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = html.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the output is the tests'."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
