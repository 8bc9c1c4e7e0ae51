"""The messages of a keeper, with its trainer and with other keepers, and its configuration.

A message is a call: its kind names a method, and its fields are the arguments. `ToTrainer`, `ToHub`
and `FromHub` list what may be called; `sender` makes such an object for one receiver. At the other
end `receive_call` calls the method `on_…` of that name. On the way it is a JSON object with `kind`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast._store.commit.write import Policy
from holdfast._store.folder.layout import RunLayout

# Nothing is received for so long, on a connection or by mail: the host is gone. A network that
# recovers needs half of it, and mail may arrive late; torch's collectives wait for ten minutes.
UNREACHABLE_SECONDS = 60.0

Key = tuple[int, int]  # attempt and mark of a boundary


class _Sender:
    def __init__(self, post: Callable[..., object]) -> None:
        self._post = post

    def __getattr__(self, name: str) -> Callable[..., object]:
        return functools.partial(self._post, name.replace("_", "-"))


def sender(post: Callable[..., object]) -> Any:
    """An object whose method calls are messages: `sender(post).hold(round=3)` calls
    `post("hold", round=3)`."""
    return _Sender(post)


def receive_call(receiver: object, kind: str, /, *arguments: Any, **fields: Any) -> bool:
    """Call the method that a message names; False if the receiver has none for it."""
    act = getattr(receiver, f"on_{kind.replace('-', '_')}", None)
    if "key" in fields:
        fields["key"] = tuple(fields["key"])  # which JSON does not have
    if act is not None:
        act(*arguments, **fields)
    return act is not None


class ToTrainer(Protocol):
    """Keeper to trainer. `_run` reads these by their kind: see `_run/keeper_events.py`."""

    # stops
    def noted(
        self, *, signal: int, grace: float | None, rests: bool, needed: float | None
    ) -> None: ...
    def request(
        self, *, request: str, details: dict[str, Any] | None = ..., reason: str = ...
    ) -> None: ...
    def ending(self, *, reason: str, status: int, seconds: float) -> None: ...
    def settled(self, *, reason: str, status: int) -> None: ...
    def requeued(self, *, said: str, status: int) -> None: ...
    def leave(
        self,
        *,
        status: int,
        reason: str,
        step: int | None,  # the newest durable one
        asked: bool = ...,
        speaks: bool = ...,  # it prints the end for all ranks
        said: str = ...,
    ) -> None: ...

    # checkpoints; `order` is the trainer's own number for one
    def waits(self, *, order: int | None) -> None: ...
    def durable(
        self,
        *,
        order: int | None,
        step: int,
        sequence: int = ...,  # of one process
        seconds: float = ...,
        mark: int = ...,  # of several ranks
    ) -> None: ...
    def dropped(self, *, order: int | None, step: int, error: str | None) -> None: ...
    def failed(
        self, *, order: int | None, error: str | None, step: int | None = ..., mark: int = ...
    ) -> None: ...
    def fenced(
        self, *, order: int | None, step: int | None, error: str | None, mark: int = ...
    ) -> None: ...
    def void(self, *, step: int, reason: str, rank: int) -> None: ...

    # several ranks
    def port(self, *, port: int | None) -> None: ...
    def joined(self) -> None: ...
    def decide(self, **decision: Any) -> None: ...  # a DecisionForTrainer
    def bye(self, *, step: int | None, reason: str | None, **requeued: Any) -> None: ...
    def uneven(self, *, epoch: int, batches: list[tuple[int, int]]) -> None: ...
    def twins(self, *, ranks: list[int]) -> None: ...

    # what is only printed
    def mirror(self, *, text: str) -> None: ...
    def short_warning(self, *, warning: float, needed: float) -> None: ...
    def notice(self, **notice: Any) -> None: ...  # a NoticeReport
    def memory(self, **report: Any) -> None: ...  # figures of an `Alarm`, step, of_rank, host
    def hang(self, *, folder: str, policy: str, stood: float, **found: Any) -> None: ...
    def hang_over(self, *, folder: str) -> None: ...
    def paused(self, *, folder: str, by: str, rank: int, of: int, is_deaf: bool) -> None: ...


class ToHub(Protocol):
    """A rank's keeper to the hub."""

    # as the trainer sends it to its keeper
    def void(self, *, step: int, reason: str) -> None: ...
    def wish(self, *, wish: dict[str, Any], mark: int | None = ..., now: bool = ...) -> None: ...
    def due(self, *, mark: int, reason: str | None = ...) -> None: ...
    def waits(self, *, waited: float, step_seconds: float) -> None: ...
    def print(self, *, print: str) -> None: ...
    def lap(self, *, epoch: int, number: int, batches: int) -> None: ...

    # the rank and its snapshots
    def hello(self, *, held: list[Key], who: dict[str, Any]) -> None: ...
    def held(self, *, held: list[Key]) -> None: ...
    def missed(self, *, mark: int, why: str, at: int, is_past: bool) -> None: ...
    def at(self, *, round: int, mark: int) -> None: ...
    def order(self, *, key: Key, reason: str, last: bool = ...) -> None: ...
    def written(
        self,
        *,
        key: Key,
        number: int | None,
        error: str | None = ...,
        dropped: bool = ...,
        file: dict[str, Any] | None = ...,
    ) -> None: ...
    def beat(self, *, beat: dict[str, Any]) -> None: ...

    # what may end the run
    def danger(self, *, mark: int, first: bool, host: str, figures: dict[str, Any]) -> None: ...
    def notice(self, *, host: str, mark: int, told: dict[str, Any]) -> None: ...
    def died(self, *, how: str, step: int, host: str) -> None: ...
    def farewell(
        self, *, clean: bool, reason: str, status: int, agreed: bool, victim: bool, host: str
    ) -> None: ...
    def launcher(self, *, reason: str) -> None: ...

    # hangs, for the judge
    def stuck(
        self, *, stretch: str, stood: float, patience: float | None, how: str, paused: str
    ) -> None: ...
    def going(self, *, moved: bool) -> None: ...
    def looked(self, *, round: int, look: dict[str, Any]) -> None: ...
    def looking(self, *, round: int) -> None: ...


