"""The line to whoever runs the proof: messages out, and answers that may make us wait.

A signal may interrupt a message, and its handler may send another one; so signals wait while a
message is on its way, but not while an answer is: that is when the interruption comes.
"""

from __future__ import annotations

import contextlib
import itertools
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
        self._sending = threading.Lock()
        self._reading = threading.RLock()  # a handler may ask while its own thread waits
        self._unread = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    def tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            with _signals_waiting(), self._sending:
                self._socket.sendall(data)
        except OSError:
            _leave()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Wait for the answer to this message; other threads may wait for theirs."""
        number = next(self._numbers)
        self.tell(message | {"ask": number})
        with self._reading:
            while number not in self._answers:
                self._read()
            return self._answers.pop(number)

    def _read(self) -> None:
        try:
            received = self._socket.recv(65536)
        except OSError:
            received = b""
        if not received:
            _leave()
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            answer: dict[str, Any] = json.loads(line)
            self._answers[answer["ask"]] = answer


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
