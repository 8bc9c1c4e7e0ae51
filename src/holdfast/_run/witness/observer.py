"""The connection of a training process to the prover: events out, answers in.

An answer may take long: the prover sends its signal to a process that waits for one. A signal
may also interrupt a message, and its handler may send another one. So signals are blocked while a
message is sent, and not while an answer is awaited.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._run.ranks.world import find_world
from holdfast._run.witness.fingerprint import Leaf, digest_of, leaf_of, walk, whole_leaf
from holdfast._state.capture import capture, capture_generators
from holdfast._store.folder.errand import Errand, current

_MOST_CALLS = 64  # of one update


class ProverChannel:
    """Lines of JSON through a socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self._reading = threading.RLock()  # a handler may ask while its own thread waits
        self._unread = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            with _signals_blocked(), self._sending:
                self._socket.sendall(data)
        except OSError:
            os._exit(1)  # the prover is gone

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its answer; other threads may wait for theirs."""
        number = next(self._numbers)
        self.send(message | {"ask": number})
        with self._reading:
            while number not in self._answers:
                self._receive()
            return self._answers.pop(number)

    def _receive(self) -> None:
        try:
            received = self._socket.recv(65536)
        except OSError:
            received = b""
        if not received:
            os._exit(1)  # the prover is gone
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            answer: dict[str, Any] = json.loads(line)
            self._answers[answer["ask"]] = answer


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    former = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class Observer:
    """Sends the events of one process. Closed in a child, unless that trains as a rank."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        #: The open holdfast.Run and its step.
        self.boundary_id: tuple[str, int] | None = None
        #: The run sends its batches, so the loader need not.
        self.run_sends_batches = False
        #: Updates come from another framework than torch.
        self.other_framework_trains = False
        self._inputs: dict[str, Leaf] = {}  # of models, since the last update
        self._calls = 0
        self.rank = variables.whole_number("RANK")
        self._pid = os.getpid()
        self._is_rank = False  # a child that is one of several that train
        self._channel: ProverChannel | None = None
        self._armed: str | None = None

    @property
    def is_open(self) -> bool:
        """False in a process that the training process started."""
        is_child = multiprocessing.parent_process() is not None
        return os.getpid() == self._pid and (self._is_rank or not is_child)

    def open_for(self, rank: int) -> None:
        """Open in a child that trains as one of several ranks, as with mp.spawn."""
        self.rank = rank
        if not self.is_open:
            self._is_rank, self._pid, self._channel = True, os.getpid(), None

    def send(self, event: str, **fields: Any) -> None:
        if self.is_open:
            self._connected().send({"event": event, **fields})

    def ask(self, event: str, **fields: Any) -> dict[str, Any]:
        """Send, and wait for the answer; the prover may interrupt the process meanwhile."""
        if not self.is_open:
            return {}
        answer = self._connected().ask({"event": event, **fields})
        self._armed = answer.get("arm", self._armed)
        return answer

    def reach(self, moment: str) -> None:
        """Wait at this moment if the prover has armed it."""
        if self.is_armed(moment):
            self._armed = None
            self.ask("here", moment=moment)

    def is_armed(self, moment: str) -> bool:
        return self._armed == moment and self.is_open

    def record_inputs(self, values: Mapping[str, Any]) -> None:
        """Record the inputs of a model, by their names in the script."""
        if self._calls < _MOST_CALLS:
            for path, value in walk(values):
                if hasattr(value, "dtype"):
                    self._inputs[f"input/{self._calls}/{path}"] = leaf_of(value)
        self._calls += 1

    def take_inputs(self) -> dict[str, Leaf]:
        found, self._inputs, self._calls = self._inputs, {}, 0
        return found

    def _connected(self) -> ProverChannel:
        if self._channel is None:
            self._channel = ProverChannel(self.errand.socket)
            self._channel.send({"event": "hello", "pid": self._pid, "rank": self.rank})
        return self._channel


_observer: Observer | None = None


def find_observer() -> Observer | None:
    """The observer of this process, which may be closed; None without a proof."""
    global _observer
    errand = current()
    if _observer is None and errand is not None:
        _observer = Observer(errand)
    return _observer


class RunObserver:
    """Sends each boundary of an open holdfast.Run with all of its state, each batch, each phase."""

    def __init__(self, observer: Observer, folder: Path, step: int) -> None:
        self._observer = observer
        self._name = _name_of(folder, observer.errand)
        self._batches: list[str] = []
        observer.boundary_id = (self._name, step)
        observer.send("run", name=self._name, folder=str(folder.absolute()), step=step)

    def boundary(
        self,
        step: int,
        *,
        at_turn: bool,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any],
        position: Mapping[str, Any] | None,
    ) -> bool:
        """Send a boundary; True if the prover wants a checkpoint there."""
        self._observer.boundary_id = (self._name, step)
        items = state_items(state)
        for name, value in metrics.items():
            items[f"metric/{name}"] = leaf_of(value)
        for name, value in capture_generators().items():
            items[f"generator/{name}"] = whole_leaf(value)
        if position is not None:
            items["position"] = leaf_of([position[key] for key in ("epoch", "lap", "batches")])
        items |= self._observer.take_inputs()
        items["batches"] = whole_leaf(self._batches)
        self._batches = []
        key = f"{self._name}@{step}{'-turn' if at_turn else ''}"
        answer = self._observer.ask("boundary", key=key, step=step, items=items)
        return bool(answer.get("save"))

    def batch(self, number: int, batch: Any) -> None:
        self._observer.run_sends_batches = True
        self._batches.append(f"{number}:{digest_of(batch)}")

    def phase(self, name: str) -> None:
        self._observer.ask("phase", name=name)

    def close(self) -> None:
        self._observer.boundary_id = None
        self._observer.run_sends_batches = False


def open_run_observer(folder: Path, step: int) -> RunObserver | None:
    """The observer of a run that was opened; None without a proof."""
    observer, world = find_observer(), find_world()
    if observer is not None and not world.is_alone:
        observer.open_for(world.rank)
    if observer is None or not observer.is_open:
        return None
    return RunObserver(observer, folder, step)


def state_items(state: Mapping[str, Any]) -> dict[str, Leaf]:
    """Every tensor and every number of a run's state."""
    captured = capture(state)
    items = {
        f"state/{spec.name}": leaf_of(value)
        for spec, value in zip(captured.specs, captured.values, strict=True)
    }
    for path, value in walk(captured.tree["state"]):
        if not path.endswith("$t"):
            items[f"state/{path.replace('$state.', '')}"] = leaf_of(value)
    return items


def _name_of(folder: Path, errand: Errand) -> str:
    """The run's name, which is the same in every copy of the user's folder."""
    whole = folder.resolve()
    for base in (Path(errand.work).resolve(), Path(errand.end).resolve().parent):
        if whole.is_relative_to(base):
            return str(whole.relative_to(base))
    return whole.name
