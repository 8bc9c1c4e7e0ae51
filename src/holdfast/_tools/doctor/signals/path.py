"""Whether a signal reaches the training: sent for real through the real launchers, and observed.

Each signal is sent as it comes in production: to the first process, to its group as Ctrl-C, or
through SLURM to the tasks of a step.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.threads import name_of
from holdfast._environment.processes.tree import is_known
from holdfast._environment.slurm.controller import scancel
from holdfast._environment.slurm.job import is_in_step
from holdfast._environment.variables import of_job, of_ranks
from holdfast._tools.doctor.check import Check, slow
from holdfast._tools.doctor.signals import explain, probe
from holdfast._tools.doctor.signals.chain import (
    CLIENTS,
    Chain,
    ChainError,
    Probe,
    own_step,
    send,
    started,
)
from holdfast._tools.doctor.signals.target import Target, find_target
from holdfast._tools.lint.signal_handlers import has_no_handler

START_SECONDS = 60.0
ARRIVE_SECONDS = 5.0  # a launcher that passes a signal on does so within milliseconds
OVERALL_SECONDS = 240.0
_SETTLE_SECONDS = 0.4  # for a second delivery, and for processes that die of the first
_DEAD_SECONDS = 2.0  # for `holdfast run` to pass it on below a process that has died
_POLL_SECONDS = 0.01
# Warnings first: they should end no process, so that one start is enough for both.
_ALL = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM)
_WARNINGS = ("SIGUSR1", "SIGUSR2")
_check = partial(Check, "signal path")


def check_signal_path(
    command: Sequence[str] = (),
    *,
    folder: Path | None = None,
    signals: Sequence[signal.Signals] | None = None,
    start_seconds: float = START_SECONDS,
    arrive_seconds: float = ARRIVE_SECONDS,
) -> list[Check]:
    """Send the real signals through the command; without one, through `holdfast run` itself."""
    if not sys.platform.startswith("linux") or not is_known():
        return [_check("warn", "not tried: it needs Linux and its /proc")]
    command = list(command) or [sys.executable, "-m", "holdfast", "run", "--", "training"]
    target = find_target(command, folder or Path.cwd())
    refusal = _refuse(target)
    if refusal is not None:
        return [refusal]
    trials = _Trials(target, start_seconds, arrive_seconds)
    return [*trials.run(signals or _choose(target)), *_check_handlers(target)]


def check_leader_path() -> list[Check]:
    """Without a command, in a SLURM step or a terminal: whether signals pass `holdfast run`."""
    in_terminal = any(os.isatty(number) for number in (0, 1, 2))
    if not (in_terminal or is_in_step(of_ranks())):
        return []
    return check_signal_path(signals=(signal.SIGUSR2, signal.SIGTERM))


def _refuse(target: Target) -> Check | None:
    """What cannot be tried without a risk that the training starts for real."""
    if target.refusal is not None:
        found, remedy = target.refusal
        return _check("warn", f"not tried: {found}", remedy)
    if target.names or target.scripts or target.program_at is not None:
        return None
    program = target.command[0]
    if shutil.which(program) is None and "/" not in program:
        remedy = "see whether its environment has to be activated, or its module loaded"
        return _check("fail", f"{program}: there is no such program", remedy)
    words = " ".join(target.command)[:80]
    return _check(
        "warn",
        f"not tried: in `{words}` there is no Python script to stand in for",
        "name the training in the command, as in: holdfast doctor -- srun python train.py",
    )


def _choose(target: Target) -> Sequence[signal.Signals]:
    """All, or with the one warning that the job's script has chosen."""
    chosen = target.warning_name
    if chosen not in signal.Signals.__members__:
        return _ALL
    others = [each for each in _ALL if each.name not in (chosen, *_WARNINGS)]
    return (signal.Signals[chosen], *others)


def _check_handlers(target: Target) -> list[Check]:
    for name in target.names:
        if name.endswith(".py") and has_no_handler(name, target.read):
            found = f"{name} handles no signal: it dies of the first that arrives, unsaved"
            remedy = "open a run in it: with holdfast.Run(…) as run:"
            return [Check("signal handlers", "warn", found, remedy)]
    return []


