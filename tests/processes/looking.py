"""What a look from outside has seen of a script, for the tests of looks."""

from __future__ import annotations

from typing import Any

from holdfast._environment.processes.activity import is_users
from holdfast._environment.processes.proc import read_bytes
from tests.support import wait_until

LOCKED = """
    import threading
    print("ready")
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def below(pid: int) -> list[int]:
    """The children that its main thread has started."""
    words = (read_bytes(f"/proc/{pid}/task/{pid}/children") or b"").split()
    return [int(word) for word in words]


def wait_for_state(pid: int, *states: str) -> None:
    """Wait until the kernel shows it in one of these states."""

    def is_there() -> bool:
        return (read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2][1:2].decode() in states

    wait_until(is_there, 10, f"state {states}")


def main_thread(record: dict[str, Any], pid: int | None = None) -> dict[str, Any]:
    """The main thread of a process, by default of the first."""
    process = next(each for each in record["processes"] if pid in (None, each["pid"]))
    found: dict[str, Any] = next(each for each in process["threads"] if each["is_main"])
    return found


def innermost(frames: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The innermost frame of the user's own code."""
    return next((each for each in frames if is_users(each["file"])), None)


def line_of(thread: dict[str, Any]) -> int:
    """Where the user's own code stands in it."""
    frame = innermost(thread["frames"])
    assert frame is not None, thread
    return int(frame["line"])
