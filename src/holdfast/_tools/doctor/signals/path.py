"""Whether a signal reaches the training: sent for real, through the real launchers.

The command is started as it stands, with a probe in the place of its training. Then the signals
that end or warn a training are sent to where they come from in earnest: to the first process, to
its group as Ctrl-C is, and through SLURM to the tasks of a step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast._environment.processes.tree import is_known
from holdfast._environment.slurm.tasks import is_in_step
from holdfast._environment.variables import of_job, of_ranks
from holdfast._tools.doctor.finding import Check
from holdfast._tools.doctor.signals import probe
from holdfast._tools.doctor.signals.chain import Chain, ChainError
from holdfast._tools.doctor.signals.probed import Probe
from holdfast._tools.doctor.signals.processes import (
    CLIENTS,
    Hop,
    find_hops,
    hop_of,
    name,
    name_hop,
    own_step,
    send,
    send_through_slurm,
    started,
)
from holdfast._tools.doctor.signals.python_signals import is_deaf
from holdfast._tools.doctor.signals.target import Target, find_target
from holdfast._tools.doctor.signals.words import TO_FIRST, TO_GROUP, TO_STEP, Tried, judge

START_SECONDS = 60.0
ARRIVE_SECONDS = 5.0  # a launcher that passes a signal on does so within milliseconds
OVERALL_SECONDS = 240.0
_SETTLE_SECONDS = 0.4  # for a second delivery, and for who dies of the first
_DEAD_SECONDS = 2.0  # for a leader to pass it on to those that somebody who died has left
_LOOK_SECONDS = 0.01
# Warnings first: they should end nobody, so that one start does for both.
_ALL = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM)
_WARNINGS = ("SIGUSR1", "SIGUSR2")
_NAME = "signal path"


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
        return [Check(_NAME, "warn", "not tried: it needs Linux and its /proc")]
    where = folder or Path.cwd()
    command = list(command) or [sys.executable, "-m", "holdfast", "run", "--", "training"]
    target = find_target(command, where)
    refusal = _refuse(command, target)
    if refusal is not None:
        return [refusal]
    plan = _Plan(command, target, where, start_seconds, arrive_seconds)
    found = plan.try_all(signals or _choose(target))
    return [*found, *_check_ears(target, where)]


def check_leader_path() -> list[Check]:
    """Without a command: whether signals pass `holdfast run`, where one could use it.

    That is in a step of SLURM and in a terminal; elsewhere nothing is tried.
    """
    in_terminal = any(os.isatty(number) for number in (0, 1, 2))
    if not (in_terminal or is_in_step(of_ranks())):
        return []
    return check_signal_path(signals=(signal.SIGUSR2, signal.SIGTERM))


def _refuse(command: Sequence[str], target: Target) -> Check | None:
    """What cannot be tried without a risk that the training starts for real."""
    if target.clears:
        return Check(
            _NAME,
            "warn",
            f"not tried: with {target.clears} the probe does not reach the tasks",
            "leave it out for this test: srun passes the environment on by itself",
        )
    if target.elsewhere:
        return Check(
            _NAME,
            "warn",
            f"not tried: {target.elsewhere} starts the training where the probe does not come",
            _nearer(target.elsewhere),
        )
    if target.loses_path:
        return Check(
            _NAME,
            "warn",
            f"not tried: {target.loses_path} keeps PYTHONPATH from the training, and so the probe",
            "leave it out for this test, or write PYTHONPATH=…:$PYTHONPATH there",
        )
    if target.names or target.scripts or target.program_at is not None:
        return None
    if shutil.which(command[0]) is None and "/" not in command[0]:
        return Check(
            _NAME,
            "fail",
            f"{command[0]}: there is no such program",
            "see whether its environment has to be activated, or its module loaded",
        )
    return Check(
        _NAME,
        "warn",
        f"not tried: in `{' '.join(command)[:80]}` there is no Python script to stand in for",
        "name the training in the command, as in: holdfast doctor -- srun python train.py",
    )


def _nearer(program: str) -> str:
    """How the rest of the command can be tried all the same."""
    if program == "sbatch":
        return "in an allocation (salloc): holdfast doctor -- bash job.sbatch"
    return f"try it behind {program}, where the training runs: {program} … holdfast doctor -- …"


def _choose(target: Target) -> Sequence[signal.Signals]:
    """All, or only the warning that the job's script has chosen."""
    if target.warning is None or f"SIG{target.warning.name}" not in signal.Signals.__members__:
        return _ALL
    chosen = signal.Signals[f"SIG{target.warning.name}"]
    return tuple(dict.fromkeys([chosen, *(each for each in _ALL if each.name not in _WARNINGS)]))


