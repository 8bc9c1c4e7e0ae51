"""A command of which nothing is known but what it prints and what it uses.

It has opened no run, or not yet, or its keeper is gone. It hangs if it has printed nothing and
used no processor for long, and if a look at its processes finds them idle, twice. What a person
holds (a debugger, Ctrl-Z, a prompt) is waited for, however long that takes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast._environment.processes.proc import read_bytes
from holdfast._environment.processes.tree import Tree
from holdfast._supervise import children
from holdfast._supervise.ending import Timeout
from holdfast._supervise.hangs import NO_HANG
from holdfast._supervise.record import Book

if TYPE_CHECKING:
    from holdfast._supervise.inspect import Glance

_SHORTEST_SECONDS = 0.25
_LONGEST_SECONDS = 5.0
_LOOKS = 8  # at its processor time, in the time that it may stand
_AWAY_SECONDS = 5.0  # more than this between two looks: then we were stopped ourselves
_AGAIN_SECONDS = 3.0  # from the first look that finds it idle to the one that decides
_LET_GO_SECONDS = 60.0
_WORKS = 0.02  # of a core
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_IDLE = ("IDLE", "POLLS", "DISK")  # launchers poll, whatever their children do
_HELD = ("PAUSED", "TRACED", "STOPPED", "FROZEN")


class Quiet:
    """For how long it has been so, and what follows."""

    def __init__(
        self,
        child: int,
        me: int,
        book: Book,
        timeout: Timeout,
        *,
        say: Callable[[str], None],
        is_held_up: Callable[[], bool],
        has_keys: bool,
    ) -> None:
        self._child = child
        self._me = me
        self._book = book
        self._timeout = timeout
        self._say = say
        self._is_held_up = is_held_up  # whoever reads what it prints does not
        self._has_keys = has_keys
        self._tree = Tree(child)
        self._keepers: list[int] = []
        self._has_ranks: bool | None = None  # looked at when it matters
        self._glance: Glance | None = None
        self._glanced: set[int] = set()
        self._is_first = True  # of the two looks that it takes
        self._held = ""  # by whom, as it was said
        self._held_at = 0.0
        self._is_client_said = False
        now = time.monotonic()
        self._last = self._since = now
        self._began = time.time()
        self._ticks = 0
        self._next_glance = now
        self.hang: dict[str, Any] | None = None

    def pause_seconds(self) -> float:
        """Until the next look."""
        if self._glance is not None:
            return 0.05
        wanted = self._timeout.without_run(has_ranks=False) / _LOOKS
        return min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, wanted))

    def is_of(self, pid: int) -> bool:
        """Whether a process is one that we have started to look."""
        return pid in self._glanced

    def look(self) -> None:
        """Find out whether it hangs; `hang` is set if so."""
        now = time.monotonic()
        was_away = now - self._last > _AWAY_SECONDS + self.pause_seconds()
        self._last = now
        if was_away or self._is_held_up() or self._has_keeper():
            self._begin_anew(now)
            return
        if self._book.printed_at > self._since or self._has_worked(now):
            self._begin_anew(now)
            return
        if self._glance is not None:
            if self._glance.is_done:
                self._judge(now)
        elif now - self._since >= self._patience() and now >= self._next_glance:
            if self._is_for_others():
                self._begin_anew(now)
            else:
                self._start_glance(now)

    def close(self) -> None:
        """Nobody looks on."""
        if self._glance is not None:
            self._glance.close()
            self._glance = None

    def _patience(self) -> float:
        patience = self._timeout.without_run(has_ranks=False)
        if time.monotonic() - self._since < patience:
            return patience
        if self._has_ranks is None:
            self._has_ranks = children.has_ranks(self._me)
        # Ranks wait for each other before they begin, and some come late.
        return self._timeout.without_run(has_ranks=self._has_ranks)

    def _begin_anew(self, now: float) -> None:
        self.close()
        self._since, self._began = now, time.time()
        self._ticks = self._used()
        self._is_first = True
        self._has_ranks = None

    def _has_keeper(self) -> bool:
        """Then it knows more of the run, and what it finds is told by itself."""
        if not self._book.has_run:
            return False
        if not any(map(children.is_keeper, self._keepers)):
            self._keepers = children.keepers(self._me)
        return bool(self._keepers)

    def _is_for_others(self) -> bool:
        """Whether somebody else sees more: a keeper, or nobody from here."""
        if self._is_first and children.keepers(self._me):  # of a run that another leader leads
            return True
        if (client := children.works_elsewhere(self._me)) is None:
            return False
        if not self._book.has_run and not self._is_client_said:
            self._is_client_said = True
            self._say(
                f"what {client} has started cannot be seen from here, so it is never taken for "
                f"a hang.\n  To have it watched: {client} … holdfast run --hang-timeout …"
            )
        return True

    def _has_worked(self, now: float) -> bool:
        used = (self._used() - self._ticks) / _TICKS
        # Less than before: one of them has ended, which is no standing still either.
        return used < 0 or used > max(0.05, _WORKS * (now - self._since))

    def _used(self) -> int:
        return sum(map(_ticks, (self._child, *self._tree.look())))

    def _start_glance(self, now: float) -> None:
        from holdfast._supervise.inspect import Glance  # only in trouble

        self._next_glance = now + _AGAIN_SECONDS
        with contextlib.suppress(OSError):
            self._glance = Glance(self._child)
            self._glanced.add(self._glance.pid)

    def _judge(self, now: float) -> None:
        assert self._glance is not None
        seen = self._glance.take()
        self.close()
        self._next_glance = now + _AGAIN_SECONDS
        if seen is None or not seen["look"].get("processes"):
            self._begin_anew(now)  # nobody knows: the benefit of the doubt
        elif seen["activity"] in _HELD or (self._has_keys and self._awaits_keys()):
            self._wait_for_who_holds_it(seen, now)
            self._begin_anew(now)
        elif seen["activity"] not in _IDLE or seen["cause"] in NO_HANG:
            self._held = ""
            self._begin_anew(now)
        elif self._is_first:
            self._is_first = False
        else:
            self.hang = self._record(seen, now)

    def _record(self, seen: dict[str, Any], now: float) -> dict[str, Any]:
        """As hang.json has it."""
        told = {key: seen[key] for key in ("cause", "sentence", "evidence", "advice")}
        return {
            "by": "leader",
            "began": self._began,
            "found": time.time(),
            "ended": None,
            "patience": self._patience(),
            "quiet_seconds": round(now - self._since, 3),
            "how": self._timeout.how,
            "activity": seen["activity"].lower(),
            "policy": "restart",
            "looks": [seen["look"]],
            "missing": [],
            "durable_step": None,
            **told,
        }

    def _wait_for_who_holds_it(self, seen: dict[str, Any], now: float) -> None:
        held = seen["activity"] if seen["activity"] in _HELD else "KEYS"
        # Whoever goes step by step is told once; whoever comes back after a while, again.
        was_let_go = now - self._held_at > max(_LET_GO_SECONDS, 2 * self._patience())
        if held != self._held or was_let_go:
            self._say(_why_wait(held, seen["look"]["processes"]))
        self._held, self._held_at = held, now

    def _awaits_keys(self) -> bool:
        """Whether a prompt stands on the last line: no bar, which is drawn over and over."""
        line = self._book.last_printed.rpartition(b"\n")[2].lstrip(b"\r")
        return bool(line.strip()) and b"\r" not in line


def _why_wait(held: str, processes: list[dict[str, Any]]) -> str:
    if held == "TRACED":
        traced = next((each for each in processes if each.get("tracer")), processes[0])
        by = traced.get("tracer_name") or "a debugger"
        return f"pid {traced.get('pid')} is held by {by}: no hang, waiting for that."
    if held == "STOPPED":
        stopped = next((each for each in processes if each.get("state") == "T"), processes[0])
        pid = stopped.get("pid")
        return f"the command is stopped (SIGSTOP): no hang. To go on: kill -CONT {pid}"
    if held == "FROZEN":
        return "the command is frozen with its cgroup: no hang, waiting until it is thawed."
    if held == "KEYS":
        return "the command waits for somebody at its terminal: no hang, waiting for that."
    return "the command is paused in a debugger: no hang, waiting until that lets it go on."


def _ticks(pid: int) -> int:
    fields = (read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
    with contextlib.suppress(IndexError, ValueError):
        return sum(map(int, fields[11:15]))  # its own, and of its children that have ended
    return 0
