"""`holdfast run -- COMMAND`: the first process of a task, thin, and the last to leave.

SLURM kills whatever is left of a task the moment its first process is gone. If that is the
trainer, a kill -9 takes the keeper with it, and the newest state is lost. So this process is
the first one. It starts the trainer, passes signals on, adopts the keeper of a trainer that
was killed, and leaves when the keeper has left: with the trainer's own status.

It holds no state that could be lost, and runs no code of the user. Signals are blocked and
waited for, so none can strike between two lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from holdfast import _env
from holdfast._say import say
from holdfast._slurm.places import is_in_step, rank_environment
from holdfast._slurm.torchrun import starts_torchrun
from holdfast._supervise import family

NOT_EXECUTABLE = 126
NOT_FOUND = 127
_ADOPTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_FROM_THE_KERNEL = 0x80  # SI_KERNEL, as a terminal's keys are
_SAME_SECONDS = 1.0  # SLURM often says the same twice, a moment apart
_LOOK_SECONDS = 0.05
_LOOK_SELDOM_SECONDS = 0.5
_IMPORTS_SECONDS = 120.0  # after which whoever does not catch a signal yet hardly ever will
_TELL_SECONDS = 10.0


def lead(command: Sequence[str]) -> int:
    """Start the command, stay until it and its keepers have ended, return its exit status."""
    if not sys.platform.startswith("linux"):
        return _step_aside(command)
    # Inherited as ignored, it would throw the child's status away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    heard = _heard()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_ADOPTS_ORPHANS, 1, 0, 0, 0)
    environment = _env.whole()
    try:
        child = os.posix_spawnp(
            command[0],
            list(command),
            _for_child(command, environment),
            setsigmask=before,
            # Python ignores the last two. The warning signals stay as they were given: where
            # the job's script has them ignored, a warning that SLURM sends to all processes at
            # once (proctrack/linuxproc) must not kill a trainer that still imports torch; where
            # nobody asked for that, a script without a handler ends by them, as ever. The same
            # for Ctrl-C in the background, and for SIGHUP under nohup.
            setsigdef=[signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ],
        )
    except OSError as error:
        return _explain(command[0], error)
    return Leader(child, heard, in_job=is_in_step(environment)).follow()


def _heard() -> set[signal.Signals]:
    """The signals that are passed on, and the one that tells of an end."""
    heard = {signal.SIGCHLD, signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # Ignored since the start, by a shell for its background or by nohup: it stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            heard.add(number)
    return heard


def _for_child(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    found = {**environment, "HOLDFAST_LEADER": str(os.getpid())}
    if not starts_torchrun(command):  # which numbers its ranks itself
        found.update(rank_environment(environment))
    return found


def _explain(program: str, error: OSError) -> int:
    """Say why it could not be started; the status is what a shell would give."""
    if isinstance(error, FileNotFoundError):
        say(f"{program!r}: there is no such program.\nWrite: holdfast run -- python train.py")
        return NOT_FOUND
    say(
        f"{program!r}: cannot be started ({error.strerror}).\n"
        "If it is a script, name its interpreter: holdfast run -- python train.py"
    )
    return NOT_EXECUTABLE


def _step_aside(command: Sequence[str]) -> int:
    """Where there is no keeper, nobody has to be waited for: the command takes our place."""
    try:
        if sys.platform == "win32":
            import subprocess  # there, exec would return to the shell at once

            return subprocess.call(list(command))
        os.execvp(command[0], list(command))
    except OSError as error:
        return _explain(command[0], error)


class Warnings:
    """The warning signals that have come, until all who should have got them have.

    One that comes while the trainer still imports torch would kill it. So it is given only to
    processes that catch it, and is kept until there are some.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._came: dict[int, float] = {}
        self._given: dict[int, float] = {}  # when the first process got it
        self._reached: dict[int, set[int]] = {}

    def add(self, number: int) -> None:
        """A signal has come. The same once more, later, is a new wish."""
        self._came[number] = time.monotonic()
        self._reached[number] = set()
        self._given.pop(number, None)

    def deliver(self) -> None:
        """Give each to whoever catches it by now and has not got it yet."""
        for number in self._came:
            reached = self._reached[number]
            for pid in family.catchers(self._top, number, reached):
                if self._is_of_a_later_life(number, pid):
                    continue
                reached.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                self._given.setdefault(number, time.monotonic())

    def next_look_seconds(self) -> float | None:
        """None: there is nothing to give."""
        now = time.monotonic()
        if not self._came:
            return None
        if any(now - came < _IMPORTS_SECONDS for came in self._came.values()):
            return _LOOK_SECONDS
        return _LOOK_SELDOM_SECONDS

    def _is_of_a_later_life(self, number: int, pid: int) -> bool:
        # torchrun starts its ranks together, well before the first of them catches anything.
        # One that began after that was started anew, to train: the wish was for those before.
        # (A run of holdfast that was asked to stop leaves again by itself.)
        given = self._given.get(number)
        return given is not None and family.age_seconds(pid) < time.monotonic() - given


