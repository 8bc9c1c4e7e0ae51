"""Starts a keeper and talks to it; `keeper_client.py` replaces one that died."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from holdfast._environment import variables
from holdfast._environment.processes.cgroup import MemoryCgroup, read_counters
from holdfast._environment.processes.identity import command
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.slurm.job import Job
from holdfast._keeper import protocol
from holdfast._keeper.protocol import KeeperConfig
from holdfast._run.saving.pulse import never_held, without_debugger
from holdfast._run.signals.handlers import StackDump
from holdfast._store.commit.write import Policy
from holdfast._store.folder.attempts import note_keeper
from holdfast._store.folder.plain_file import open_log
from holdfast._store.memory.control import ControlPage
from holdfast._text import say

_GOODBYE_SECONDS = 600.0
_SEND_SECONDS = 5.0


@dataclass(eq=False)
class KeeperPlan:
    """What a keeper gets; a keeper that replaces another gets the same."""

    policy: Policy
    grace_seconds: float | None
    numbers: Sequence[int]
    ranks: dict[str, Any] | None  # with several ranks
    job: Job | None
    counters: dict[str, Any] | None = None  # of OOM kills, when the first keeper started

    def __post_init__(self) -> None:
        self.control = ControlPage.create()
        self.dump = StackDump()
        # Part of the plan, so that the wakeup descriptor stays the same for all keepers.
        self.signals_read, self.signals_write = os.pipe()
        os.set_blocking(self.signals_read, False)
        os.set_blocking(self.signals_write, False)

    def close(self) -> None:
        self.dump.remove()
        self.control.close()
        os.close(self.signals_read)
        os.close(self.signals_write)


class KeeperLink:
    def __init__(self, plan: KeeperPlan, hear: Callable[[dict[str, Any]], None]) -> None:
        self._hear = hear
        policy = plan.policy
        ours, theirs = protocol.socket_pair()
        pidfd = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else None
        # Read here: the trainer may be killed for memory before the keeper reads them.
        counters = read_counters(MemoryCgroup.find(os.getpid()))
        plan.counters = plan.counters or counters
        config = KeeperConfig(
            policy=policy,
            grace_seconds=plan.grace_seconds,
            numbers=list(plan.numbers),
            trainer_pid=os.getpid(),
            counters=counters,
            job=None if plan.job is None else asdict(plan.job),
            ranks=plan.ranks,
            link=theirs.fileno(),
            signals=plan.signals_read,
            control=plan.control.descriptor,
            stacks=plan.dump.descriptor,
            pidfd=pidfd,
        )
        log_path = policy.layout.keeper_log(policy.attempt, policy.rank)
        with _open_log(log_path) as log, without_debugger():
            self._process = subprocess.Popen(
                command("holdfast._keeper.__main__", config.to_json()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=config.descriptors(),
                env=variables.child_environment(),
            )
        if policy.rank == 0:
            note_keeper(policy.layout, policy.attempt, self._process.pid)
        theirs.close()
        if pidfd is not None:
            os.close(pidfd)
        self._socket: socket.socket = ours
        self._outbox = protocol.Outbox(ours)
        self.send = self._outbox.post
        self.flush = self._outbox.flush
        self.pid = self._process.pid
        plan.dump.admit(self.pid)
        listener = threading.Thread(target=self._listen, name="holdfast-link", daemon=True)
        never_held(listener).start()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def how_it_died(self) -> str:
        status = self._process.returncode
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def say_goodbye(self, *, waits: bool = True) -> None:
        """Wait until it has finished what it writes and is gone; or only until it is told."""
        self.send("goodbye")
        seconds, pause = (_GOODBYE_SECONDS, 0.1) if waits else (_SEND_SECONDS, 0.001)
        deadline = FairDeadline(seconds, lambda: [self.pid])
        while self.is_alive() and not deadline.is_over() and (waits or not self._outbox.is_empty):
            self.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(pause)
        self.close()

    def close(self) -> None:
        # The listening thread sees the end of the connection, and ends too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while (received := protocol.receive(self._socket)) is not None:
            try:
                self._hear(received[0])
            except Exception as error:  # noqa: BLE001  later answers need this thread
                say(f"a message of the keeper could not be handled ({error!r}): {received[0]}")


def _open_log(path: Path) -> IO[bytes]:
    """The keeper's log, or nowhere: a folder that became read-only must not end the training."""
    try:
        return open_log(path)
    except OSError:
        return Path(os.devnull).open("ab")
