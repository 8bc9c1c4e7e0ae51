"""Rows into event files, each life into one of its own.

A life begins with the mark by which TensorBoard knows a restart: it forgets the steps from there
on, of whatever file. The records are TensorBoard's own; the file is ours, so that one that a full
disk has cut short is cut off again: a reader would not go on behind it.
"""

from __future__ import annotations

import importlib
import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from holdfast.loggers._child import encodable
from holdfast.loggers._memory import Memory, Row


class EventFiles:
    """The folder that TensorBoard is shown."""

    rewinds = True

    def __init__(self, plan: dict[str, Any], memory: Memory) -> None:
        self._memory = memory
        self._folder = Path(plan["options"]["folder"])
        self._attempt, self._step = plan["attempt"], plan["mark"] // 2
        # Of the package only what needs no TensorFlow: to import that takes seconds.
        self._proto: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")

    def name(self, given: str) -> str:
        return encodable(given)

    def open(self, replayed: list[Row]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names, and another machine's clock may be behind.
        stamp = max(int(time.time()), self._memory.stamp + 1)
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{self._attempt:04d}"
        self._file = (self._folder / f"{name}.{os.getpid()}").open("ab", buffering=0)
        self._memory.stamp = stamp
        self._size = 0
        restart = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._append(
            [
                self._proto.Event(wall_time=time.time(), file_version="brain.Event:2"),
                self._proto.Event(wall_time=time.time(), step=self._step, session_log=restart),
            ]
        )
        self.write(replayed)

    def write(self, rows: list[Row]) -> None:
        summary = self._summary.Summary
        self._append(
            [
                self._proto.Event(
                    wall_time=row["t"],
                    step=row["s"],
                    summary=summary(
                        value=[summary.Value(tag=n, simple_value=v) for n, v in row["v"].items()]
                    ),
                )
                for row in rows
            ]
        )

    def _append(self, events: list[Any]) -> None:
        buffer = io.BytesIO()
        records = self._records.RecordWriter(buffer)
        for event in events:
            records.write(event.SerializeToString())
        whole = memoryview(buffer.getvalue())
        try:
            while whole:
                whole = whole[self._file.write(whole) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += buffer.tell()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def finish(self, status: int) -> None:  # noqa: ARG002  an event file does not say how it ends
        self._file.close()


def open_sink(plan: dict[str, Any], memory: Memory) -> EventFiles:
    return EventFiles(plan, memory)
