"""The connection of a training process to the prover: events out, answers in.

An answer may take long: the prover sends its signal to a process that waits for one. A signal
may also interrupt a message, and its handler may send another one. So signals are blocked while a
message is sent, and not while an answer is awaited.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import array_adapter
from holdfast._environment import variables
from holdfast._run.ranks.world import find_world
from holdfast._state.capture import capture, capture_generators
from holdfast._store.folder.prove_config import ProveConfig, current
from holdfast._store.format.checksum import digest

_MOST_CALLS = 64  # of one update
_MOST_NAMED = 64  # items of a list that are compared one by one


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

    def __init__(self, prove_config: ProveConfig) -> None:
        self.prove_config = prove_config
        self.boundary_id: str | None = None  # the open holdfast.Run and its step
        self.run_sends_batches = False  # so the loader need not
        self.other_framework_trains = False  # than torch
        self.rank = variables.whole_number("RANK")
        self._inputs: dict[str, Leaf] = {}  # of models, since the last update
        self._calls = 0
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
            self._channel = ProverChannel(self.prove_config.socket)
            self._channel.send({"event": "hello", "pid": self._pid, "rank": self.rank})
        return self._channel


@functools.cache
def find_observer() -> Observer | None:
    """The observer of this process, which may be closed; None without a proof."""
    prove_config = current()
    return None if prove_config is None else Observer(prove_config)


class RunObserver:
    """Sends each boundary of an open holdfast.Run with all of its state, each batch, each phase."""

    def __init__(self, observer: Observer, folder: Path, step: int) -> None:
        self._observer = observer
        self._name = _name_of(folder, observer.prove_config)
        self._batches: list[str] = []
        observer.boundary_id = f"{self._name}@{step}"
        observer.send("run", name=self._name, folder=str(folder.absolute()), step=step)

    def boundary(
        self,
        step: int,
        *,
        at_epoch_end: bool,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any],
        position: Mapping[str, Any] | None,
    ) -> bool:
        """Send a boundary; True if the prover wants a checkpoint there."""
        observer = self._observer
        observer.boundary_id = f"{self._name}@{step}"
        items = state_items(state)
        items |= {f"metric/{name}": leaf_of(value) for name, value in metrics.items()}
        generators = capture_generators().items()
        items |= {f"generator/{name}": whole_leaf(value) for name, value in generators}
        if position is not None:
            items["position"] = leaf_of([position[key] for key in ("epoch", "lap", "batches")])
        items |= observer.take_inputs()
        items["batches"] = whole_leaf(self._batches)
        self._batches = []
        key = observer.boundary_id + ("-turn" if at_epoch_end else "")
        return bool(observer.ask("boundary", key=key, step=step, items=items).get("save"))

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
    lists = {name: value for name, value in state.items() if isinstance(value, list | tuple)}
    texts = {name: text for name, value in lists.items() if (text := plain_text(value)) is not None}
    captured = capture({name: value for name, value in state.items() if name not in texts})
    items = {f"state/{name}": leaf_of(text) for name, text in texts.items()}
    for spec, value in zip(captured.specs, captured.values, strict=True):
        items[f"state/{spec.name}"] = leaf_of(value)
    for path, value in walk(captured.tree["state"]):
        if not path.endswith("$t"):
            items[f"state/{path.replace('$state.', '')}"] = leaf_of(value)
    return items


def _name_of(folder: Path, prove_config: ProveConfig) -> str:
    """The run's name, which is the same in every copy of the user's folder."""
    whole = folder.resolve()
    for base in (Path(prove_config.work).resolve(), Path(prove_config.end).resolve().parent):
        if whole.is_relative_to(base):
            return str(whole.relative_to(base))
    return whole.name


# -- Fingerprints of values: equal for equal bits, with a number for how far two are apart ---------


#: A hash, or the text of a short value; a norm, or the value itself; the count of numbers.
Leaf = tuple[str, float | None, int]


def leaf_of(value: Any) -> Leaf:
    """The fingerprint of a tensor, an array, a number or a text; of another object, its type.

    The repr of an object may hold its address, and that of a set has no fixed order.
    """
    if isinstance(value, bool) or value is None:
        return repr(value), None, 1
    if isinstance(value, int | float):  # NumPy's float is one too, and equal to Python's
        number = float(value) if abs(value) < 1e300 else None
        return repr(int(value) if isinstance(value, int) else float(value)), number, 1
    if (adapter := array_adapter(value)) is not None:
        return _array_leaf(adapter, value)
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
        value = [leaf_of(item)[0] for item in value]
    elif not isinstance(value, str | complex):
        return type(value).__qualname__, None, 1
    text = repr(value)
    return (text if len(text) <= 40 else _hex(text.encode())), None, 1


def _array_leaf(adapter: Adapter, value: Any) -> Leaf:
    # The local part of a sharded tensor: reading all of it would need a collective.
    value = adapter.part_here(value)
    try:
        shape = tuple(getattr(value, "shape", ()))
        described = f"{getattr(value, 'dtype', 'bytes')}{shape}"
        data = bytes(adapter.bytes_of(value))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # lazy, without values
        return type(value).__qualname__, None, 0
    return _hex(described.encode() + data), _norm(value), math.prod(shape)


def _norm(value: Any) -> float | None:
    try:
        if hasattr(value, "detach"):
            flat = value.detach().double()
        else:
            flat = (value.numpy() if hasattr(value, "numpy") else value).astype("float64")
        norm = math.sqrt(float((flat * flat).sum()))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    return norm if math.isfinite(norm) else None


def _hex(data: bytes) -> str:
    return digest(data).hex()[:20]


def digest_of(value: Any) -> str:
    """One hash of a whole tree, such as a batch."""
    return _hex("|".join(f"{path}={leaf_of(leaf)[0]}" for path, leaf in walk(value)).encode())


def whole_leaf(value: Any) -> Leaf:
    """A whole tree as one leaf, without a norm."""
    return digest_of(value), None, 0


def walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The leaves of containers, each with its path."""
    if depth > 12:
        return
    if isinstance(value, Mapping):
        for key in list(value):
            yield from walk(value[key], f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        ordered = value if isinstance(value, list | tuple) else sorted(value, key=repr)
        if (text := plain_text(ordered)) is not None:
            yield path, text
            return
        for index, item in enumerate(ordered):
            yield from walk(item, f"{path}[{index}]", depth + 1)
    elif hasattr(value, "__dict__") and not hasattr(value, "dtype") and not callable(value):
        for key, item in vars(value).items():
            yield from walk(item, f"{path}.{key}" if path else key, depth + 1)
    else:
        yield path, value


def plain_text(items: Sequence[Any]) -> str | None:
    """A long list of plain values as one text; None for a short one, or one with other values.

    A history of losses grows with each step. Thousands of names and hashes for each step would
    take far longer than the training.
    """
    if len(items) <= _MOST_NAMED:
        return None
    try:
        text = json.dumps(items, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    return None if '"$t": ' in text else text  # a tensor of a captured state


# -- A fingerprint of a batch, by which ranks notice that they train on the same one ---------------
# Only the beginning of each array is hashed, and less of one on a device, since the copy waits for
# the device.


_HOST_BYTES = 1 << 20
_DEVICE_BYTES = 1 << 16
_MOST_LEAVES = 2000


def batch_print(batch: Any) -> str | None:
    """Equal for equal batches; None if it could not tell batches apart.

    An array of a single value, such as a mask of ones, is in many batches.
    """
    hasher, is_telling = xxhash.xxh3_64(type(batch).__name__.encode()), False
    for path, leaf in itertools.islice(walk(batch), _MOST_LEAVES):
        hasher.update(f"{path};".encode(errors="replace"))
        adapter = array_adapter(leaf)
        if adapter is None:
            hasher.update(leaf_of(leaf)[0].encode(errors="replace"))
        else:
            is_telling = _add_array(hasher, adapter, leaf) or is_telling
    return hasher.hexdigest() if is_telling else None


def _add_array(hasher: xxhash.xxh3_64, adapter: Adapter, array: Any) -> bool:
    """Hash an array; True if it can tell one batch from another."""
    if callable(getattr(array, "to_local", None)):
        array = array.to_local()  # the shard of this rank
    try:
        spec = adapter.spec("", array)
    except ValueError as error:  # sparse, or of objects: no bytes
        hasher.update(str(error).encode())
        return False
    hasher.update(f"{spec.kind};{spec.dtype};{spec.shape}".encode())
    limit_bytes = _DEVICE_BYTES if spec.device else _HOST_BYTES
    if spec.size_bytes > limit_bytes:
        array = _beginning(array, spec.shape, limit_bytes // spec.item_bytes)
    data = bytes(adapter.bytes_of(array))
    hasher.update(data)
    return data[spec.item_bytes :] != data[: -spec.item_bytes]


def _beginning(array: Any, shape: tuple[int, ...], items: int) -> Any:
    """About so many items of an array, by slices, so that no more is copied."""
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        if inner <= items:
            return array[: max(1, min(size, items // max(1, inner)))]
        array = array[0]
    return array
