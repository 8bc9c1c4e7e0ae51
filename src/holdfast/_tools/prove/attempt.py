"""One life of the script: its processes, what they tell, and the signals that they get."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from holdfast._tools.prove.plan import AGENT, ALL, Planned

# -- The processes of a job, found by what all of them have inherited from the first ---------------
# A launcher gives each rank a session of its own, and may die before them.


_ERRAND = "HOLDFAST_ERRAND"
_END_SECONDS = 10.0


def find_job(socket: Path, leader: int, known: Iterable[int] = ()) -> list[psutil.Process]:
    """All processes that live and have this proof's errand, or belong to the leader's session."""
    wanted = set(known)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = process.pid in wanted or os.getsid(process.pid) == leader
            if not is_ours and process.pid != os.getpid():
                is_ours = str(socket) in process.environ().get(_ERRAND, "")
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def find_ranks(job: Iterable[psutil.Process]) -> dict[int, int]:
    """The pids of the ranks by the number that their launcher gave them, without their children."""
    numbers: dict[int, int] = {}
    parents: dict[int, int] = {}
    for process in job:
        with contextlib.suppress(psutil.Error, OSError):
            text = process.environ().get("RANK", "")
            if text.isdigit():
                numbers[process.pid], parents[process.pid] = int(text), process.ppid()
    return {number: pid for pid, number in numbers.items() if parents[pid] not in numbers}


def end_job(job: Iterable[psutil.Process]) -> None:
    """Kill what is left of it, and wait until it is gone."""
    left = list(job)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + _END_SECONDS
    while any(map(_lives, left)) and time.monotonic() < deadline:
        time.sleep(0.005)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


Event = dict[str, Any]
_STOPPED_SECONDS = 0.15


class Process(Protocol):
    """A process that was started as the leader of a session of its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


Starter = Callable[[Sequence[str], Path, Mapping[str, str], Path], Process]


def start_process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
) -> Process:
    with output.open("ab") as file:
        return subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A proof that runs in the background of a shell has Ctrl-C ignored, and so would they.
            preexec_fn=_hear_signals,
        )


def _hear_signals() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Client:
    """One process that tells."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = 0
        self.rank = 0
        self.trains = False  # whether it has told of a training
        self._unread = b""

    def read(self) -> list[Event] | None:
        """What has come; None when it is gone."""
        try:
            received = self.connection.recv(1 << 20)
        except OSError:
            received = b""
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "hello":
                self.pid, self.rank = event["pid"], event["rank"]
            elif event["event"] in ("sight", "boundary"):
                self.trains = True
        return events

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it may be dead by now, as was intended
            self.connection.sendall(json.dumps({"ask": number, **fields}).encode() + b"\n")


class Listener:
    """Hears all processes of all lives, at one address."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        self.clients: list[Client] = []

    def hear(self, seconds: float) -> Iterator[tuple[Client, Event]]:
        """What comes within this time, or nothing."""
        for key, _ in self._selector.select(seconds):
            client: Client | None = key.data
            if client is None:
                connection, _ = self._socket.accept()
                client = Client(connection)
                self.clients.append(client)
                self._selector.register(connection, selectors.EVENT_READ, client)
                continue
            events = client.read()
            if events is None:
                self._drop(client)
            else:
                yield from ((client, event) for event in events)

    def drop_all(self) -> None:
        for client in list(self.clients):
            self._drop(client)

    def close(self) -> None:
        self.drop_all()
        self._selector.close()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _drop(self, client: Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        self.clients.remove(client)


class Life:
    """From one start of the script to its end."""

    def __init__(self, process: Process, listener: Listener) -> None:
        self.process = process
        self.listener = listener
        self.began = time.monotonic()
        self._wake_at: float | None = None
        self._stopped: list[int] = []
        self._leader_trains = False

    def hear(self, seconds: float) -> Iterator[tuple[Client, Event]]:
        if self._wake_at is not None and time.monotonic() >= self._wake_at:
            self._wake_at = None
            for pid in self._stopped:
                _send(pid, signal.SIGCONT)
        for client, event in self.listener.hear(seconds):
            self._leader_trains |= client.trains and client.pid == self.process.pid
            yield client, event

    def strike(self, planned: Planned, client: Client | None, *, has_ranks: bool) -> str | None:
        """Interrupt it as it would be in earnest; of several ranks, say whom that met.

        A terminal sends Ctrl-C to every process of the job; a kill -9 hits one of them.
        """
        number = signal.Signals[f"SIG{planned.signal}"]
        whom: str | None = None
        pids: list[int] = []
        if has_ranks:
            whom, pids = self._choose(planned, self._ranks())
        elif planned.signal != "INT":
            one = client.pid if client is not None and client.pid else 0
            pids = [one or next(iter(self._trainers()), self.process.pid)]
        if planned.signal == "STOP":
            self._wake_at, self._stopped = time.monotonic() + _STOPPED_SECONDS, pids
        if planned.signal == "INT" and (not pids or self.process.pid in pids):
            self._signal_group(number)
            pids = [pid for pid in pids if not self._is_in_group(pid)]
        for pid in pids:
            _send(pid, number)
        return whom

    def _choose(self, planned: Planned, ranks: dict[int, int]) -> tuple[str, list[int]]:
        """The processes that an interruption of several ranks meets, and what they are called."""
        if planned.target == AGENT or not ranks:  # in its start there may be none yet
            return AGENT, [self.process.pid]
        if planned.target == ALL:
            # The ranks first: whoever started them would end them in its own way.
            return ALL, [*ranks.values(), self.process.pid]
        rank = sorted(ranks)[int(planned.rank_share * len(ranks))]
        return f"rank {rank}", [ranks[rank]]

    def _ranks(self) -> dict[int, int]:
        """The pids of the ranks that train, or that are about to."""
        found = {c.rank: c.pid for c in self.listener.clients if c.trains and c.pid}
        return found if len(found) > 1 else {**find_ranks(self.job()), **found}

    def job(self) -> list[psutil.Process]:
        """All of its processes that live."""
        known = [client.pid for client in self.listener.clients if client.trains]
        return find_job(self.listener.path, self.process.pid, known)

    def outlives_its_leader(self) -> bool:
        """Whether ranks are left of a job whose launcher is gone."""
        return not self._leader_trains and bool(self.job())

    def end(self) -> None:
        """End whatever is left of it."""
        end_job(self.job())
        deadline = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def _trainers(self) -> list[int]:
        return [client.pid for client in self.listener.clients if client.trains]

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)

    def _is_in_group(self, pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getpgid(pid) == self.process.pid
        return True  # it is gone


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
