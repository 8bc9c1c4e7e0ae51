"""Writes down every signal that it and its child get: `listener.py FILE`.

It stays through SIGTERM, and says so when it was left alone for a while after it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

HEARD = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
# Less than KillWait of the cluster, and more than a kill at once could ever take.
LEFT_ALONE_SECONDS = 2.0


def note(file: str, who: str, what: str) -> None:
    with open(file, "a") as stream:  # noqa: PTH123  imports would make it later to listen
        stream.write(f"{who} {what}\n")


def listen(file: str, who: str) -> None:
    terminated: list[float] = []

    def hear(number: int, frame: FrameType | None) -> None:
        note(file, who, signal.Signals(number).name)
        if number == signal.SIGTERM:
            terminated.append(time.monotonic())

    for name in HEARD:
        signal.signal(signal.Signals[name], hear)
    note(file, who, "ready")
    while not terminated or time.monotonic() < terminated[0] + LEFT_ALONE_SECONDS:
        time.sleep(0.05)
    note(file, who, "left-alone")


if __name__ == "__main__":
    child = os.fork() == 0
    listen(sys.argv[1], "child" if child else "python")
