"""The process that logs: rows arrive through a pipe, and go to TensorBoard, W&B or MLflow.

It ends when the trainer asks for it, or has ended: then it writes the rows it has received. Its own
output goes to `loggers/NAME.log`. Lines for the user go to the trainer, which prints them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast._store.folder.plain_file import open_log
from holdfast.loggers._sinks import KILLED, SINKS, Memory, Row, Sink, first_line, tell

_SAVE_SECONDS = 1.0
_LOCK_SECONDS = 60.0
_AGAIN_SECONDS = 2.0
_GIVE_UP_SECONDS = 60.0  # after the trainer's end


def _log_error() -> None:
    with contextlib.suppress(OSError):  # the log may be on the full disk
        traceback.print_exc()


def main(text: str) -> None:
    plan = json.loads(text)
    # A child of this process may outlive it, and must not hold the pipe open.
    plan["pipe"] = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    try:
        with _alone(plan["lock"]):
            _serve(plan)
    except Exception as error:  # noqa: BLE001  a package may raise anything; the user is told
        _log_error()
        tell(plan, f"{first_line(error)}. The training goes on without it.")
        sys.exit(0)


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Wait for the process of the previous attempt, which may still write."""
    import fcntl

    with open_log(Path(path)) as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield


def _serve(plan: dict[str, Any]) -> None:
    memory = Memory(Path(plan["state"]), plan["target"])
    sink: Sink = SINKS[plan["kind"]](plan, memory)
    sink.open(memory.rewind(plan["mark"]) if sink.rewinds else [])
    memory.save()
    feed = LogFeed(plan)
    saved, is_new = time.monotonic(), False
    for rows in feed:
        named = [{**row, "v": {sink.name(k): v for k, v in row["v"].items()}} for row in rows]
        fresh = [row for row in map(memory.without_known, named) if row["v"]]
        if fresh and _deliver(plan, sink, fresh, feed):
            memory.record(fresh)
            is_new = True
        if is_new and time.monotonic() - saved > _SAVE_SECONDS:
            saved, is_new = time.monotonic(), not _is_saved(sink, memory)
    sink.flush()
    memory.save()
    sink.finish(feed.status)
    memory.save(whole=True)


def _is_saved(sink: Sink, memory: Memory) -> bool:
    """Make durable what was logged; False on a full disk, to try it again later."""
    try:
        sink.flush()
        memory.save()
    except OSError:
        _log_error()
        return False
    return True


def _deliver(plan: dict[str, Any], sink: Sink, rows: list[Row], feed: LogFeed) -> bool:
    """Write rows, and try again if that fails; meanwhile new rows wait in the trainer."""
    is_told = False
    while True:
        try:
            sink.write(rows)
        except Exception as error:  # noqa: BLE001  a full disk or a server that is down may recover
            _log_error()
            if not is_told:
                tell(plan, f"cannot be written to now ({first_line(error)}). It is tried again.")
                is_told = True
            if feed.seconds_over() > _GIVE_UP_SECONDS:
                return False
            time.sleep(_AGAIN_SECONDS)
        else:
            if is_told:
                tell(plan, "can be written to again.")
            return True


class LogFeed:
    """The rows from the pipe, until the trainer has no more."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._parent = int(plan["parent"])
        self._pipe = plan["pipe"]
        self._rest = b""
        self._is_at_end = False
        self._over_since: float | None = None
        self.status = KILLED

    def is_over(self) -> bool:
        """Whether the trainer has ended, or has sent its last row."""
        # A worker that was forked from the trainer holds the pipe open. So this process also checks
        # whether its parent has changed.
        return self._is_at_end or os.getppid() != self._parent

    def seconds_over(self) -> float:
        """The seconds since then: all rows that cannot be written share one time limit."""
        if not self.is_over():
            return 0.0
        if self._over_since is None:
            self._over_since = time.monotonic()
        return time.monotonic() - self._over_since

    def __iter__(self) -> Iterator[list[Row]]:
        while not self._is_at_end:
            is_orphan = self.is_over()  # before the last read, so that no row is missed
            if not select.select([self._pipe], [], [], 0.0 if is_orphan else _SAVE_SECONDS)[0]:
                if is_orphan:
                    return
                yield []
                continue
            chunk = os.read(self._pipe, 1 << 20)
            self._is_at_end = not chunk
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            yield from self._rows(lines)

    def _rows(self, lines: list[bytes]) -> Iterator[list[Row]]:
        for line in lines:
            message = json.loads(line)
            if isinstance(message, dict):
                self.status = message["end"]
                self._is_at_end = True
            else:
                yield message