@dataclass
class _Trials:
    """The signals one after the other, on as many starts of the command as they need."""

    _target: Target
    _start_seconds: float
    _arrive_seconds: float
    _checks: list[Check] = field(default_factory=list)

    def run(self, signals: Sequence[signal.Signals]) -> list[Check]:
        deadline = time.monotonic() + OVERALL_SECONDS
        left = list(signals)
        try:
            while left and time.monotonic() < deadline:
                left = self._run_on_one_chain(left)
        except ChainError as error:
            return [*self._checks, _check(error.state, error.found, error.remedy)]
        if left:
            names = ", ".join(each.name for each in left)
            self._checks.append(_check("warn", f"no time was left for {names}"))
        return self._checks

    def _run_on_one_chain(self, left: list[signal.Signals]) -> list[signal.Signals]:
        """Returns the signals that are left when one of them has changed the chain."""
        chain = Chain(
            self._target,
            "signals",
            seconds=self._start_seconds + 6 * (self._arrive_seconds + 1),
            has_terminal=left[0] == signal.SIGINT,  # the terminal decides who receives it
        )
        with chain:
            probes = chain.await_probes(self._start_seconds)
            is_step = probes[0].step not in ("", own_step())
            while left:
                number = left.pop(0)
                if number == signal.SIGINT and is_step:
                    continue  # a batch job has no keyboard
                route = self._route(number, is_step)
                observation = _Observation(chain, probes, number, route)
                tried, deadline = observation.run(self._arrive_seconds)
                in_job = route == explain.TO_STEP or bool(of_job().get("SLURM_JOB_ID"))
                check = explain.judge(tried, self._wanted(in_job), in_job=in_job)
                if tried.missed and not tried.lost and deadline.is_over():
                    what = f"it has not arrived within {self._arrive_seconds:.0f} s"
                    check = slow(check.name, what, deadline) or check
                self._checks.append(check)
                is_as_before = not tried.missed and not tried.gone and tried.status is None
                if not is_as_before or not left or left[0].name not in _WARNINGS:
                    break
        return left

    def _wanted(self, in_job: bool) -> set[str]:
        """The signals without which work is lost: SIGTERM, and the warnings of this job."""
        if self._target.warning_name:
            return {"SIGTERM", self._target.warning_name}
        return {"SIGTERM", *(_WARNINGS if in_job else ())}

    def _route(self, number: signal.Signals, is_step: bool) -> str:
        if number == signal.SIGINT:
            return explain.TO_GROUP
        target = self._target
        to_batch = number.name == target.warning_name and target.warns_batch
        return explain.TO_STEP if is_step and not to_batch else explain.TO_FIRST


class _Observation:
    def __init__(
        self, chain: Chain, probes: Sequence[Probe], number: signal.Signals, route: str
    ) -> None:
        self._chain = chain
        self._probes = list(probes)
        self._lines_before = {each.key: len(each.lines) for each in chain.probes()}
        here, target = probes[0].here, chain.target
        clients = [pid for pid in chain.family() if name_of(pid) in CLIENTS]
        above_client = probe.above(clients[0]) if clients else []
        local, below = explain.find_hops(here["above"], chain.first, above_client)
        *above, training = below if route == explain.TO_STEP else [*local, *below]
        # A process may have called exec since: its words and its handlers are others then.
        for at, hop in enumerate(above):
            now = probe.process(hop.pid)
            if now is not None and now["started"] == hop.started:
                above[at] = explain.hop_of(now)
        script = str(here["script"]).rpartition("/")[2]
        label = script if target.program_at is None else "the training"
        hops = [*above, replace(training, label=label, kind="training")]
        is_here = here["host"] == os.uname().nodename
        local_pids = [hop.pid for hop in local]
        self._local = [hop for hop in above if is_here or hop.pid in local_pids]
        python = str(here["python"]) if is_here else ""
        self._tried = explain.Tried(number, route, hops, {}, scripts=target.scripts, python=python)

    def run(self, seconds: float) -> tuple[explain.Tried, FairDeadline]:
        """Send the signal, and observe the chain until it has settled."""
        tried, deadline, sent_at = self._tried, self._chain.deadline(seconds), time.time()
        self._send()
        settles, has_lost = math.inf, False
        while time.monotonic() < settles and not deadline.is_over():
            self._observe(sent_at)
            if settles == math.inf and (not tried.missed or tried.living == 0):
                settles = time.monotonic() + _SETTLE_SECONDS
            elif settles == math.inf and tried.gone and not has_lost:
                has_lost = True
                deadline = self._chain.deadline(_DEAD_SECONDS)
            time.sleep(_POLL_SECONDS)
        self._observe(sent_at)
        tried.status, tried.asked = self._chain.process.poll(), self._chain.asked()
        return tried, deadline

    def _send(self) -> None:
        name = self._tried.name
        if self._tried.route == explain.TO_STEP:
            # As SLURM's warning: to the first process of each task.
            refused = scancel("--signal", name.removeprefix("SIG"), self._probes[0].step)
            if refused:
                found = f"scancel could not send {name}: {refused}"
                raise ChainError(found, "see whether `scontrol ping` answers")
        elif self._tried.route == explain.TO_GROUP and self._chain.terminal is not None:
            self._chain.terminal.press_ctrl_c()
        else:
            send(self._chain.first, self._tried.number)

    def _observe(self, sent_at: float) -> None:
        tried = self._tried
        reports = {each.key: each.lines for each in self._chain.probes()}
        latest, instead = sent_at, set()
        has_ranks = len({one.rank for one in self._probes}) == len(self._probes)
        for at, one in enumerate(self._probes):
            news = reports.get(one.key, [])[self._lines_before.get(one.key, 0) :]
            got = [each for each in news if each.get("name") == tried.name]
            tried.counts[one.rank if has_ranks else at] = len(got)
            latest = max([latest, *(each["time"] for each in got[:1])])
            for each in news:
                if each["what"] == "gone":
                    self._record_gone(each["pid"])
                elif each["what"] == "signal":
                    instead.add(each["name"])
        tried.instead = sorted(instead - {tried.name})
        if not tried.missed:
            tried.seconds = latest - sent_at
        for hop in self._local:
            if started(hop.pid) != hop.started:
                self._record_gone(hop.pid)
        tried.living = None
        if all(one.here["host"] == os.uname().nodename for one in self._probes):
            starts = [(one.key[1], int(one.here["above"][0]["started"])) for one in self._probes]
            tried.living = sum(started(pid) == began for pid, began in starts)

    def _record_gone(self, pid: int) -> None:
        if pid in [hop.pid for hop in self._tried.above] and pid not in self._tried.gone:
            self._tried.gone.append(pid)