def _check_ears(target: Target, folder: Path) -> list[Check]:
    """Whether the training would do something about a signal, once it arrives."""

    def read(name: str) -> str | None:
        with contextlib.suppress(OSError, ValueError):
            return (folder / name).read_text(errors="replace")
        return None

    deaf = [each for each in target.names if each.endswith(".py") and is_deaf(each, read)]
    if not deaf:
        return []
    return [
        Check(
            "signal handlers",
            "warn",
            f"{deaf[0]} handles no signal: it dies of the first that arrives, unsaved",
            "open a run in it: with holdfast.Run(…) as run:",
        )
    ]


class _Plan:
    """The signals one after the other, on as many starts of the command as they need."""

    def __init__(
        self,
        command: Sequence[str],
        target: Target,
        folder: Path,
        start_seconds: float,
        arrive_seconds: float,
    ) -> None:
        self._command = command
        self._target = target
        self._folder = folder
        self._start_seconds = start_seconds
        self._arrive_seconds = arrive_seconds
        self._deadline = time.monotonic() + OVERALL_SECONDS
        self._checks: list[Check] = []

    def try_all(self, signals: Sequence[signal.Signals]) -> list[Check]:
        left = list(signals)
        while left:
            if time.monotonic() > self._deadline:
                names = ", ".join(each.name for each in left)
                self._checks.append(Check(_NAME, "warn", f"no time was left for {names}"))
                break
            try:
                left = self._try_on_one_chain(left)
            except ChainError as error:
                self._checks.append(Check(_NAME, error.state, error.found, error.remedy))
                break
        return self._checks

    def _try_on_one_chain(self, left: list[signal.Signals]) -> list[signal.Signals]:
        """Those that are left when the chain is no longer what it was."""
        seconds = self._start_seconds + 6 * (self._arrive_seconds + 1)
        chain = Chain(
            self._command,
            self._target,
            "signals",
            seconds=seconds,
            folder=self._folder,
            has_terminal=left[0] == signal.SIGINT,  # what happens is decided by the terminal
        )
        with chain:
            probes = chain.await_probes(self._start_seconds)
            while left:
                number = left.pop(0)
                route = self._route(number, probes)
                if route is None:
                    continue
                tried = _Attempt(chain, probes, number, route, self._target).follow(
                    self._arrive_seconds
                )
                in_job = route == TO_STEP or bool(of_job().get("SLURM_JOB_ID"))
                self._checks.append(judge(tried, self._wanted(in_job), in_job=in_job))
                is_as_before = not tried.missed and not tried.gone and tried.status is None
                if not is_as_before or not left or left[0].name not in _WARNINGS:
                    break
        return left

    def _wanted(self, in_job: bool) -> set[str]:
        """The signals without which work is lost: of a warning nobody asks for, it is not."""
        warning = self._target.warning
        if warning is not None:
            return {"SIGTERM", f"SIG{warning.name}"}
        return {"SIGTERM", *(_WARNINGS if in_job else ())}

    def _route(self, number: signal.Signals, probes: Sequence[Probe]) -> str | None:
        """Where this signal comes from in earnest; None if from nowhere."""
        is_step = probes[0].step not in ("", own_step())
        if number == signal.SIGINT:
            return None if is_step else TO_GROUP  # nobody presses keys in a batch job
        warning = self._target.warning
        to_batch = warning is not None and warning.to_batch and number.name == f"SIG{warning.name}"
        return TO_STEP if is_step and not to_batch else TO_FIRST


