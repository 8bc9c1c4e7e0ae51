"""`holdfast run -- COMMAND`: the first process of a task, thin, and the last to leave.

SLURM kills the rest of a task when its first process is gone. If that is the trainer, a kill -9
takes the keeper with it, and the newest state is lost. So this process is the first one. It starts
the trainer, passes signals on, adopts the keeper of a killed trainer, and leaves after the keeper,
with the trainer's own status. It records and says why the trainer died, and starts it again where
that makes sense.

It holds no state that could be lost, and runs no code of the user. Signals are blocked and waited
for, so none can interrupt between two lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast._environment import variables
from holdfast._environment.slurm.job import is_in_step, rank_environment, starts_torchrun
from holdfast._errors import HUNG
from holdfast._store.folder.supervised import led_folder, life_folder
from holdfast._supervise import explain_no_start
from holdfast._supervise.attempt import SupervisedAttempt
from holdfast._supervise.child import Streams, find_outlets, hold_closed_streams, start
from holdfast._supervise.children import end_guards
from holdfast._supervise.hangs import Timeout
from holdfast._supervise.record import SupervisionRecord
from holdfast._supervise.signals import SignalQueue, passed_on, stop_ourselves
from holdfast._text import say

if TYPE_CHECKING:
    from holdfast._supervise.restart import Restarts
    from holdfast._supervise.warm_spare import WarmSpare

_ADOPTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


class Supervision:
    """One attempt of the command after the other, until there is no reason for another."""

    def __init__(
        self,
        command: Sequence[str],
        max_restarts: int | None,
        timeout: Timeout | None,
        *,
        has_spare: bool,
    ) -> None:
        closed = hold_closed_streams()  # before anything is opened
        self._command = command
        self._most = max_restarts
        self._timeout = timeout
        self._environment = variables.whole()
        self._in_job = is_in_step(self._environment)
        # Inherited as ignored, it would throw the child's status away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        received = {*passed_on(), signal.SIGCHLD}
        terminals = [os.isatty(number) for number in (0, 1, 2)]
        if any(terminals):
            received.add(signal.SIGWINCH)
        if not any(terminals) or (terminals[0] and terminals[1]):  # its session: see child.py
            received.add(signal.SIGTSTP)  # else the terminal stops us and the command together
        self._signals = SignalQueue(received)
        # In the background, our terminal would stop us for the output of the command, or for a
        # read of keys.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU, signal.SIGTTIN})
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_ADOPTS_ORPHANS, 1, 0, 0, 0)
        self._by_number = find_outlets(closed)
        self._outlets = list(dict.fromkeys(self._by_number.values()))
        self._folder: Path | None = led_folder()
        self._restarts: Restarts | None = None
        self._has_run = False
        self._attempt: SupervisedAttempt | None = None
        self._spare = self._find_spare() if has_spare else None

    def run(self) -> int:
        try:
            return self._run()
        finally:
            if self._attempt is not None:
                self._attempt.wait_for_keepers()
            if self._spare is not None:
                self._spare.close()
            if self._in_job:  # no arena waits longer than this process: SLURM would kill its guard
                end_guards(os.getpid())

    def _run(self) -> int:
        number = 0
        while True:
            number += 1
            record = SupervisionRecord(self._folder, number, self._command)
            try:
                attempt = self._attempt = self._begin(record, number)
            except OSError as error:
                return explain_no_start(self._command[0], error)
            status = attempt.follow()
            has_hung = attempt.has_hung and not attempt.was_asked
            if has_hung and status == 0:
                status = HUNG  # it left at our SIGTERM, and is not done
            if not self._goes_on(attempt, record, status):
                return HUNG if has_hung else status if status >= 0 else 128 - status

    def _begin(self, record: SupervisionRecord, number: int) -> SupervisedAttempt:
        taken = None if self._spare is None else self._spare.take(record)
        if taken is not None:
            child, streams = taken
            record.write(is_spare=True)
        else:
            environment = self._environment_for(number, record.folder)
            streams = Streams(self._by_number, record.add_output)
            child = start(self._command, environment, streams, self._signals.mask_before)
        record.write(child_pid=child)
        attempt = SupervisedAttempt(
            *(child, self._signals, streams, self._outlets, record, self._timeout),
            in_job=self._in_job,
            spare=self._spare,
        )
        if self._spare is not None:
            after = None if self._folder is None else life_folder(self._folder, number + 1)
            self._spare.watch(record, self._environment_for(number + 1, after), attempt.say)
        return attempt

    def _environment_for(self, number: int, folder: Path | None) -> dict[str, str]:
        environment = {**self._environment, "HOLDFAST_LEADER": str(os.getpid())}
        environment["HOLDFAST_RESTART"] = str(number - 1)
        if not starts_torchrun(self._command):  # torchrun numbers its ranks itself
            environment.update(rank_environment(self._environment))
        # A segmentation fault of any Python below us leaves its stack in the output.
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        if folder is not None:
            environment["HOLDFAST_LED"] = str(folder.absolute())
        if self._timeout is not None:
            environment["HOLDFAST_HANG_TIMEOUT"] = self._timeout.for_child()
        if self._spare is not None:
            environment["HOLDFAST_SPARE"] = "1"
        return environment

    def _find_spare(self) -> WarmSpare | None:
        # Slow to import, and rarely needed.
        from holdfast._supervise.warm_spare import WarmSpare, parse_command

        command = parse_command(self._command)
        if starts_torchrun(self._command):
            command = "torchrun starts the ranks itself"
        if isinstance(command, str):
            say(f"no spare: {command}. A restart is a plain start.")
            return None
        return WarmSpare(command, self._by_number, self._signals.mask_before)

    def _goes_on(self, attempt: SupervisedAttempt, record: SupervisionRecord, status: int) -> bool:
        """Say what happened; True if there is another attempt."""
        if status == 0:
            return False
        why = ""
        if attempt.has_answered(status):
            why = "it was asked to end"
        elif attempt.has_lost_its_reader(status):  # `| head`: nothing to explain
            why = "its reader is gone"
        elif record.is_cut_off:  # a verdict and another attempt would need its file system
            why = "it cannot be ended"
        if why:
            record.write_decision(False, why)
            return False
        from holdfast._supervise import restart  # slow to import

        self._has_run = self._has_run or bool(record.runs())
        verdict = restart.find_verdict(record)
        known = {"was_asked": attempt.was_asked, "has_run": self._has_run}
        end = restart.find_end(record, status, verdict, has_hung=attempt.has_hung, **known)
        if self._restarts is None:
            self._restarts = restart.Restarts(
                self._most,
                in_job=self._in_job,
                tasks=self._tasks(),
                first_pause_seconds=variables.seconds("HOLDFAST_PAUSE_SECONDS", 1.0),
            )
        decision = self._restarts.after(end)
        record.write_decision(decision.restart, decision.why, decision.pause_seconds)
        # Each of several tasks has a leader, and all of them write to one log.
        rank = f"rank {self._environment.get('SLURM_PROCID')}: " if self._tasks() > 1 else ""
        restart.explain(
            lambda text: attempt.say(f"{rank}{text}"), record, verdict, decision, os.getpid()
        )
        return decision.restart and self._pause(decision.pause_seconds)

    def _tasks(self) -> int:
        tasks = self._environment.get("SLURM_STEP_NUM_TASKS", "") if self._in_job else ""
        return int(tasks) if tasks.isdigit() else 1

    def _pause(self, seconds: float) -> bool:
        """Wait; False if a signal asks us to leave instead."""
        deadline = time.monotonic() + seconds
        harmless = (signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH)
        while True:
            info = self._signals.wait(max(0.0, deadline - time.monotonic()))
            if info is None:
                return True
            if info.si_signo == signal.SIGTSTP:
                stop_ourselves(with_group=False)
            elif info.si_signo not in harmless:
                return False
