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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.threads import name_of
from holdfast._environment.processes.tree import is_known
from holdfast._environment.slurm.controller import scancel
from holdfast._environment.variables import of_job
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
    command: Sequence[str],
    *,
    folder: Path | None = None,
    signals: Sequence[signal.Signals] | None = None,
    start_seconds: float = START_SECONDS,
    arrive_seconds: float = ARRIVE_SECONDS,
) -> list[Check]:
    """Send the real signals through the command, on as many starts of it as they need."""
    if not sys.platform.startswith("linux") or not is_known():
        return [_check("warn", "not tried: it needs Linux and its /proc")]
    target = find_target(command, folder or Path.cwd())
    refusal = _refuse(target)
    if refusal is not None:
        return [refusal]
    checks, left = list[Check](), list(signals or _choose(target))
    deadline = time.monotonic() + OVERALL_SECONDS
    try:
        while left and time.monotonic() < deadline:
            _try_on_one_chain(target, left, checks, start_seconds, arrive_seconds)
    except ChainError as error:
        return [*checks, _check(error.state, error.found, error.remedy), *_check_handlers(target)]
    if left:
        names = ", ".join(each.name for each in left)
        checks.append(_check("warn", f"no time was left for {names}"))
    return [*checks, *_check_handlers(target)]


def _refuse(target: Target) -> Check | None:
    """What cannot be tried without a risk that the training starts for real."""
    if target.refusal is not None:
        found, remedy = target.refusal
        return _check("warn", f"not tried: {found}", remedy)
    if target.names or target.scripts:
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


def _try_on_one_chain(
    target: Target,
    left: list[signal.Signals],
    checks: list[Check],
    start_seconds: float,
    arrive_seconds: float,
) -> None:
    """Take signals from `left` until one of them has changed the chain."""
    seconds = start_seconds + 6 * (arrive_seconds + 1)
    has_terminal = left[0] == signal.SIGINT  # the terminal decides who receives it
    with Chain(target, "signals", seconds=seconds, has_terminal=has_terminal) as chain:
        probes = chain.await_probes(start_seconds)
        is_step = probes[0].step not in ("", own_step())
        while left:
            number = left.pop(0)
            if number == signal.SIGINT and is_step:
                continue  # a batch job has no keyboard
            to_batch = number.name == target.warning_name and target.warns_batch
            route = explain.TO_STEP if is_step and not to_batch else explain.TO_FIRST
            if number == signal.SIGINT:
                route = explain.TO_GROUP
            tried, deadline = _try_signal(chain, probes, number, route, arrive_seconds)
            in_job = route == explain.TO_STEP or bool(of_job().get("SLURM_JOB_ID"))
            # The signals without which work is lost: SIGTERM, and the warnings of this job.
            wanted = {"SIGTERM", target.warning_name} if target.warning_name else {"SIGTERM"}
            if in_job and not target.warning_name:
                wanted |= set(_WARNINGS)
            check = explain.judge(tried, wanted, in_job=in_job)
            if tried.missed and not tried.lost and deadline.is_over():
                what = f"it has not arrived within {arrive_seconds:.0f} s"
                check = slow(check.name, what, deadline) or check
            checks.append(check)
            is_as_before = not tried.missed and not tried.gone and tried.status is None
            if not is_as_before or not left or left[0].name not in _WARNINGS:
                break


def _try_signal(
    chain: Chain, probes: Sequence[Probe], number: signal.Signals, route: str, seconds: float
) -> tuple[explain.Tried, FairDeadline]:
    """Send the signal, and observe the chain until it has settled."""
    before = {each.key: len(each.lines) for each in chain.probes()}
    tried, local = _find_way(chain, probes, number, route)
    deadline, sent_at = chain.deadline(seconds), time.time()
    if route == explain.TO_STEP:
        # As SLURM's warning: to the first process of each task.
        if refused := scancel("--signal", tried.name.removeprefix("SIG"), probes[0].step):
            found = f"scancel could not send {tried.name}: {refused}"
            raise ChainError(found, "see whether `scontrol ping` answers")
    elif route == explain.TO_GROUP and chain.terminal is not None:
        chain.terminal.press_ctrl_c()
    else:
        send(chain.first, number)
    settles, has_lost = math.inf, False
    while True:
        is_over = time.monotonic() >= settles or deadline.is_over()
        news = {each.key: each.lines[before.get(each.key, 0) :] for each in chain.probes()}
        _observe(tried, probes, local, news, sent_at)
        if is_over:
            break
        if settles == math.inf and (not tried.missed or tried.living == 0):
            settles = time.monotonic() + _SETTLE_SECONDS
        elif settles == math.inf and tried.gone and not has_lost:
            has_lost, deadline = True, chain.deadline(_DEAD_SECONDS)
        time.sleep(_POLL_SECONDS)
    tried.status, tried.asked = chain.process.poll(), chain.asked()
    return tried, deadline


def _find_way(
    chain: Chain, probes: Sequence[Probe], number: signal.Signals, route: str
) -> tuple[explain.Tried, list[explain.Hop]]:
    """The hops down to the training; and those above it on this host."""
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
    label = str(here["script"]).rpartition("/")[2]
    hops = [*above, replace(training, label=label, kind="training")]
    is_here = here["host"] == os.uname().nodename
    local_pids = [hop.pid for hop in local]
    tried = explain.Tried(number, route, hops, {}, scripts=target.scripts)
    return tried, [hop for hop in above if is_here or hop.pid in local_pids]


def _observe(
    tried: explain.Tried,
    probes: Sequence[Probe],
    local: Sequence[explain.Hop],
    news: Mapping[tuple[str, int], list[dict[str, Any]]],
    sent_at: float,
) -> None:
    """Which ranks have the signal, and which hops are gone, by the news of the probes."""
    latest, instead, gone = sent_at, set[str](), list[int]()
    has_ranks = len({one.rank for one in probes}) == len(probes)
    for at, one in enumerate(probes):
        events = news.get(one.key, [])
        times = [each["time"] for each in events if each.get("name") == tried.name]
        tried.counts[one.rank if has_ranks else at] = len(times)
        latest = max([latest, *times[:1]])
        gone += [each["pid"] for each in events if each["what"] == "gone"]
        instead |= {each["name"] for each in events if each["what"] == "signal"}
    tried.instead = sorted(instead - {tried.name})
    if not tried.missed:
        tried.seconds = latest - sent_at
    gone += [hop.pid for hop in local if started(hop.pid) != hop.started]
    above = [hop.pid for hop in tried.above]
    tried.gone = list(dict.fromkeys([*tried.gone, *(pid for pid in gone if pid in above)]))
    tried.living = None
    if all(one.here["host"] == os.uname().nodename for one in probes):
        starts = [(one.key[1], int(one.here["above"][0]["started"])) for one in probes]
        tried.living = sum(started(pid) == began for pid, began in starts)
