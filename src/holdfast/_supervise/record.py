"""The records of a supervision: led.json, and the output of the command."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast._store.folder import supervised
from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.plain_file import open_plain, read_plain

_FIRST_BYTES = 256 * 1024
_LAST_BYTES = 4 * 1024 * 1024
_LAST_WORDS_BYTES = 64 * 1024
_BLOCK_BYTES = 4096
_LINE_BYTES = 256
_MOST_SIGNALS = 100


class OutputLog:
    """A file with the beginning and the end of the output; everything is written at once."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._file: int | None = open_plain(path, flags, 0o600)
        self._size = 0
        self._left_out = 0
        self._unwritten = bytearray()  # the newest output, after a full disk refused some

    def add(self, data: bytes) -> None:
        if self._file is None:
            return
        if self._unwritten:
            self._unwritten += data
            del self._unwritten[:-_LAST_WORDS_BYTES]
            return
        try:
            written = os.write(self._file, data)
            self._size += written
            self._unwritten += data[written:]
            # Not each time, since the end has to be copied.
            if self._size > _FIRST_BYTES + 2 * _LAST_BYTES:
                self._shorten()
        except OSError:  # a full disk: the command goes on
            self._unwritten += data

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._unwritten:
                    # Over older output, which needs no room: the last output matters most.
                    start = max(0, self._size - len(self._unwritten))
                    os.pwrite(self._file, self._unwritten, start)
                elif self._size > _FIRST_BYTES + _LAST_BYTES:
                    self._shorten()
            os.close(self._file)
            self._file = None

    def _shorten(self) -> None:
        assert self._file is not None
        end = os.pread(self._file, _LAST_BYTES, self._size - _LAST_BYTES)
        self._left_out += self._size - _FIRST_BYTES - len(end)
        words = f"\n[holdfast: about {self._left_out} bytes are left out here]\n".encode()
        os.lseek(self._file, _FIRST_BYTES, os.SEEK_SET)
        os.write(self._file, words + end)
        self._size = _FIRST_BYTES + len(words) + len(end)
        os.ftruncate(self._file, self._size)


class SupervisionRecord:
    """The record of one attempt; where nothing can be written, it is in memory only."""

    def __init__(self, supervision: Path | None, attempt: int, command: Sequence[str]) -> None:
        self.folder = (
            supervised.life_folder(supervision, attempt) if supervision is not None else None
        )
        self.log: OutputLog | None = None
        if self.folder is not None:
            try:
                self.folder.mkdir(mode=0o700)
                self.log = OutputLog(supervised.led_output(self.folder))
            except OSError:
                self.folder = None
        self.signals: list[dict[str, Any]] = []
        self.printed_at = 0.0  # monotonic
        self.last_printed = b""
        self.hang: dict[str, Any] | None = None  # for which the leader has ended it
        self.said: list[str] = []  # our own sentences, not to be said twice
        self.is_cut_off = False  # the file system of the run's folder does not answer
        self._has_run = False
        self._record: dict[str, Any] = {
            "began": time.time(),
            "ended": None,
            "host": os.uname().nodename,
            "leader_pid": os.getpid(),
            "command": list(command),
            "cwd": _here(),
            "life": attempt,
            "output": "output.log",
        }

    def add_output(self, data: bytes) -> None:
        self.printed_at = time.monotonic()
        self.last_printed = (self.last_printed + data[-_LINE_BYTES:])[-_LINE_BYTES:]
        if self.log is not None:
            self.log.add(data)

    def add_signal(self, name: str, pid: int | None, uid: int | None, by: str) -> None:
        if len(self.signals) < _MOST_SIGNALS:
            record = {"time": time.time(), "name": name, "pid": pid, "uid": uid, "by": by}
            self.signals.append(record)

    def write(self, **values: Any) -> None:
        self._record |= {**values, "signals": self.signals}
        if self.folder is None:
            return
        try:
            supervised.write_led(supervised.led_record(self.folder), self._record)
        except OSError:
            with contextlib.suppress(OSError):
                _write_over(supervised.led_record(self.folder), self._record)

    def write_end(self, status: int, maxrss_bytes: int, seen: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.close()
        runs = self.runs()
        run = {key: runs[0].get(key) for key in ("folder", "attempt")} if runs else None
        ended = {"ended": time.time(), "status": status, "maxrss": maxrss_bytes}
        self.write(**ended, run=run, decision=None, **seen)
        self._copy_to_run()

    def write_hang(self, hang: dict[str, Any]) -> None:
        # What every process did is in a file of its own, since that may be much.
        self.hang = {key: value for key, value in hang.items() if key != "looks"}
        if self.folder is not None:
            with contextlib.suppress(OSError):
                supervised.write_led(supervised.led_hang(self.folder), hang)
        self.write(hang=self.hang)

    def write_decision(self, restart: bool, why: str, pause_seconds: float = 0.0) -> None:
        self.write(decision={"restart": restart, "why": why, "pause": round(pause_seconds, 3)})
        self._copy_to_run()

    def runs(self) -> list[dict[str, Any]]:
        """The runs of holdfast that opened in this attempt."""
        return supervised.read_runs(self.folder) if self.folder is not None else []

    @property
    def has_run(self) -> bool:
        self._has_run = self._has_run or bool(self.runs())
        return self._has_run

    def has_printed(self, sentence: str) -> bool:
        """Whether the command itself has said this in its output."""
        with contextlib.suppress(OSError):
            if self.folder is not None:
                return sentence.encode() in read_plain(supervised.led_output(self.folder))
        return False

    def _copy_to_run(self) -> None:
        """Into the run's own folder, which may be copied to another machine."""
        for run in () if self.is_cut_off else self.runs():
            # Slow to import, and rarely needed.
            from holdfast._environment.secrets import redact_words
            from holdfast._store.folder.layout import RunLayout

            attempt, rank = run.get("attempt"), run.get("rank")
            if not isinstance(attempt, int) or self.folder is None:
                continue
            rank = rank if isinstance(rank, int) else 0
            layout = RunLayout(Path(run["folder"]))
            with contextlib.suppress(OSError):
                output = layout.output(attempt, rank)
                # This folder is shared more widely than our own.
                command = redact_words(self._record["command"]).words
                record = self._record | {"output": output.name, "command": command}
                supervised.write_led(layout.led(attempt, rank), record)
                write_atomic(output, read_plain(supervised.led_output(self.folder)), durable=False)


def _write_over(path: Path, record: dict[str, Any]) -> None:
    """On a full disk, into the block that the record already has."""
    slim = {**record, "memory": [], "processes": record.get("processes", [])[-8:]}
    text = json.dumps(slim).encode()
    if len(text) <= _BLOCK_BYTES:
        descriptor = open_plain(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, os.write(descriptor, text))
        finally:
            os.close(descriptor)


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""
