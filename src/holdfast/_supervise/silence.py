"""A command of which only its output and its processor time are known.

It has opened no run, or not yet, or its keeper is gone. It hangs if it has printed nothing and
used no processor for long, and if two inspections find its processes idle. A command that a person
holds (a debugger, Ctrl-Z, a prompt) is waited for without a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import command
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.tree import Tree
from holdfast._store.folder import supervised
from holdfast._supervise import children
from holdfast._supervise.hangs import NO_HANG, Timeout, WatchedCommand

_SHORTEST_SECONDS = 0.25
_LONGEST_SECONDS = 5.0
_LOOKS = 8  # at its processor time, within the timeout
_AWAY_SECONDS = 5.0  # more than this between two looks: we were stopped ourselves
_AGAIN_SECONDS = 3.0  # from the first inspection that finds it idle to the second
_RELEASED_SECONDS = 60.0
_WORKS = 0.02  # of a core
_INSPECTION_SECONDS = 15.0  # less what it waits for a processor
_IDLE = ("IDLE", "POLLS", "DISK")  # launchers poll, even if their children hang
_HELD = ("PAUSED", "TRACED", "STOPPED", "FROZEN")


class SilenceWatch:
    def __init__(self, command: WatchedCommand, timeout: Timeout) -> None:
        self._command = command
        self._timeout = timeout
        self._tree = Tree(command.child)
        self._keepers: list[int] = []
        self._has_ranks: bool | None = None  # found out when it matters
        self._inspection: Inspection | None = None
        self.inspectors: set[int] = set()
        self._is_first = True  # of the two inspections
        self._held = ("", 0.0)  # by what, as it was said, and when it was last found so
        self._is_client_said = False
        now = time.monotonic()
        self._last = self._since = now
        self._used_before = 0.0
        self._next_inspection = now
        self.hang: dict[str, Any] | None = None

    def pause_seconds(self) -> float:
        if self._inspection is not None:
            return 0.05
        wanted = self._timeout.without_run(has_ranks=False) / _LOOKS
        return min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, wanted))

    def poll(self) -> None:
        """Find out whether it hangs; `hang` is set if so."""
        now = time.monotonic()
        was_away = now - self._last > _AWAY_SECONDS + self.pause_seconds()
        self._last = now
        is_known = was_away or self._command.is_held_up() or self._has_keeper()
        if is_known or self._command.record.printed_at > self._since or self._has_worked(now):
            self._start_over(now)
        elif self._inspection is not None:
            if self._inspection.is_done:
                self._judge(now)
        elif now - self._since >= self._patience() and now >= self._next_inspection:
            if self._is_for_others():
                self._start_over(now)
                return
            self._next_inspection = now + _AGAIN_SECONDS
            with contextlib.suppress(OSError):
                self._inspection = Inspection(self._command.child, self._command.record.folder)
                self.inspectors.add(self._inspection.pid)

    def close(self) -> None:
        if self._inspection is not None:
            self._inspection.close()
            self._inspection = None

    def _patience(self) -> float:
        patience = self._timeout.without_run(has_ranks=False)
        if time.monotonic() - self._since < patience:
            return patience
        if self._has_ranks is None:
            self._has_ranks = children.has_ranks(self._command.leader)
        # Ranks wait for each other before they begin, and some start late.
        return self._timeout.without_run(has_ranks=self._has_ranks)

    def _start_over(self, now: float) -> None:
        self.close()
        self._since = now
        self._used_before = self._used()
        self._is_first = True
        self._has_ranks = None

    def _has_keeper(self) -> bool:
        """A keeper knows more of the run, and reports what it finds."""
        if not self._command.record.has_run:
            return False
        if not any(map(children.is_keeper, self._keepers)):
            self._keepers = children.keepers(self._command.leader)
        return bool(self._keepers)

    def _is_for_others(self) -> bool:
        """Whether it is not ours to judge: a keeper does, or nothing can be seen from here."""
        if self._is_first and children.keepers(self._command.leader):  # of a run of another leader
            return True
        if (client := children.works_elsewhere(self._command.leader)) is None:
            return False
        if not self._command.record.has_run and not self._is_client_said:
            self._is_client_said = True
            self._command.say(
                f"what {client} has started cannot be seen from here, so it is never taken for "
                f"a hang.\n  To have it watched: {client} … holdfast run --hang-timeout …"
            )
        return True

    def _has_worked(self, now: float) -> bool:
        used = self._used() - self._used_before
        # Less than before: one of them has ended, which is no hang either.
        return used < 0 or used > max(0.05, _WORKS * (now - self._since))

    def _used(self) -> float:
        return sum(map(children.used_seconds, (self._command.child, *self._tree.look())))

    def _judge(self, now: float) -> None:
        assert self._inspection is not None
        seen = self._inspection.take()
        self.close()
        self._next_inspection = now + _AGAIN_SECONDS
        if seen is None or not seen["look"].get("processes"):
            self._start_over(now)  # unknown: the benefit of the doubt
        elif seen["activity"] in _HELD or (self._command.has_keys and self._awaits_keys()):
            self._wait_for_who_holds_it(seen, now)
            self._start_over(now)
        elif seen["activity"] not in _IDLE or seen["cause"] in NO_HANG:
            self._held = ("", 0.0)
            self._start_over(now)
        elif self._is_first:
            self._is_first = False
        else:
            self.hang = self._hang_record(seen, now)

    def _hang_record(self, seen: dict[str, Any], now: float) -> dict[str, Any]:
        return {
            "by": "leader",
            "began": time.time() - (now - self._since),
            "found": time.time(),
            "ended": None,
            "patience": self._patience(),
            "quiet_seconds": round(now - self._since, 3),
            "how": self._timeout.how,
            "activity": seen["activity"].lower(),
            "policy": "restart",
            "looks": seen["looks"],
            "missing": [],
            "durable_step": None,
            **{key: seen[key] for key in ("cause", "sentence", "evidence", "advice")},
        }

    def _wait_for_who_holds_it(self, seen: dict[str, Any], now: float) -> None:
        held = seen["activity"] if seen["activity"] in _HELD else "KEYS"
        # Said once for a person who steps through it, and again after a longer pause.
        before, at = self._held
        was_released = now - at > max(_RELEASED_SECONDS, 2 * self._patience())
        if held != before or was_released:
            self._command.say(_why_wait(held, seen["look"]["processes"]))
        self._held = (held, now)

    def _awaits_keys(self) -> bool:
        """Whether the last line is a prompt, and not a bar, which is drawn over and over."""
        line = self._command.record.last_printed.rpartition(b"\n")[2].lstrip(b"\r")
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
        return "the command waits for input at its terminal: no hang. The watch waits too."
    return "the command is paused in a debugger: no hang, waiting until that lets it go on."


class Inspection:
    """An inspection of the command's processes, by a process of its own.

    Reading about a process that waits for a dead file system may block, too. The leader must not
    block: it receives the signals. So it starts a process for it, and takes what comes in time.
    """

    def __init__(self, pid: int, life: Path | None) -> None:
        """`life` is the folder of the records. OSError if no process can be started."""
        self._file = os.memfd_create("holdfast-look", os.MFD_CLOEXEC)
        output = None if life is None else str(supervised.led_output(life))
        plan = {"pid": pid, "file": self._file, "output": output}
        # Without the variables of a rank: it must not count as one that was left behind.
        ranks = variables.of_ranks()
        environment = variables.child_environment()
        try:
            self._process = subprocess.Popen(
                command("holdfast._supervise.silence", plan),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: value for name, value in environment.items() if name not in ranks},
                start_new_session=True,
                pass_fds=[self._file],
            )
        except OSError:
            os.close(self._file)
            raise
        self.pid = self._process.pid
        self._deadline = FairDeadline(_INSPECTION_SECONDS, lambda: [self.pid])

    @property
    def is_done(self) -> bool:
        """Whether it has ended, or has used up its time."""
        return self._process.poll() is not None or self._deadline.is_over()

    def take(self) -> dict[str, Any] | None:
        """{"look", "looks", "activity", "sentence", …}; None if it did not come in time."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.poll() is not None:
                found = json.loads(Path(f"/proc/self/fd/{self._file}").read_bytes())
                return found if isinstance(found, dict) else None
        return None

    def close(self) -> None:
        """Without a wait: it is reaped later, like all other children."""
        with contextlib.suppress(OSError):
            if self._process.poll() is None:
                self._process.kill()
        os.close(self._file)


def main(plan: str) -> None:
    """The process that an `Inspection` has started."""
    from holdfast._diagnose.hangs.explain import explain
    from holdfast._environment.processes.activity import activity_of
    from holdfast._environment.processes.inspect import Looker, by_rank
    from holdfast._environment.processes.tree import ranks_below

    given = json.loads(plan)
    look = Looker(given["pid"]).look()
    looks = by_rank(look, ranks_below(given["pid"]))
    output = given["output"]
    found = explain({"looks": looks}, None if output is None else Path(output))
    record = {
        "look": look,
        "looks": looks,
        "activity": activity_of(look).name,
        "cause": found.cause.value,
        "sentence": found.sentence,
        "evidence": list(found.evidence),
        "advice": list(found.advice),
    }
    os.write(given["file"], json.dumps(record).encode())
