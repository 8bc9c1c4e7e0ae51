"""A command that hangs: the leader ends it if asked to.

The keeper of a run knows most, and reports in the run's own output. It also writes a file for the
leader, next to the leader's own: the run's folder may be on the file system that does not answer.
Where there is no keeper, the leader judges by its own observation, but only with `--hang-timeout`:
otherwise nothing is ever killed for a hang.

The end is SIGTERM, then SIGKILL, and no wait without a limit. A process that waits for a file
system that does not answer survives a kill. It is left behind: the leader must not hang with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast._environment.processes.proc import FairDeadline
from holdfast._store.folder.plain_file import read_plain
from holdfast._store.folder.supervised import led_hang
from holdfast._supervise import children
from holdfast._supervise.record import SupervisionRecord

if TYPE_CHECKING:
    from holdfast._supervise.silence import SilenceWatch

_LOOK_SECONDS = 1.0
_ENDING_SECONDS = 0.1
_KEEPER_SECONDS = 30.0
_DOOMED_LOOKS = 3  # a killed process may take a moment to be gone
_RESTART = "restart"
AUTO = "auto"
# For what has not been measured: the first step of a run, or a command without a run.
_UNKNOWN_SECONDS = 1800.0
# For what may take longer than a step: phases, the first step, ranks that wait for each other.
_LONGER = 10.0
NO_HANG = ("slow", "debugger", "stopped", "frozen", "running")  # causes, as `explain` finds them


class Timeout:
    """`--hang-timeout`: after how long something counts as a hang; None: the run learns it."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    @classmethod
    def parse(cls, text: str) -> Timeout:
        """From "auto", "90" or "5min"; ValueError says what is wrong with any other."""
        text = text.strip()
        if text == AUTO:
            return cls(None)
        try:
            seconds = float(text)
        except ValueError:
            seconds = _duration(text)
        if not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"{text!r} is not a time above 0")
        return cls(seconds)

    @property
    def how(self) -> str:
        """Where it comes from, for hang.json."""
        return "learned" if self.seconds is None else "given"

    def for_child(self) -> str:
        """For the environment variable that the keeper of a run reads."""
        return AUTO if self.seconds is None else f"{self.seconds:g}"

    def without_run(self, *, has_ranks: bool) -> float:
        """For a command of which only its output and its processor time are known."""
        if self.seconds is None:
            return _UNKNOWN_SECONDS
        return self.seconds * (_LONGER if has_ranks else 1.0)

    def for_disk(self) -> float:
        """For a process that saves to a file system that does not answer."""
        return _UNKNOWN_SECONDS if self.seconds is None else max(60.0, self.seconds * _LONGER)

    def from_term_to_kill(self) -> float:
        """For a process that saves something at SIGTERM."""
        return self._within(20.0)

    def after_kill(self) -> float:
        """For the system, to remove a process with much memory."""
        return self._within(30.0)

    def _within(self, most: float) -> float:
        return most if self.seconds is None else min(most, max(2.0, self.seconds))


def _duration(text: str) -> float:
    from holdfast._errors import SettingsError
    from holdfast._settings import parse_seconds  # slow to import, and rarely needed

    try:
        return parse_seconds(text, "--hang-timeout")
    except SettingsError:
        raise ValueError(f"{text!r} is neither a number of seconds, nor 5min, nor auto") from None


class WatchedCommand(NamedTuple):
    child: int
    leader: int
    record: SupervisionRecord
    timeout: Timeout | None
    say: Callable[[str], None]
    rest: Callable[[], list[int]]  # the processes that it would leave behind
    is_held_up: Callable[[], bool]  # the reader of its output does not read
    has_keys: bool

    def processes(self) -> tuple[int, ...]:
        return (self.child, *self.rest())


