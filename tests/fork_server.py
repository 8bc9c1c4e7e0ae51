"""One fork server for the whole session: scripts start without the seconds of an import."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support import environment, wait_until

_MAIN = Path(__file__).with_name("fork_server_main.py")
_START_SECONDS = 150.0  # TensorFlow on a busy machine
#: Variables of Python's start that a child follows. The others need a real process.
_FOLLOWED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}


class Forked:
    """A script that the server has forked, with the interface of subprocess.Popen."""

    def __init__(self, pipe: int, output: Path | int) -> None:
        self._pipe = pipe
        self._output = output
        self.returncode: int | None = None
        pid = self._read("pid", _START_SECONDS)
        assert pid is not None, "the fork server is too slow"
        self.pid = pid

    @property
    def output(self) -> str:
        """What it has written to its file."""
        assert isinstance(self._output, Path)
        return self._output.read_text()

    @property
    def is_over(self) -> bool:
        return self.poll() is not None

    def poll(self) -> int | None:
        if self.returncode is None and (status := self._read("status", 0.0)) is not None:
            self.returncode = status
            self.close()
        return self.returncode

    def wait(self, timeout: float = 150.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                said = self.output if isinstance(self._output, Path) else "its output"
                raise subprocess.TimeoutExpired(said, timeout)
            select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """All that still run in its process group: itself, and its workers."""
        return _processes_where(lambda pid: os.getpgid(pid) == self.pid)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _read(self, word: str, seconds: float) -> int | None:
        """The number behind this word, which is the next one that the server sends."""
        if not select.select([self._pipe], [], [], seconds)[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):
            received = os.read(self._pipe, 1)
            assert received, "the fork server has died; its own output tells why"
            line += received
        said, number = line.decode().split()
        assert said == word, f"the fork server says {said} {number}"  # no pid is a status
        return int(number)


class ForkServer:
    """The server processes, one for each framework that a test asks for; owned by a fixture."""

    def __init__(self) -> None:
        self._servers: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._children: list[Forked] = []

    def can_start(self, options: Mapping[str, Any]) -> bool:
        """Whether `start` can do the same as subprocess.Popen with these options."""
        if not options.keys() <= {"cwd", "env", "start_new_session"}:
            return False
        asked = options.get("env", os.environ)
        names = {name for name in {*asked, *os.environ} if name.startswith(("PYTHON", "LD_"))}
        return all(asked.get(name) == os.environ.get(name) for name in names - _FOLLOWED)

    def start(
        self,
        script: Path | str,
        *arguments: Any,
        output: Path | int,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        framework: str = "torch",
        start_new_session: bool = False,
        unbuffered: bool = False,
    ) -> Forked:
        """Run a script as `python SCRIPT ARGUMENTS` would; `output` gets all that it prints."""
        request = {
            "argv": [str(script), *map(str, arguments)],
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(environment() if env is None else env),
            "new_session": start_new_session,
            "unbuffered": unbuffered,
        }
        reading, writing = os.pipe()
        written = output
        if isinstance(output, Path):
            written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            socket.send_fds(
                self._server(framework), [json.dumps(request).encode()], [written, writing]
            )
        finally:
            os.close(writing)
            if isinstance(output, Path):
                os.close(written)
        self._children.append(Forked(reading, output))
        return self._children[-1]

    def end(self) -> None:
        """End the servers; nothing that they have started may be left."""
        sessions = {process.pid for process, _ in self._servers.values()}
        for process, requests in self._servers.values():
            requests.close()
            process.wait(30)
        for child in self._children:
            child.close()
        # A worker looks every few seconds whether its trainer still lives.
        wait_until(
            lambda: not _processes_where(lambda pid: os.getsid(pid) in sessions),
            30,
            "the end of all that the fork server has started",
        )

    def _server(self, framework: str) -> socket.socket:
        if framework not in self._servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, str(_MAIN), framework, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment(),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._servers[framework] = process, ours
        return self._servers[framework][1]


def _processes_where(is_wanted: Any) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if is_wanted(process.pid) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