class Leader:
    """Follows one child to its end, and its keepers to theirs."""

    def __init__(self, child: int, heard: set[signal.Signals], *, in_job: bool) -> None:
        self._child = child
        self._heard = heard
        self._in_job = in_job
        self._me = os.getpid()
        self._status: int | None = None
        self._passed: dict[int, float] = {}
        self._warnings = Warnings(self._me)
        self._is_given_up = False

    def follow(self) -> int:
        """Return the exit status of the child, when nothing is left to wait for."""
        while self._status is None:
            self._hear(self._warnings.next_look_seconds())
        if -self._status in self._passed:
            # A shell that was the child dies of it at once and passes nothing on.
            self._tell_the_rest(-self._status)
        self._wait_for_keepers()
        return self._status if self._status >= 0 else 128 - self._status

    def _hear(self, seconds: float | None) -> None:
        """Wait for one signal, but not for longer than this, and do what is to be done."""
        info = signal.sigtimedwait(self._heard, 3600.0 if seconds is None else seconds)
        if info is not None and info.si_signo != signal.SIGCHLD:
            self._pass_on(info)
        self._reap()
        self._warnings.deliver()

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        number, now = info.si_signo, time.monotonic()
        if number == signal.SIGCONT:
            self._send(number)
            return
        if self._child_has_it_from_the_terminal(info):
            self._note_interrupt(number)
            return
        last = self._passed.get(number)
        # Ctrl-C is counted by whoever gets it: pressed twice, it is another wish.
        if last is not None and now - last < _SAME_SECONDS and number != signal.SIGINT:
            return
        self._passed[number] = now
        if number in (signal.SIGUSR1, signal.SIGUSR2) and family.is_known():
            self._warnings.add(number)
        elif self._status is None:
            self._send(number)
        else:
            self._note_interrupt(number)
            self._tell_the_rest(number)

    def _note_interrupt(self, number: int) -> None:
        if number == signal.SIGINT and self._status is not None:
            self._is_given_up = True

    def _child_has_it_from_the_terminal(self, info: signal.struct_siginfo) -> bool:
        """Whether the kernel has sent it to our whole group, and the child is in that."""
        if info.si_code != _FROM_THE_KERNEL:
            return False
        if info.si_signo == signal.SIGHUP and os.getsid(0) == self._me:
            return False  # a terminal that is closed tells only the first process of its session
        if self._status is not None:
            return True
        with contextlib.suppress(OSError):
            return os.getpgid(self._child) == os.getpgrp()
        return False

    def _send(self, number: int) -> None:
        if self._status is None:  # afterwards, the pid may be another's
            with contextlib.suppress(OSError):
                os.kill(self._child, number)

    def _tell_the_rest(self, number: int) -> None:
        """The child is gone: trainers that it has left behind are to save and leave, too."""
        for pid in family.catchers(self._me, number):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._child:
                    self._status = os.waitstatus_to_exitcode(ended[1])

    def _wait_for_keepers(self) -> None:
        """They end by themselves, when the last state is durable."""
        began = time.monotonic()
        has_told = False
        empty_looks = 0
        while self._has_children() and empty_looks < 2:
            # The list of children can miss one while another ends.
            found = family.keepers(self._me)
            empty_looks = 0 if found else empty_looks + 1
            if not found:
                time.sleep(_LOOK_SECONDS / 5)
                continue
            if not has_told and time.monotonic() - began > _TELL_SECONDS:
                has_told = True
                pids = ", ".join(map(str, found))
                say(f"the command has ended; its keeper (pid {pids}) still saves: waiting for it.")
            self._hear(_LOOK_SELDOM_SECONDS)
            if self._is_given_up and not self._in_job:
                return  # Ctrl-C; the keeper goes on alone, where nobody kills it for that

    def _has_children(self) -> bool:
        self._reap()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return True
        return False