class CommandHangs:
    def __init__(self, command: WatchedCommand) -> None:
        self._command = command
        self._record = command.record
        self._timeout = command.timeout
        self._say = command.say
        self._silence: SilenceWatch | None = None
        if command.timeout is not None and children.is_known():
            from holdfast._supervise.silence import SilenceWatch  # would make every start slower

            self._silence = SilenceWatch(command, command.timeout)
        self._ending: HangEnding | None = None
        self._saving: KeeperWait | None = None
        self._is_cut_off = False
        self._lost_since: float | None = None
        self._next = time.monotonic() + _LOOK_SECONDS
        self._stamp = 0
        self._hang: dict[str, Any] | None = None  # as the keeper has reported it
        self._doomed = 0

    @property
    def has_hung(self) -> bool:
        """Whether it was ended for a hang, by us or by its keeper."""
        return self._ending is not None or self._keeper_ends_it

    @property
    def is_lost(self) -> bool:
        return self._is_cut_off or (self._ending is not None and bool(self._ending.lost))

    @property
    def inspectors(self) -> Collection[int]:
        """Processes that are not part of the command, but inspect it for us."""
        return () if self._silence is None else self._silence.inspectors

    def next_poll_seconds(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def poll(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        pause = _LOOK_SECONDS
        with contextlib.suppress(Exception):  # an error here must not end the supervision
            self._read_keeper()
            if self._ending is not None:
                self._ending.poll()
                pause = _ENDING_SECONDS
                self._say_lost()
            elif self._keeper_ends_it:
                self._check_that_it_ends()
            elif self._silence is not None:
                self._silence.poll()
                pause = min(pause, self._silence.pause_seconds())
                if self._silence.hang is not None:
                    self._end(self._silence.hang)
        self._next = now + pause

    def end_the_rest(self, turn: Callable[[float], None]) -> None:
        """The command itself is gone: end what it has left behind."""
        with contextlib.suppress(Exception):  # its record may hold anything
            self._read_keeper()  # it may have ended between two looks
        if not self.has_hung or self._timeout is None:
            return
        if self._ending is None:
            self._begin_ending()
        assert self._ending is not None
        while not self._ending.is_over:
            turn(_ENDING_SECONDS)
            self._ending.poll()
        self._say_lost()

    def gives_up(self, keepers: list[int]) -> bool:
        """Whether it is useless to wait for these: they wait for a dead file system, too."""
        if self._timeout is None:
            return False
        if self._lost_since is not None:  # its keeper has not much left to do
            return time.monotonic() - self._lost_since > _KEEPER_SECONDS
        if self._saving is None:
            self._saving = KeeperWait(self._timeout)
        if self._saving.moves(keepers):
            return False
        pids = ", ".join(map(str, keepers))
        self._say(
            f"its keeper (pid {pids}) waits for a disk that does not answer: leaving without it.\n"
            "  the snapshot is on disk once that answers, unless the keeper is killed before."
        )
        self._is_cut_off = True
        return True

    def close(self) -> None:
        if self._silence is not None:
            self._silence.close()

    @property
    def _keeper_ends_it(self) -> bool:
        hang = self._hang
        return hang is not None and hang.get("policy") == _RESTART and hang.get("ended") is None

    def _read_keeper(self) -> None:
        if self._record.folder is None:
            return
        path = led_hang(self._record.folder)
        with contextlib.suppress(OSError, ValueError):
            stamp = os.stat(path).st_mtime_ns  # noqa: PTH116  cheap: it runs every second
            if stamp != self._stamp and self._ending is None:
                self._stamp = stamp
                found = json.loads(read_plain(path))
                if isinstance(found, dict) and found.get("cause") not in NO_HANG:
                    self._hang = found

    def _check_that_it_ends(self) -> None:
        """The keeper kills what does not leave. What survives must not hold us up, too."""
        doomed = list(filter(children.is_doomed, self._command.processes()))
        self._doomed = self._doomed + 1 if doomed else 0
        if self._doomed >= _DOOMED_LOOKS and self._timeout is not None:
            self._begin_ending(is_killed=True)

    def _end(self, hang: dict[str, Any]) -> None:
        assert self._timeout is not None
        sentence = hang["sentence"] or "It stands still, and where cannot be seen."
        hang["sentence"] = sentence
        self._record.write_hang(hang)
        self._record.said.append(sentence)
        seconds = self._timeout.from_term_to_kill()
        self._say(
            f"it hangs: {hang['quiet_seconds']:.0f} s without output and without work.\n"
            f"  {sentence}\n"
            f"  ending it (--hang-timeout): SIGTERM, and SIGKILL if it is there in {seconds:.0f} s."
        )
        self._begin_ending()

    def _begin_ending(self, *, is_killed: bool = False) -> None:
        assert self._timeout is not None
        self._ending = HangEnding(self._command, self._timeout, is_killed=is_killed)

    def _say_lost(self) -> None:
        lost = [] if self._ending is None else self._ending.lost
        if not lost or self._lost_since is not None:
            return
        self._lost_since = time.monotonic()
        many = f"pid {', '.join(map(str, lost))}"
        self._record.write(unkillable=lost)
        self._say(
            f"{many} survives SIGKILL: it waits in the kernel, mostly for a disk or a file system "
            "that does not answer, or is frozen.\n"
            "  leaving without it. It ends when that answers, or when the machine is started again."
        )


class HangEnding:
    """From SIGTERM to SIGKILL, for all processes of the command."""

    def __init__(self, command: WatchedCommand, timeout: Timeout, *, is_killed: bool) -> None:
        """`is_killed`: its keeper has killed it."""
        self._command = command
        self._timeout = timeout
        seconds = 0.0 if is_killed else timeout.from_term_to_kill()
        # A process that saves meanwhile may have to wait for a processor.
        self._kill = FairDeadline(seconds, command.processes)
        self._lost_at: float | None = None
        self.lost: list[int] = []  # those that cannot be killed
        if not is_killed:
            child = command.child
            for pid in (child,) if children.is_there(child) else command.rest():
                children.send(pid, signal.SIGTERM)

    def poll(self) -> None:
        now = time.monotonic()
        if not self._kill.is_over():
            return
        left = self._left()
        if any(map(children.is_traced, left)):
            return  # a debugger is attached now
        for pid in left:
            if not children.is_doomed(pid):
                children.send(pid, signal.SIGKILL)
        if self._lost_at is None:
            self._lost_at = now + self._timeout.after_kill()
        elif now >= self._lost_at:
            self.lost = left

    @property
    def is_over(self) -> bool:
        """Whether all are gone, or those that are left cannot be killed."""
        return bool(self.lost) or not self._left()

    def _left(self) -> list[int]:
        return [pid for pid in dict.fromkeys(self._command.processes()) if children.is_there(pid)]


class KeeperWait:
    """Keepers that are waited for, as long as they make progress."""

    def __init__(self, timeout: Timeout) -> None:
        self._seconds = timeout.for_disk()
        self._seen: object = None
        self._since = time.monotonic()

    def moves(self, pids: list[int]) -> bool:
        """Whether one of them has done anything recently, or could."""
        seen = [children.work_of(pid) for pid in pids]
        now = time.monotonic()
        # Not in state D, the wait for a disk: all other waits of a keeper have a limit.
        if seen != self._seen or any(state != b"D" for state, *_ in seen):
            self._seen, self._since = seen, now
        return now - self._since < self._seconds