class _Attempt:
    """One signal on one chain."""

    def __init__(
        self,
        chain: Chain,
        probes: Sequence[Probe],
        number: signal.Signals,
        route: str,
        target: Target,
    ) -> None:
        self._chain = chain
        self._probes = list(probes)
        self._number = number
        self._route = route
        self._before = {each.key: len(each.told) for each in chain.probes()}
        above = probes[0].here["above"]
        local, below = find_hops(above, chain.first, self._beside())
        before_client = [hop.pid for hop in local]
        self._hops = below if route == TO_STEP else [*local, *below]
        script = str(probes[0].here["script"]).rpartition("/")[2]
        label = script if target.program_at is None else "the training"
        self._hops[-1] = Hop(above[0]["pid"], above[0]["started"], label, "training")
        # What was exec'ed since has other words; what it does with signals may have changed too.
        self._hops = [self._again(hop) for hop in self._hops[:-1]] + self._hops[-1:]
        is_here = probes[0].here["host"] == os.uname().nodename
        self._local = [hop for hop in self._hops[:-1] if is_here or hop.pid in before_client]
        self._tried = Tried(
            number,
            route,
            label,
            self._hops,
            {},
            scripts=target.scripts,
            python=str(probes[0].here["python"]) if is_here else "",
        )

    def _beside(self) -> list[dict[str, object]]:
        for pid in self._chain.family():
            if name(pid) in CLIENTS:
                return probe.above(pid)
        return []

    def _again(self, hop: Hop) -> Hop:
        now = probe.process(hop.pid)
        return hop_of(now) if now is not None and now["started"] == hop.started else hop

    def follow(self, seconds: float) -> Tried:
        began, wall = time.monotonic(), time.time()
        self._send()
        deadline = began + seconds
        settles: float | None = None
        while time.monotonic() < min(deadline, settles or deadline):
            self._look(wall)
            is_over = not self._tried.missed or self._tried.living == 0
            if is_over and settles is None:
                settles = time.monotonic() + _SETTLE_SECONDS
            elif self._tried.gone and settles is None:
                deadline = min(deadline, time.monotonic() + _DEAD_SECONDS)
            time.sleep(_LOOK_SECONDS)
        self._look(wall)
        self._tried.status = self._chain.process.poll()
        self._tried.asked = self._chain.asked()
        return self._tried

    def _send(self) -> None:
        if self._route == TO_STEP:
            refused = send_through_slurm(self._probes[0].step, self._number)
            if refused:
                raise ChainError(
                    f"scancel could not send {self._number.name}: {refused}",
                    "see whether `scontrol ping` answers",
                )
        elif self._route == TO_GROUP:
            self._chain.press_ctrl_c()
        else:
            send(self._chain.first, self._number)

    def _look(self, wall: float) -> None:
        tried = self._tried
        told = {each.key: each for each in self._chain.probes()}
        latest = wall
        senders, instead = list(tried.senders), set()
        is_numbered = len({one.rank for one in self._probes}) == len(self._probes)
        for at, one in enumerate(self._probes):
            news = told[one.key].told[self._before.get(one.key, 0) :] if one.key in told else []
            got = [each for each in news if each.get("name") == self._number.name]
            tried.counts[one.rank if is_numbered else at] = len(got)
            latest = max([latest, *(each["time"] for each in got[:1])])
            for each in news:
                if each["what"] == "gone":
                    self._note_gone(each["pid"])
                elif each["what"] == "signal" and not _is_hangup(each):
                    instead.add(each["name"])
            for each in got:
                sender = each.get("sender")
                label = name_hop(sender["words"], sender["name"])[0] if sender else "the system"
                if label not in senders:
                    senders.append(label)
        tried.senders, tried.instead = senders, sorted(instead - {self._number.name})
        if not tried.missed:
            tried.seconds = latest - wall
        for hop in self._local:
            if started(hop.pid) != hop.started:
                self._note_gone(hop.pid)
        if all(one.here["host"] == os.uname().nodename for one in self._probes):
            tried.living = sum(self._lives(each) for each in self._probes)
        else:
            tried.living = None

    def _lives(self, one: Probe) -> bool:
        return started(one.pid) == int(one.here["above"][0]["started"])

    def _note_gone(self, pid: int) -> None:
        if pid in [hop.pid for hop in self._hops[:-1]] and pid not in self._tried.gone:
            self._tried.gone.append(pid)


def _is_hangup(told: dict[str, Any]) -> bool:
    """By the kernel, as our terminal has lost its first process: of the test, not of the chain."""
    return bool(told["name"] == "SIGHUP" and told["code"] > 0)
