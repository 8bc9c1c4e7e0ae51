"""A way to a server on this machine that can be cut, or left hanging."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Wire:
    """Carries bytes to a port of this machine, for as long as the test lets it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.budget: int | None = None  # bytes that still go to the server; None: any number
        self.is_hanging = False  # then nothing goes through, and nobody is told
        self.cuts = 0
        self.carried = 0
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in [self._server, *self._ends]:
            _close(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [client, server]
                for source, sink, is_up in ((client, server, True), (server, client, False)):
                    threading.Thread(
                        target=self._carry, args=(source, sink, is_up), daemon=True
                    ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.is_hanging:
                    continue
                if is_up and not self._may_pass(len(data)):
                    break
                sink.sendall(data)
        _close(source)
        _close(sink)

    def _may_pass(self, size: int) -> bool:
        with self._lock:
            self.carried += size
            if self.budget is None:
                return True
            self.budget -= size
            if self.budget < 0:
                self.cuts += 1
            return self.budget >= 0


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
