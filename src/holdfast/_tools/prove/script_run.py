"""One training by the script from beginning to end, in a copy of the user's folder.

A `ScriptRun` is the folder and one process of the script after the other; `ScriptProcess` one of
them, with its children. The listener receives the events of all processes at one address.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from holdfast._environment.variables import child_environment
from holdfast._store.folder.prove_config import ProveConfig
from holdfast._tools.prove.causes import RankHistory, completes_step
from holdfast._tools.prove.copying import copy_folder, place_command
from holdfast._tools.prove.proof import AGENT, ALL, Planned, ProofRequest

_ERRAND = "HOLDFAST_ERRAND"
_END_SECONDS = 10.0
_STOPPED_SECONDS = 0.15
_INJECT = Path(__file__).resolve().parent / "witness" / "inject"
_PACKAGES = Path(__file__).resolve().parents[3]
_LEAST_SILENCE_SECONDS = 120.0
_POLL_SECONDS = 0.02
_LAST_LINES = 6
_ORPHAN_SECONDS = 60.0
_ORPHAN_POLL_SECONDS = 0.1
_DIGITS = re.compile(r"[0-9]+")

Event = dict[str, Any]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


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
            # A background job of a shell ignores Ctrl-C, and its children would inherit that.
            preexec_fn=_reset_signals,
        )


def _reset_signals() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = self.rank = 0
        self.trains = False  # it has sent an update or a boundary
        self._unread = b""

    def read(self) -> list[Event] | None:
        """The events received; None when the process is gone."""
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


class EventListener:
    def __init__(self) -> None:
        # A folder of its own: the path of a socket has room for about a hundred characters.
        self.path = Path(tempfile.mkdtemp(prefix="holdfast-")) / "socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.path))
        self._socket.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        self.clients: list[Client] = []

    def receive(self, seconds: float) -> Iterator[tuple[Client, Event]]:
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
        shutil.rmtree(self.path.parent, ignore_errors=True)

    def _drop(self, client: Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        self.clients.remove(client)


class ScriptProcess:
    def __init__(self, leader: Process, listener: EventListener) -> None:
        self.leader = leader
        self.listener = listener
        self._wake_at: float | None = None
        self._stopped: list[int] = []
        self._leader_trains = False

    def receive(self, seconds: float) -> Iterator[tuple[Client, Event]]:
        if self._wake_at is not None and time.monotonic() >= self._wake_at:
            self._wake_at = None
            for pid in self._stopped:
                _send(pid, signal.SIGCONT)
        for client, event in self.listener.receive(seconds):
            self._leader_trains |= client.trains and client.pid == self.leader.pid
            yield client, event

    def strike(self, planned: Planned, client: Client | None, *, has_ranks: bool) -> str | None:
        """Send the signal as a terminal or the system would; returns the target among ranks.

        A terminal sends Ctrl-C to every process of the job; a kill -9 hits one of them.
        """
        number = signal.Signals[f"SIG{planned.signal}"]
        target: str | None = None
        pids: list[int] = []
        if has_ranks:
            target, pids = self._choose(planned, self._ranks())
        elif planned.signal != "INT":
            training = [client.pid] if client is not None else self._training_pids()
            pids = [*training, self.leader.pid][:1]
        if planned.signal == "STOP":
            self._wake_at, self._stopped = time.monotonic() + _STOPPED_SECONDS, pids
        if planned.signal == "INT" and (not pids or self.leader.pid in pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self.leader.poll() is None:
                    os.killpg(self.leader.pid, number)
            pids = [pid for pid in pids if not self._is_in_group(pid)]
        for pid in pids:
            _send(pid, number)
        return target

    def _choose(self, planned: Planned, ranks: dict[int, int]) -> tuple[str, list[int]]:
        if planned.target == AGENT or not ranks:  # in its start there may be none yet
            return AGENT, [self.leader.pid]
        if planned.target == ALL:
            # The ranks first: their launcher would end them in its own way.
            return ALL, [*ranks.values(), self.leader.pid]
        rank = sorted(ranks)[int(planned.rank_share * len(ranks))]
        return f"rank {rank}", [ranks[rank]]

    def _ranks(self) -> dict[int, int]:
        """The pids of the ranks that train, or that are about to, without their children."""
        training = {client.rank: client.pid for client in self.listener.clients if client.trains}
        if len(training) > 1:
            return training
        numbers: dict[int, int] = {}
        parents: dict[int, int] = {}
        for process in self.job():
            with contextlib.suppress(psutil.Error, OSError):
                text = process.environ().get("RANK", "")
                if text.isdigit():
                    numbers[process.pid], parents[process.pid] = int(text), process.ppid()
        found = {rank: pid for pid, rank in numbers.items() if parents[pid] not in numbers}
        return found | training

    def job(self) -> list[psutil.Process]:
        """All live processes that inherited its `ProveConfig`, or belong to the leader's session.

        A launcher gives each rank a session of its own, and may die before them.
        """
        wanted = set(self._training_pids())
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = process.pid in wanted or os.getsid(process.pid) == self.leader.pid
                if not is_ours and process.pid != os.getpid():
                    is_ours = str(self.listener.path) in process.environ().get(_ERRAND, "")
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def outlives_its_leader(self) -> bool:
        """Whether ranks of the job live though their launcher is gone."""
        return not self._leader_trains and bool(self.job())

    def end(self) -> None:
        left = self.job()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + _END_SECONDS
        while self.leader.poll() is None or any(map(_lives, left)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)

    def _training_pids(self) -> list[int]:
        return [client.pid for client in self.listener.clients if client.trains]

    def _is_in_group(self, pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getpgid(pid) == self.leader.pid
        return True  # it is gone


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class Saved:
    place: int  # updates of the undisturbed run that were made
    in_handler: bool


class FileLog:
    """The files that a script saves, renames and loads: which of them it resumes from."""

    def __init__(self, work: Path) -> None:
        self._work = work.resolve()
        self._home = self._work.parent
        self.torn: set[str] = set()  # files that were being saved when a process ended
        self._pending: dict[str, Saved] = {}
        self.saved: dict[str, Saved] = {}  # by the present path below the folder
        self.loaded: set[str] = set()
        self.failed: dict[str, str] = {}  # loads of this attempt that failed, with the error
        self.torn_failed: set[str] = set()  # those of them that were torn
        self.newest = Saved(0, in_handler=False)
        self.save_places: list[int] = []

    def begin_attempt(self) -> None:
        self.torn |= set(self._pending)
        self._pending.clear()
        self.failed = {}
        self.torn_failed = set()

    def outside(self) -> list[str]:
        """Files that were saved outside of the run's folder, and exist."""
        away = [Path(name) for name in self.saved if Path(name).is_absolute()]
        return [str(path) for path in away if not path.is_relative_to(self._home) and path.exists()]

    def record(self, event: Mapping[str, Any], place: int) -> None:
        kind, name = event["event"], self._name(event.get("path", ""))
        if kind == "save":
            self.save_places.append(place)
            self._pending[name] = Saved(place, event["in_handler"])
        elif kind == "saved" and name in self._pending:
            self.saved[name] = self.newest = self._pending.pop(name)
            self.torn.discard(name)
        elif kind == "rename":
            source = self._name(event["source"])
            if source in self.saved:
                self.saved[self._name(event["target"])] = self.saved.pop(source)
        elif kind == "loaded":
            self.loaded.add(name)
        elif kind == "load-failed" and not event["error"].startswith("FileNotFoundError"):
            self.loaded.add(name)
            self.failed[name] = event["error"]
            self.torn_failed |= {name} & self.torn

    def _name(self, path: str) -> str:
        whole = Path(path)
        return str(whole.relative_to(self._work)) if whole.is_relative_to(self._work) else path


