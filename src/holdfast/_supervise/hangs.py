"""A command that hangs: what its keeper has found is said, and what must be done is done.

The keeper of a run sees most, and says it in the run's own output if the trainer still can. It
also tells the leader, in a file beside the leader's own: the run's folder may be on the file
system that does not answer. Where there is no keeper, the leader judges by what it sees itself,
but only with `--hang-timeout`: else nothing is ever killed for a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast._store.folder.plain_file import read_plain
from holdfast._store.folder.supervised import led_hang, led_output
from holdfast._supervise import children
from holdfast._supervise.record import Book

if TYPE_CHECKING:
    from holdfast._supervise.ending import Ending, Saving, Timeout
    from holdfast._supervise.silence import Quiet

_LOOK_SECONDS = 1.0
_ENDING_SECONDS = 0.1
_TRAINER_SECONDS = 2.0  # for the trainer to say it itself
_KEEPER_SECONDS = 30.0
_DOOMED_LOOKS = 3  # one that is killed may take a moment to be gone
_RESTART = "restart"
NO_HANG = ("slow", "debugger", "stopped", "frozen", "running")  # causes, as `explain` finds them


class Standstill:
    """Watches for one while the command lives."""

    def __init__(
        self,
        child: int,
        me: int,
        book: Book,
        timeout: Timeout | None,
        *,
        say: Callable[[str], None],
        rest: Callable[[], list[int]],
        is_held_up: Callable[[], bool],
        has_keys: bool,
    ) -> None:
        self._child = child
        self._me = me
        self._book = book
        self._timeout = timeout
        self._say = say
        self._rest = rest
        self._quiet: Quiet | None = None
        if timeout is not None and children.is_known():
            from holdfast._supervise.silence import Quiet  # every start would be slower by it

            self._quiet = Quiet(
                *(child, me, book, timeout),
                say=say,
                is_held_up=is_held_up,
                has_keys=has_keys,
            )
        self._ending: Ending | None = None
        self._saving: Saving | None = None
        self._is_cut_off = False
        self._lost_since: float | None = None
        self._next = time.monotonic() + _LOOK_SECONDS
        self._stamp = 0
        self._hang: dict[str, Any] | None = None  # as the keeper has told it
        self._say_at: float | None = None
        self._is_said = False
        self._doomed = 0

    @property
    def has_hung(self) -> bool:
        """Whether it was ended for a hang, by us or by its keeper."""
        return self._ending is not None or self._keeper_ends_it

    @property
    def is_lost(self) -> bool:
        """Whether it cannot be ended."""
        is_so = self._ending is not None and bool(self._ending.lost)
        return is_so or self._is_cut_off

    def is_ours(self, pid: int) -> bool:
        """Whether a process is no part of the command, but looks at it."""
        return self._quiet is not None and self._quiet.is_of(pid)

    def next_look_seconds(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def look(self) -> None:
        """If it is time: see what there is, and do what is due."""
        now = time.monotonic()
        if now < self._next:
            return
        pause = _LOOK_SECONDS
        with contextlib.suppress(Exception):  # the command must be led, whatever goes wrong here
            self._hear_keeper(now)
            if self._ending is not None:
                self._ending.look()
                pause = _ENDING_SECONDS
                self._tell_lost()
            elif self._keeper_ends_it:
                self._see_that_it_ends()
            elif self._quiet is not None:
                self._quiet.look()
                pause = min(pause, self._quiet.pause_seconds())
                if self._quiet.hang is not None:
                    self._end(self._quiet.hang)
        self._next = now + pause

    def end_the_rest(self, turn: Callable[[float], None]) -> None:
        """The command itself is gone: see to what it has left behind."""
        with contextlib.suppress(Exception):  # its record may hold anything
            self._hear_keeper(time.monotonic())  # it may have ended between two looks
        if not self.has_hung or self._timeout is None:
            return
        if self._ending is None:
            self._begin_ending()
        assert self._ending is not None
        while not self._ending.is_over:
            turn(_ENDING_SECONDS)
            self._ending.look()
        self._tell_lost()

    def gives_up(self, keepers: list[int]) -> bool:
        """Whether there is no use in waiting for these: they, too, stand in a dead file system."""
        if self._timeout is None:
            return False
        if self._lost_since is not None:  # with which its keeper has not much left to do
            return time.monotonic() - self._lost_since > _KEEPER_SECONDS
        if self._saving is None:
            from holdfast._supervise.ending import Saving

            self._saving = Saving(self._timeout)
        if self._saving.moves(keepers):
            return False
        pids = ", ".join(map(str, keepers))
        self._say(
            f"its keeper (pid {pids}) waits for a disk that does not answer: leaving without it.\n"
            "  what was in memory is on disk once that answers, if nobody ends the keeper before."
        )
        self._is_cut_off = True
        return True

    def close(self) -> None:
        if self._quiet is not None:
            self._quiet.close()

    # What the keeper tells.

    @property
    def _keeper_ends_it(self) -> bool:
        hang = self._hang
        return hang is not None and hang.get("policy") == _RESTART and hang.get("ended") is None

    def _hear_keeper(self, now: float) -> None:
        if self._book.folder is None:
            return
        path = led_hang(self._book.folder)
        with contextlib.suppress(OSError, ValueError):
            stamp = os.stat(path).st_mtime_ns  # noqa: PTH116  every second, of a file seldom there
            if stamp != self._stamp and self._ending is None:
                self._stamp = stamp
                found = json.loads(read_plain(path))
                if isinstance(found, dict):
                    self._take(found, now)
        if self._say_at is not None and now >= self._say_at:
            self._tell_hang()

    def _take(self, hang: dict[str, Any], now: float) -> None:
        if isinstance(held := hang.get("held"), dict):
            who = f"rank {held.get('rank')}" if held.get("of", 1) > 1 else "the run"
            self._say(f"{who} is held by {held.get('by')}: no hang, waiting until it goes on.")
            return
        if hang.get("cause") in NO_HANG:
            return
        before, self._hang = self._hang, hang
        if before is None or before.get("found") != hang.get("found"):
            self._say_at, self._is_said = now + _TRAINER_SECONDS, False
        if hang.get("ended") is not None:
            self._say_at = None
            if self._is_said:
                self._is_said = False
                stood = max(0.0, hang["ended"] - hang.get("began", hang["ended"]))
                self._say(f"it goes on: a step was made, after {stood:.0f} s.")

    def _tell_hang(self) -> None:
        import shlex  # every start would be slower by it

        self._say_at = None
        assert self._hang is not None
        sentence = str(self._hang.get("sentence") or "It hangs.")
        if self._has_printed(sentence):
            return
        self._is_said = True
        self._book.said.append(sentence)
        lines = [sentence]
        if self._hang.get("policy") == _RESTART:
            lines.append("its newest state is made durable, then it is ended (--hang-timeout).")
        else:
            for run in self._book.runs()[:1]:
                place = shlex.quote(run["folder"])
                lines.append(f"where it stands now: holdfast stacks {place}")
            if self._timeout is None and "--hang-timeout" not in sentence:
                lines.append(
                    "to have a hang ended and the run go on: holdfast run --hang-timeout auto"
                )
        self._say("\n  ".join(lines))

    def _has_printed(self, sentence: str) -> bool:
        """Whether the trainer could say so itself."""
        with contextlib.suppress(OSError):
            if self._book.folder is not None:
                return sentence.encode() in read_plain(led_output(self._book.folder))
        return False

    def _see_that_it_ends(self) -> None:
        """The keeper kills what does not leave. What survives that must not hold us, too."""
        doomed = [pid for pid in (self._child, *self._rest()) if children.is_doomed(pid)]
        self._doomed = self._doomed + 1 if doomed else 0
        if self._doomed >= _DOOMED_LOOKS and self._timeout is not None:
            self._begin_ending(is_killed=True)

    # What we do ourselves.

    def _end(self, hang: dict[str, Any]) -> None:
        assert self._timeout is not None
        sentence = hang["sentence"] or "It stands still, and where cannot be seen."
        hang["sentence"] = sentence
        self._book.note_hang(hang)
        self._book.said.append(sentence)
        seconds = self._timeout.from_term_to_kill()
        self._say(
            f"it hangs: {hang['quiet_seconds']:.0f} s without output and without work.\n"
            f"  {sentence}\n"
            f"  ending it (--hang-timeout): SIGTERM, and SIGKILL if it is there in {seconds:.0f} s."
        )
        self._begin_ending()

    def _begin_ending(self, *, is_killed: bool = False) -> None:
        from holdfast._supervise.ending import Ending

        assert self._timeout is not None
        self._ending = Ending(self._child, self._rest, self._timeout, is_killed=is_killed)

    def _tell_lost(self) -> None:
        lost = [] if self._ending is None else self._ending.lost
        if not lost or self._lost_since is not None:
            return
        self._lost_since = time.monotonic()
        many = f"pid {', '.join(map(str, lost))}"
        self._book.note(unkillable=lost)
        self._say(
            f"{many} survives SIGKILL: it waits in the kernel, mostly for a disk or a file system "
            "that does not answer, or is frozen.\n"
            "  leaving without it. It ends when that answers, or when the machine is started again."
        )
