"""The messages of a keeper, with its trainer and with other keepers, and its configuration.

A message is a JSON object with a `kind` and the fields of its class. A kind means one class in each
direction. Optional fields are absent unless they are given.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, dataclass_transform

from holdfast._store.commit.write import Policy
from holdfast._store.folder.layout import RunLayout

# Nothing is received for so long, on a connection or by mail: the host is gone. A network that
# recovers needs half of it, and mail may arrive late; torch's collectives wait for ten minutes.
UNREACHABLE_SECONDS = 60.0

Key = list[int]  # attempt and mark of a boundary


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """For a type checker its subclasses are frozen dataclasses.

    At run time they are not: to generate the code of sixty dataclasses would cost the keeper's
    start 30 ms.
    """

    def __init__(self, **given: Any) -> None:
        cls = type(self)
        missing = [name for name in cls.__annotations__ if name not in given]
        if missing := [name for name in missing if not hasattr(cls, name)]:
            raise TypeError(f"{cls.__name__} without {missing}")
        self.__dict__.update(given)

    def values(self) -> dict[str, Any]:
        """The fields that are given."""
        return dict(self.__dict__)


class Message(Record):
    """One kind of message, in one direction or two."""

    kind: ClassVar[str]
    _kinds: ClassVar[dict[str, type[Message]]]

    def __init_subclass__(cls, kind: str = "") -> None:
        if not kind:
            cls._kinds = {}
            return
        cls.kind = kind
        for direction in cls.__bases__:
            direction._kinds[kind] = cls  # type: ignore[attr-defined]  # a direction

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self | None:
        """The message of this direction; None if its kind is unknown."""
        found = cls._kinds.get(data.get("kind", ""))
        if found is None:
            return None
        message = found.__new__(found)
        message.__dict__.update(data)
        del message.__dict__["kind"]
        return message  # type: ignore[return-value]  # registered as a subclass


class FromTrainer(Message):
    """Trainer to keeper."""


class ToTrainer(Message):
    """Keeper to trainer."""


class ToHub(Message):
    """A rank's keeper to the hub."""


class FromHub(Message):
    """The hub to a rank's keeper."""


# -- Trainer to keeper -----------------------------------------------------------------------------


class ArenaOpened(FromTrainer, kind="arena"):  # with its descriptor
    path: str | None = None


class SnapshotTaken(FromTrainer, kind="snapshot"):
    generation: int
    sequence: int


class PersistOrder(FromTrainer, kind="persist"):
    order: int
    generation: int
    sequence: int
    reason: str
    last: bool  # only the newest state counts now


class WrittenByTrainer(FromTrainer, kind="wrote"):
    step: int
    sequence: int  # the snapshots up to this one are older


class LastSnapshotAhead(FromTrainer, kind="last"):
    pass


class SettleStop(FromTrainer, kind="settle"):
    reason: str
    status: int
    signal: int
    step: int | None


class SalvageOrder(FromTrainer, kind="salvage"):  # with its descriptor
    path: str
    sequence: int


class PhaseChanged(FromTrainer, kind="phase"):
    name: str | None


class MetricsLogged(FromTrainer, kind="metrics"):
    m: dict[str, list[Any]]


class TrainerLeaves(FromTrainer, kind="leaving"):
    status: int
    seconds: float


class Goodbye(FromTrainer, kind="goodbye"):
    pass


class TrainerFarewell(FromTrainer, kind="farewell"):
    clean: bool
    status: int
    reason: str
    error: str | None = None
    agreed: bool = False


# -- Trainer to keeper, which passes it on to the hub ----------------------------------------------


class StepsInvalid(FromTrainer, ToHub, kind="void"):
    step: int
    reason: str


class RequestForAll(FromTrainer, ToHub, kind="wish"):
    wish: dict[str, Any]  # the fields of `ranks.state.RankRequest`
    mark: int | None = None
    now: bool = False


class SnapshotDue(FromTrainer, ToHub, kind="due"):
    mark: int
    reason: str | None = None


class SnapshotMissed(FromTrainer, ToHub, kind="missed"):
    mark: int
    why: str = "no slot was free"
    at: int = 0
    is_past: bool = False


class CollectiveWaits(FromTrainer, ToHub, kind="waits"):
    waited: float
    step_seconds: float


class BatchPrint(FromTrainer, ToHub, kind="print"):
    print: str


class LoopFinished(FromTrainer, ToHub, kind="lap"):
    epoch: int
    number: int
    batches: int


# -- Keeper to trainer -----------------------------------------------------------------------------


class SignalNoted(ToTrainer, kind="noted"):
    signal: int
    grace: float | None
    rests: bool
    needed: float | None


class RequestMade(ToTrainer, kind="request"):
    request: str
    details: dict[str, Any] | None = None
    reason: str | None = None


class TimeShort(ToTrainer, kind="ending"):
    reason: str
    status: int
    seconds: float


class ShortWarning(ToTrainer, kind="short-warning"):
    warning: float
    needed: float


class MirrorReport(ToTrainer, kind="mirror"):
    text: str


class WriteWaits(ToTrainer, kind="waits"):
    order: int


class WriteDurable(ToTrainer, kind="durable"):
    order: int | None
    step: int
    sequence: int = 0  # of one process
    seconds: float = 0.0
    mark: int = 0  # of several ranks


class WriteDropped(ToTrainer, kind="dropped"):
    order: int | None
    step: int
    error: str | None


class WriteFailed(ToTrainer, kind="failed"):
    order: int | None
    error: str | None
    step: int | None = None
    mark: int = 0


class WriteFenced(ToTrainer, kind="fenced"):
    order: int | None
    step: int | None
    error: str | None
    mark: int = 0


class StopSettled(ToTrainer, kind="settled"):
    reason: str
    status: int


