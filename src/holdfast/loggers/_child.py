"""The process that logs: rows come through a pipe, and go to TensorBoard, W&B or MLflow.

It ends when the trainer says so, or is gone: then it writes what has come, and finishes. Its own
output goes to `loggers/NAME.log`; what a person should know it tells the trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from holdfast._store.folder.plain_file import open_log
from holdfast.loggers._memory import Memory, Row

_SAVE_SECONDS = 1.0
_LOCK_SECONDS = 60.0
_AGAIN_SECONDS = 2.0
_GIVE_UP_SECONDS = 60.0  # after the trainer's end
KILLED = 137  # the status of a trainer that was gone without a word


class Sink(Protocol):
    """Where rows go."""

    rewinds: bool  # whether the other side can forget steps, so that they are logged again

    def name(self, given: str) -> str:
        """What a metric is called there: a name that it refuses would hold up all the others."""
        ...

    def open(self, replayed: list[Row]) -> None:
        """Before the first row; `replayed` are to be logged once more if it has rewound."""
        ...

    def write(self, rows: list[Row]) -> None: ...

    def flush(self) -> None: ...

    def finish(self, status: int) -> None: ...


def tell(plan: dict[str, Any], text: str) -> None:
    """Let the trainer say a line; it may be gone."""
    with contextlib.suppress(OSError):  # the disk may be full
        print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        os.write(plan["told"], json.dumps({"say": text}).encode() + b"\n")


def first_line(error: BaseException) -> str:
    """What a person needs of an error; the rest is in the log."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def encodable(name: str) -> str:
    """The name without what no file can hold, such as a part of a path that is no text."""
    return name.encode("utf-8", "replace").decode()


def _log_error() -> None:
    with contextlib.suppress(OSError):  # its log may be on the very disk that is full
        traceback.print_exc()


def main(text: str) -> None:
    plan = json.loads(text)
    # What this process starts may live longer: it must not hold the pipe.
    plan["pipe"] = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    try:
        with _alone(plan["lock"]):
            _serve(plan)
    except Exception as error:  # noqa: BLE001  whatever a package raises, the person is told of it
        _log_error()
        tell(plan, f"{first_line(error)}. The training goes on without it.")
        sys.exit(0)


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Wait for the process of the life before, which may still write."""
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
    module = importlib.import_module(f"holdfast.loggers._{plan['kind']}")
    sink: Sink = module.open_sink(plan, memory)
    sink.open(memory.rewind(plan["mark"]) if sink.rewinds else [])
    memory.save()
    feed = LogFeed(plan)
    saved, is_new = time.monotonic(), False
    for rows in feed:
        named = [{**row, "v": {sink.name(k): v for k, v in row["v"].items()}} for row in rows]
        fresh = [row for row in map(memory.without_known, named) if row["v"]]
        if fresh and _deliver(plan, sink, fresh, feed):
            memory.note(fresh)
            is_new = True
        if is_new and time.monotonic() - saved > _SAVE_SECONDS:
            saved, is_new = time.monotonic(), not _is_saved(sink, memory)
    sink.flush()
    memory.save()
    sink.finish(feed.status)
    memory.save(whole=True)


def _is_saved(sink: Sink, memory: Memory) -> bool:
    """Make durable what was logged; on a full disk later, when there is room again."""
    try:
        sink.flush()
        memory.save()
    except OSError:
        _log_error()
        return False
    return True


def _deliver(plan: dict[str, Any], sink: Sink, rows: list[Row], feed: LogFeed) -> bool:
    """Write rows, again and again if it must be; meanwhile they queue up in the trainer."""
    is_told = False
    while True:
        try:
            sink.write(rows)
        except Exception as error:  # noqa: BLE001  a full disk, a server that is down: may pass
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
    """The rows that come through the pipe, until the trainer has no more."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._parent = int(plan["parent"])
        self._pipe = plan["pipe"]
        self._rest = b""
        self._is_at_end = False
        self._over_since: float | None = None
        self.status = KILLED

    def is_over(self) -> bool:
        """Whether the trainer is gone, or has nothing more to say."""
        # A worker that was forked from the trainer holds the pipe open: its end is not the only
        # sign. Whose parent has died gets another one.
        return self._is_at_end or os.getppid() != self._parent

    def seconds_over(self) -> float:
        """For how long it is: all rows that cannot be written share one patience."""
        if not self.is_over():
            return 0.0
        if self._over_since is None:
            self._over_since = time.monotonic()
        return time.monotonic() - self._over_since

    def __iter__(self) -> Iterator[list[Row]]:
        while not self._is_at_end:
            is_orphan = self.is_over()  # before the last look, so that nothing is missed
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