Receive = Callable[[Client, Event], Mapping[str, Any] | None]


class Hung(Exception):
    """The script sent nothing for too long, and was ended."""


class ScriptRun:
    def __init__(
        self,
        name: str,
        request: ProofRequest,
        workplace: Path,
        listener: EventListener,
        start: Starter,
        hash_seed: int,
    ) -> None:
        self.folder = workplace / name
        self.work = self.folder / "work"
        self.end = self.folder / "end"
        for path in (self.work, self.end, self.folder / "runs", self.folder / "dir"):
            path.mkdir(parents=True, exist_ok=True)
        self.linked = copy_folder(request.folder, self.work, without=[workplace])
        self._given = {path for path in self.work.rglob("*") if path.is_file()}
        self.file_log = FileLog(self.work)
        self.starts = 0
        self.runs: dict[str, str] = {}  # run folders, by the name that the script gave them
        self._request = request
        self._listener = listener
        self._start = start
        self._hash_seed = hash_seed
        self._has_opened = False  # a holdfast.Run, by the present process
        self.process: ScriptProcess | None = None
        self.longest_silence = 0.0

    def run_once(
        self,
        receive: Receive,
        tick: Callable[[float], None] = lambda _: None,
        undisturbed: ScriptRun | None = None,
    ) -> int:
        """Start the script and wait for its end; its exit status, negative for a signal.

        `undisturbed` shows what there is to resume from, and how long the script may be silent.
        """
        is_first, self.starts = self.starts == 0, self.starts + 1
        self._listener.drop_all()
        self._has_opened = False
        self.file_log.begin_attempt()
        words, limit = self._request.command, math.inf
        if undisturbed is not None:
            limit = max(_LEAST_SILENCE_SECONDS, 20 * undisturbed.longest_silence)
            resume = self._request.resume_command
            if not is_first and resume and self._has_saved(undisturbed.file_log):
                words = resume
        substitutes = {"{dir}": str(self.folder / "dir")}
        if self._request.ranks is not None:
            substitutes["{ranks}"] = str(self._request.ranks)
        command = place_command(words, self._request.folder, self.work, substitutes)
        leader = self._start(command, self.work, self._environment(), self.output)
        process = self.process = ScriptProcess(leader, self._listener)
        last = time.monotonic()
        try:
            while (status := process.leader.poll()) is None:
                for client, event in process.receive(_POLL_SECONDS):
                    now = time.monotonic()
                    self.longest_silence = max(self.longest_silence, now - last)
                    last = now
                    self._receive(client, event, receive)
                now = time.monotonic()
                tick(now)
                if now - last > limit:
                    raise Hung
            self._receive_from_orphans(process, receive)
            # What was sent before the end; perhaps by a process that outlives the script, such as
            # a worker. The first answer may be that one has connected.
            while events := [*self._listener.receive(0.0)] or [*self._listener.receive(0.05)]:
                for client, event in events:
                    self._receive(client, event, receive)
        finally:
            process.end()
        return status

    def _has_saved(self, known: FileLog) -> bool:
        """Whether it has saved a file like one of these, also a torn one."""
        if known.saved:
            # Numbers in the names may differ.
            names, wanted = (
                {_DIGITS.sub("0", name) for name in each}
                for each in (self.file_log.torn.union(self.file_log.saved), known.saved)
            )
            return not names.isdisjoint(wanted)
        # It saves in a way that is not observed: any new file may be a checkpoint.
        places = (self.work, self.folder / "dir", self.folder / "runs")
        files = {path for place in places for path in place.rglob("*") if path.is_file()}
        return any("__pycache__" not in path.parts for path in files - self._given)

    @property
    def output(self) -> Path:
        return self.folder / f"output-{self.starts}.txt"

    def last_lines(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return "\n".join([line for line in lines if line.strip()][-_LAST_LINES:])

    def _receive(self, client: Client, event: Event, receive: Receive) -> None:
        if event["event"] == "run":
            self._has_opened = True
            self.runs[event["name"]] = event["folder"]
        answer = receive(client, event)
        if "ask" in event:
            client.answer(event["ask"], answer or {})

    def _receive_from_orphans(self, process: ScriptProcess, receive: Receive) -> None:
        """Ranks may outlive their launcher; those of a holdfast.Run save and leave."""
        last = time.monotonic()
        while self._has_opened and process.outlives_its_leader():
            for client, event in process.receive(_ORPHAN_POLL_SECONDS):
                last = time.monotonic()
                self._receive(client, event, receive)
            if time.monotonic() - last > _ORPHAN_SECONDS:
                raise Hung

    def _environment(self) -> dict[str, str]:
        prove_config = ProveConfig(
            socket=str(self._listener.path),
            work=str(self.work.resolve()),
            runs=str(self.folder / "runs"),
            end=str(self.end),
        )
        environment = child_environment()
        paths = [str(_INJECT), *filter(None, [environment.get("PYTHONPATH")])]
        if not any((Path(entry) / "holdfast").is_dir() for entry in sys.path if "site-" in entry):
            paths.append(str(_PACKAGES))  # run from a checkout, by a path on sys.path
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        # Another one for each start, as without a proof, but one that can be repeated.
        environment.setdefault("PYTHONHASHSEED", str(self._hash_seed + self.starts))
        environment[_ERRAND] = prove_config.to_text()
        return environment


class UndisturbedRun:
    """The script without interruptions, and what was recorded of each of its ranks."""

    def __init__(self, script: ScriptRun) -> None:
        self.script = script
        self.histories: dict[int, RankHistory] = {}
        self.start_seconds = 0.0
        self.step_seconds = 0.02
        self.phases = 0

    def run(self, on_step: Callable[[int], None]) -> int:
        began = time.monotonic()
        times: dict[str, list[float]] = {"sight": [], "boundary": []}

        def receive(client: Client, event: Event) -> None:
            now = time.monotonic()
            kind = event["event"]
            history = self.histories.get(client.rank)
            if kind in ("sight", "boundary") and history is None:
                history = self.histories[client.rank] = RankHistory()
                self.start_seconds = self.start_seconds or now - began
            if history is not None and client.trains:
                history.record(event)
            if client.rank == 0:
                if kind in times:
                    times[kind].append(now)
                on_step(self.steps)
                self.phases += kind == "phase"
                self.script.file_log.record(event, self.steps)

        status = self.script.run_once(receive)
        steps = times["sight"] or times["boundary"]
        if len(steps) > 1:
            gaps = (after - before for before, after in itertools.pairwise(steps))
            self.step_seconds = statistics.median_high(gaps)
        return status

    def history(self, rank: int = 0) -> RankHistory:
        return self.histories.get(rank, RankHistory())

    @property
    def steps(self) -> int:
        """Updates of the first rank, or boundaries of runs where no update was observed."""
        return len(self.history().updates) or len(self.history().boundaries)

    @property
    def run_steps(self) -> int:
        """Steps of the run: an optimizer may step twice in one, and an epoch's end is none."""
        return sum(map(completes_step, self.history().boundaries)) or self.steps

    def moments(self) -> list[str]:
        """The moments at which it can be interrupted."""
        updates, saves = self.history().updates, self.script.file_log.save_places
        boundaries = self.history().boundaries
        found = [("start", "step"), ("update", "gradient") * bool(updates)]
        found += [("save", "load") * bool(saves), ("boundary", "commit") * bool(boundaries)]
        return [moment for pair in found for moment in pair] + ["phase"] * bool(self.phases)