class JobRequeued(ToTrainer, kind="requeued"):
    said: str
    status: int


class HubPort(ToTrainer, kind="port"):
    port: int | None


class HubJoined(ToTrainer, kind="joined"):
    pass


class DecisionForTrainer(ToTrainer, kind="decide"):
    """What all ranks do at the first boundary from a mark on."""

    mark: int
    round: int
    what: str  # "stop" or "save"
    reason: str
    status: int = 0
    signal: int = 0
    grace: float | None = None
    rank: int = 0


class TrainerBye(ToTrainer, kind="bye"):
    step: int | None
    reason: str | None
    said: str = ""
    status: int = 0


class HangFound(ToTrainer, kind="hang"):
    folder: str
    policy: str
    stood: float
    cause: str
    sentence: str


class HangOver(ToTrainer, kind="hang-over"):
    folder: str


class TrainerPaused(ToTrainer, kind="paused"):
    folder: str
    by: str
    rank: int
    of: int
    is_deaf: bool


# -- The hub to a keeper, which passes it on to its trainer ----------------------------------------


class NoticeReport(ToTrainer, FromHub, kind="notice"):
    cloud: str
    what: str
    reason: str
    acts: str
    seconds: float | None
    at: float | None
    lead: float


class MemoryReport(ToTrainer, FromHub, kind="memory"):
    quiet: bool = False
    of_rank: int = 0
    host: str = ""
    step: int | None = None
    what: str = ""
    seconds: float = 0.0
    bytes_per_second: int = 0
    used: int = 0
    limit: int = 0


class LeaveOrder(ToTrainer, FromHub, kind="leave"):
    status: int
    reason: str
    step: int | None
    asked: bool = True
    speaks: bool = False
    said: str = ""


class InvalidByRank(ToTrainer, FromHub, kind="void"):
    step: int
    reason: str
    rank: int


class UnevenBatches(ToTrainer, FromHub, kind="uneven"):
    epoch: int
    batches: list[tuple[int, int]]


class SameBatches(ToTrainer, FromHub, kind="twins"):
    ranks: list[int]


# -- A rank's keeper to the hub --------------------------------------------------------------------


class RankHello(ToHub, kind="hello"):
    held: list[tuple[int, int]]
    who: dict[str, Any] = {}  # noqa: RUF012  never changed


class RankHolds(ToHub, kind="held"):
    held: list[tuple[int, int]]


class RankAt(ToHub, kind="at"):
    round: int
    mark: int


class CommitOrder(ToHub, kind="order"):
    key: Key
    reason: str
    last: bool = False


class PartWritten(ToHub, kind="written"):
    key: Key
    number: int | None
    error: str | None = None
    dropped: bool = False
    file: dict[str, Any] | None = None


class RankBeat(ToHub, kind="beat"):
    beat: dict[str, Any]


class MemoryDanger(ToHub, kind="danger"):
    mark: int
    first: bool
    host: str
    figures: dict[str, Any]


class MachineNotice(ToHub, kind="notice"):
    host: str
    mark: int
    told: dict[str, Any]


class RankDied(ToHub, kind="died"):
    how: str
    step: int
    host: str = ""


class RankFarewell(ToHub, kind="farewell"):
    clean: bool
    reason: str
    status: int
    agreed: bool
    victim: bool = False
    host: str = ""


class LauncherGone(ToHub, kind="launcher"):
    reason: str


class RankStuck(ToHub, kind="stuck"):
    stretch: str = ""
    stood: float = 0.0
    patience: float | None = None
    how: str = ""
    paused: str = ""


class RankGoing(ToHub, kind="going"):
    moved: bool = False


class LookResult(ToHub, kind="looked"):
    round: int
    look: dict[str, Any]


class LookProgress(ToHub, kind="looking"):
    round: int


# -- The hub to a rank's keeper --------------------------------------------------------------------


class HoldOrder(FromHub, kind="hold"):
    round: int


class DecisionForRank(FromHub, kind="decide"):
    round: int
    mark: int
    wish: dict[str, Any]


class SnapshotPlan(FromHub, kind="plan"):
    mark: int


class CommonSnapshot(FromHub, kind="common"):
    key: Key


class WritePart(FromHub, kind="write"):
    key: Key
    partial: str
    number: int
    reason: str
    last: bool


class CommitDropped(FromHub, kind="dropped"):
    key: Key


class CommitDurable(FromHub, kind="durable"):
    key: Key


class CommitFailed(FromHub, kind="failed"):
    key: Key
    error: str
    fenced: bool


class RankBye(FromHub, kind="bye"):
    step: int | None
    status: int = 0
    reason: str | None = None
    asked: bool = True
    speaks: bool = False
    said: str = ""


class LookOrder(FromHub, kind="look"):
    round: int


class RestartClock(FromHub, kind="restart-clock"):
    pass


class GuardOrder(FromHub, kind="guard"):
    by: str
    is_seen: bool = True


# -- The configuration of a keeper -----------------------------------------------------------------


class RankConfig(Record):
    """What the keeper of one rank must know of the others."""

    hub: list[tuple[str, int]]  # addresses; of the hub itself none
    is_one_host: bool
    launcher: dict[str, Any] | None  # the process that started the ranks
    launcher_name: str
    restarts: bool  # True if the launcher would start them again
    unreachable_seconds: float = UNREACHABLE_SECONDS  # after which a silent rank counts as lost


class KeeperConfig(Record):
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
    stacks: int | None
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


def send(link: socket.socket, kind: str, **fields: Any) -> None:
    """Send one message; it is lost if the other end is closed."""
    with contextlib.suppress(OSError):
        link.send(encode(kind, **fields))


def encode(kind: str, **fields: Any) -> bytes:
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