class FromHub(Protocol):
    """The hub to a rank's keeper; what that does not know, it passes on to its trainer."""

    def hold(self, *, round: int) -> None: ...
    def decide(self, *, round: int, mark: int, wish: dict[str, Any]) -> None: ...
    def plan(self, *, mark: int) -> None: ...
    def common(self, *, key: Key) -> None: ...
    def write(self, *, key: Key, partial: str, number: int, reason: str, last: bool) -> None: ...
    def dropped(self, *, key: Key) -> None: ...
    def durable(self, *, key: Key) -> None: ...
    def failed(self, *, key: Key, error: str, fenced: bool) -> None: ...
    def void(self, *, step: int, reason: str, rank: int) -> None: ...
    def leave(self, *, status: int, reason: str, step: int | None, **how: Any) -> None: ...
    def bye(self, *, step: int | None, **how: Any) -> None: ...

    # hangs
    def look(self, *, round: int) -> None: ...
    def restart_clock(self) -> None: ...
    def guard(self, *, by: str, is_seen: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DecisionForTrainer:
    """What all ranks do at the first boundary from a mark on."""

    mark: int
    round: int
    what: str  # "stop" or "save"
    reason: str
    status: int = 0
    signal: int = 0
    grace: float | None = None
    rank: int = 0


# -- The configuration of a keeper -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What the keeper of one rank must know of the others."""

    hub: list[tuple[str, int]]  # addresses; of the hub itself none
    is_one_host: bool
    launcher: dict[str, Any] | None  # the process that started the ranks
    launcher_name: str
    restarts: bool  # True if the launcher would start them again
    unreachable_seconds: float = UNREACHABLE_SECONDS  # after which a silent rank counts as lost


@dataclass(frozen=True, kw_only=True)
class KeeperConfig:
    """What a keeper is started with: JSON on its command line."""

    policy: Policy
    grace_seconds: float | None
    numbers: list[int]  # of the signals that ask for a stop
    trainer_pid: int
    counters: dict[str, Any] | None  # of OOM kills, when it was started
    job: dict[str, Any] | None  # of SLURM
    ranks: dict[str, Any] | None  # a RankConfig, where there are several
    # Descriptors that it inherits.
    link: int
    signals: int
    control: int
    stacks: int | None  # the file that the trainer writes its stacks into when asked
    pidfd: int | None

    def descriptors(self) -> list[int]:
        found = (self.link, self.signals, self.control, self.stacks, self.pidfd)
        return [each for each in found if each is not None]

    def to_json(self) -> dict[str, Any]:
        policy = {**vars(self.policy), "layout": str(self.policy.layout.folder)}
        return {**vars(self), "policy": policy}

    @staticmethod
    def from_json(data: dict[str, Any]) -> KeeperConfig:
        policy = dict(data["policy"])
        policy["layout"] = RunLayout(Path(policy["layout"]))
        policy["line"] = {int(attempt): step for attempt, step in policy["line"].items()}
        policy["best"] = None if policy["best"] is None else tuple(policy["best"])
        return KeeperConfig(**{**data, "policy": Policy(**policy)})


# -- The transport between trainer and keeper: JSON datagrams, with descriptors where needed -------


_MOST_BYTES = 1 << 16


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connection that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, kind: str, /, **fields: Any) -> None:
    """Send one message; it is lost if the other end is closed."""
    with contextlib.suppress(OSError):
        link.send(encode(kind, **fields))


def encode(kind: str, /, **fields: Any) -> bytes:
    data = json.dumps({"kind": kind, **fields}).encode()
    assert len(data) <= _MOST_BYTES
    return data


class Outbox:
    """Messages to a process that may read slowly: they wait here, the sender never blocks."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def post(
        self, kind: str, descriptors: Sequence[int] = (), *, may_drop: bool = False, **fields: Any
    ) -> bool:
        """Send or queue a message. One that `may_drop` is dropped while others wait: False then."""
        with self._lock:
            if may_drop and self._waiting:
                return False
            # Duplicates: the sender may close its own before they are sent.
            self._waiting.append((encode(kind, **fields), [os.dup(d) for d in descriptors]))
        self.flush()
        return True

    def flush(self) -> None:
        """Send what is queued, as far as the socket accepts it."""
        with self._lock:
            while self._waiting:
                data, descriptors = self._waiting[0]
                try:
                    socket.send_fds(self._link, [data], descriptors, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:
                    pass  # the other end is closed
                self._waiting.popleft()
                for descriptor in descriptors:
                    os.close(descriptor)


def receive(link: socket.socket, *, waits: bool = True) -> tuple[dict[str, Any], list[int]] | None:
    """The next message with its descriptors; None at the end.

    BlockingIOError if there is none now and it is not to wait.
    """
    flags = 0 if waits else socket.MSG_DONTWAIT
    try:
        # Not `socket.recv_fds`: it ignores its flags.
        data, ancillary, _, _ = link.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * 4), flags)
    except BlockingIOError:
        raise
    except OSError:
        return None
    if not data:
        return None
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return json.loads(data), descriptors.tolist()
