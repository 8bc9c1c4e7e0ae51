"""The line to whoever runs the proof: messages out, and answers that may make us wait.

A signal may interrupt a message, and its handler may send another one; so signals wait while a
message is on its way, but not while an answer is: that is when the interruption comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any


class Channel:
    """Lines of JSON through a socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._lock = threading.Lock()
        self._unread = b""
        self._number = 0

    def tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            with _signals_waiting(), self._lock:
                self._socket.sendall(data)
        except OSError:
            _leave()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Wait for the answer to this message; one to an earlier question is dropped."""
        self._number = number = self._number + 1
        self.tell(message | {"ask": number})
        while True:
            *lines, self._unread = self._unread.split(b"\n")
            for index, line in enumerate(lines):
                answer: dict[str, Any] = json.loads(line)
                if answer["ask"] == number:
                    self._unread = b"\n".join([*lines[index + 1 :], self._unread])
                    return answer
            try:
                received = self._socket.recv(65536)
            except OSError:
                received = b""
            if not received:
                _leave()
            self._unread += received


@contextlib.contextmanager
def _signals_waiting() -> Iterator[None]:
    former = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _leave() -> None:
    """Nobody listens any more: what is proven here is of no use to anyone."""
    os._exit(1)
