"""The trainer's client of its keeper: sends orders and questions, and replaces a keeper that dies.

Where there is no keeper (no Linux, or it cannot be started) `has_keeper` is False, and the trainer
writes its checkpoints itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._adapters.metrics import ready
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.slurm.job import find_job
from holdfast._errors import HoldfastError, SaveFailed, SettingsError, Stopped
from holdfast._keeper.metric_batches import Logged
from holdfast._run.saving.pulse import OomScore, Pulse
from holdfast._run.signals.handlers import uninterruptible
from holdfast._settings import Settings, parse_seconds
from holdfast._store.commit.write import Policy
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import BEAT_SECONDS, write_json
from holdfast._store.folder.requests import stop_from_file, take_requests
from holdfast._store.memory.control import (
    BOUNDARY_NS,
    OPENS,
    SAVES,
    WORK,
    at_work,
    private_words,
)
from holdfast._text import say

if TYPE_CHECKING:
    from holdfast._run.saving.launch import KeeperLink, KeeperPlan
    from holdfast._run.saving.snapshots import Snapshots, Taken
    from holdfast._store.memory.arena import Arena
    from holdfast._store.memory.backing import Backing

_LOOK_SECONDS = 0.1
_GIVE_UP_AFTER = 3
_SOON_SECONDS = 5.0
_LONG_STEP_NS = 10**9
_ANSWER_LOOK_SECONDS = 0.05


class Handle:
    """A checkpoint that was asked for.

    >>> handle = run.save()  # at the next boundary
    >>> handle.wait()  # doctest: +SKIP
    """

    def __init__(self, reason: str, *, is_last: bool = False) -> None:
        self.reason = reason
        self.is_last = is_last  # the run ends with it: older ones need not be written
        self.step: int | None = None  # set at the boundary that takes it
        self.error: str | None = None
        self.attend: Callable[[], None] | None = None  # called while the trainer waits
        self._done = threading.Event()
        self.trainer: threading.Thread | None = None  # the thread that passes the boundaries
        self.words: Any = None  # shared with the keeper: show that it waits

    @property
    def done(self) -> bool:
        """True when it is durable, or has failed."""
        return self._done.is_set()

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Wait until the checkpoint is durable and return its step."""
        is_trainer = threading.current_thread() is self.trainer
        if self.step is None and is_trainer and not self.done:
            raise HoldfastError(
                "wait() would wait for ever: the checkpoint is taken at the next boundary, "
                "and this thread is the one that gets there.\n"
                "Call it after the boundary, or from another thread."
            )
        if is_trainer and self.words is not None and not self.done:
            with at_work(self.words, SAVES):
                self._wait(timeout_seconds, self.attend)
        else:
            self._wait(timeout_seconds, None)
        if self.error is not None:
            raise SaveFailed(f"the checkpoint was not made: {self.error}")
        assert self.step is not None
        return self.step

    def _wait(self, timeout_seconds: float | None, attend: Callable[[], None] | None) -> None:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._done.wait(_LOOK_SECONDS if deadline is None else 0.02):
            if attend is not None:
                attend()  # this thread replaces a keeper that dies
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the checkpoint was not durable within {timeout_seconds} s")

    def resolve(self, error: str | None = None) -> None:
        self.error = error
        self._done.set()


class KeeperClient:
    """The connection to the keeper of one attempt, and the orders that are open."""

    def __init__(
        self,
        policy: Policy,
        grace_seconds: float | None,  # after a SIGTERM
        numbers: tuple[int, ...],  # of the signals that ask for a stop
        hear_run: Callable[[dict[str, Any]], None],
        ranks: dict[str, Any] | None = None,
    ) -> None:
        self.policy = policy
        self.grace_seconds = grace_seconds
        self.hear_run = hear_run
        self._is_one_of_many = ranks is not None
        self.snapshots: Snapshots | None = None
        self._link: KeeperLink | None = None
        # The slots that are being written, and the handles that wait for them.
        self._orders: dict[int, tuple[Taken, list[Handle]]] = {}
        self._numbers = itertools.count(1)  # of orders, which any thread may give
        self._salvaging: tuple[str, int] | None = None
        self._replacing = threading.RLock()
        self._started: list[float] = []
        self._quit = threading.Event()
        self._leaving: KeeperLink | None = None
        self._oom_score = OomScore()
        self.durable_sequence = 0
        self.durable_step: int | None = None
        self.words: Any = private_words()
        self._pulse: Pulse | None = None
        self.logged: Logged | None = None  # metrics for the keeper
        self.plan: KeeperPlan | None = None
        if sys.platform == "linux":
            from holdfast._run.saving.launch import KeeperPlan

            job = find_job(variables.of_job())
            self.plan = KeeperPlan(policy, grace_seconds, numbers, ranks, job)
            self.words = self.plan.control.words
            self.words[WORK] = OPENS
            self._start()
            if policy.rank == 0:
                self.logged = Logged(ready)
            self._pulse = Pulse(self.words, self._at_pulse)
        else:
            say(
                "the keeper and snapshots in memory need Linux: here the trainer writes "
                "checkpoints itself, and a kill costs the work since the last one."
            )
            threading.Thread(target=self._stand_in, name="holdfast-beat", daemon=True).start()

    @property
    def has_keeper(self) -> bool:
        return self._link is not None

    @property
    def keeper_pid(self) -> int | None:
        return self._link.pid if self._link else None

    def keeper_pids(self) -> list[int]:
        """For a FairDeadline, which does not count the time in which these wait for a processor."""
        return [self._link.pid] if self._link else []

    # -- orders ---------------------------------------------------------------

    @uninterruptible
    def send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        if self._link is not None:
            self._link.send(kind, descriptors, **fields)

    def announce(self, arena: Arena, backing: Backing) -> None:
        path = None if backing.path is None else str(backing.path)
        self.send("arena", [arena.descriptor], path=path)

    def snapshot_taken(self, taken: Taken) -> None:
        may_drop = not self._is_one_of_many  # other ranks rely on what this one holds
        place, sequence = taken.generation, taken.sequence
        self.send("snapshot", may_drop=may_drop, generation=place, sequence=sequence)

    def order(self, taken: Taken, handles: list[Handle]) -> None:
        """Have the keeper make a slot durable; then the handles are settled."""
        number = next(self._numbers)
        self._orders[number] = taken, handles
        self._send_order(number, taken, handles)

    def record_written(self, step: int, sequence: int) -> None:
        """The trainer made a step durable itself; the snapshots up to `sequence` are older."""
        self.durable_step = step
        self.durable_sequence = max(sequence, self.durable_sequence)
        self.send("wrote", step=step, sequence=sequence)

    def make_way(self) -> None:
        """The last state is about to be taken: waiting orders give up their slots."""
        self.send("last")
        if self._is_one_of_many and self.snapshots is not None:
            self.snapshots.release_slots()  # other ranks' keepers hold no slot while they wait

    def void_from(self, step: int, reason: str) -> None:
        """A rule has called everything from this step on bad."""
        if self.durable_step is not None and self.durable_step >= step:
            self.durable_step = None
        self.durable_sequence = 0  # a slot from before that step may be older
        self.send("void", step=step, reason=reason)

    def _send_logged(self) -> None:
        """Send the logged metrics; from the pulse's thread, and at the end."""

        def post(metrics: dict[str, Any]) -> bool:
            link, is_last = self._link, self._quit.is_set()  # the last message may not be dropped
            return link is not None and link.send("metrics", may_drop=not is_last, m=metrics)

        if self.logged is not None:
            self.logged.send(post)

    def salvage(self, arena: Arena, path: str, sequence: int) -> None:
        """Have the keeper make durable a state that an earlier attempt left in memory."""
        self._salvaging = (path, sequence)
        self.send("salvage", [arena.descriptor], path=path, sequence=sequence)

    def _salvage_again(self) -> None:
        """For a new keeper: as long as the file exists, it is not durable."""
        if self._salvaging is None:
            return
        path, sequence = self._salvaging
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self.send("salvage", [descriptor], path=path, sequence=sequence)
            os.close(descriptor)

    def wait(self, handle: Handle) -> None:
        """Wait for an order, replacing a keeper that dies meanwhile; SaveFailed if it fails."""
        with at_work(self.words, SAVES):
            while not handle.done:
                with contextlib.suppress(TimeoutError):
                    handle.wait(_LOOK_SECONDS)
                self.check_keeper()
                if not self.has_keeper and not handle.done:
                    handle.resolve("the keeper died and could not be replaced")
        handle.wait()

    def wait_for_answer(
        self,
        changed: threading.Condition,
        is_there: Callable[[], bool],
        seconds: float,
        ask_again: Callable[[], None],
    ) -> None:
        """Wait until an answer is there; a keeper that replaces one that died is asked again."""
        deadline, keeper = FairDeadline(seconds, self.keeper_pids), self.keeper_pid
        while not is_there() and not deadline.is_over() and self.has_keeper:
            with changed:
                if not is_there():
                    changed.wait(_ANSWER_LOOK_SECONDS)
            self.check_keeper()
            if keeper != self.keeper_pid:
                keeper = self.keeper_pid  # the keeper that died may not have passed it on
                ask_again()

    def check_keeper(self) -> None:
        """Replace a keeper that died, and give the new one all open orders."""
        if self._pulse is not None:
            self._pulse.note()
        with self._replacing:
            self._replace_if_dead()

    def _at_pulse(self) -> None:
        """In the pulse's thread, about once a second."""
        self._send_logged()
        words = self.words
        stands = time.monotonic_ns() - words[BOUNDARY_NS] > _LONG_STEP_NS and not words[WORK]
        if not (self._is_one_of_many and stands and self._replacing.acquire(blocking=False)):
            return
        # A step may wait in a collective for a rank that waits for this one's keeper to answer:
        # no boundary would come that replaces it.
        try:
            if not self._quit.is_set() and not self._dies_often():
                self._replace_if_dead()
        finally:
            self._replacing.release()

    def _dies_often(self) -> bool:
        recent = [at for at in self._started if time.monotonic() - at < _SOON_SECONDS]
        return len(recent) >= _GIVE_UP_AFTER

    def _replace_if_dead(self) -> None:
        link = self._link
        if link is None:
            return
        if link.is_alive():
            link.flush()
            return
        how = f"the keeper (pid {link.pid}) {link.how_it_died()}"
        link.close()
        self._link = None
        if self._dies_often():
            how = f"{how}, and so were the ones before it"
            if not self._is_one_of_many:
                self._go_on_alone(how)
                return
            raise HoldfastError(
                f"{how}: without keepers the ranks cannot agree.\n"
                f"See {self.policy.layout.keeper_log(self.policy.attempt, self.policy.rank)}"
            )
        try:
            self._start()
        except OSError as error:
            self._go_on_alone(f"{how}, and another cannot be started ({error.strerror})")
            return
        say(f"{how}; started another (pid {self.keeper_pid}). Nothing is lost.")
        arena = self.snapshots.arena if self.snapshots else None
        if arena is not None:
            self.announce(*arena)
        self._salvage_again()
        for number, order in list(self._orders.items()):
            self._send_order(number, *order)

    def _go_on_alone(self, why: str) -> None:
        log = self.policy.layout.keeper_log(self.policy.attempt)
        say(f"{why}: going on without. The trainer writes its checkpoints itself. See {log}")
        for _, handles in self._orders.values():
            for handle in handles:
                handle.resolve("the keeper died")
        self._orders.clear()
        threading.Thread(target=self._stand_in, name="holdfast-beat", daemon=True).start()

    def close(self, *, leaving: tuple[int, float] | None = None) -> None:
        """Let the keeper finish and go; with `leaving` it stays until this process is gone."""
        self._quit.set()
        self._send_logged()
        with self._replacing:
            link, self._link = self._link, None
        if link is not None:
            if leaving is None:
                # One of several goes when the others need it no more: all is known to be durable.
                link.say_goodbye(waits=not self._is_one_of_many)
            else:
                link.send("leaving", status=leaving[0], seconds=leaving[1])
                self._leaving = link
        elif self.snapshots is not None and self.snapshots.arena is not None:
            self.snapshots.arena[1].remove()
        if self._pulse is not None:
            self._pulse.stop()
        self._oom_score.take_back()
        if leaving is None and self.plan is not None:
            self.plan.dump.remove()  # a run that could not be opened is not released

    def cancel_leaving(self) -> None:
        """The process goes on: the keeper need not wait for its end."""
        if self._leaving is not None:
            self._leaving.say_goodbye()

    # -- inside -----------------------------------------------------------------

    def _start(self) -> None:
        from holdfast._run.saving.launch import KeeperLink

        self._started.append(time.monotonic())
        self._oom_score.take_back()  # the keeper inherits the score from before
        assert self.plan is not None
        self._link = KeeperLink(self.plan, self._hear)
        self._oom_score.offer()

    def _send_order(self, number: int, taken: Taken, handles: list[Handle]) -> None:
        self.send(
            "persist",
            order=number,
            generation=taken.generation,
            sequence=taken.sequence,
            reason=handles[0].reason,
            last=any(handle.is_last for handle in handles),
        )

    def _hear(self, message: dict[str, Any]) -> None:
        """In the thread that receives: resolve orders, pass on the rest."""
        number = message.get("order")
        if message["kind"] == "waits":
            order = self._orders.get(message["order"])
            if order is not None and self.snapshots is not None:
                # The newest slot is written instead.
                self.snapshots.release_slot(order[0].sequence)
            return
        if number is not None:
            order = self._orders.pop(number, None)
            if order is not None:
                self._resolve(*order, message)
        if not self._quit.is_set():
            self.hear_run(message)

    def _resolve(self, taken: Taken, handles: list[Handle], message: dict[str, Any]) -> None:
        if self.snapshots is not None:
            self.snapshots.release_slot(taken.sequence)
        # An order that waited writes the newest slot of that moment.
        written = message.get("sequence", taken.sequence)
        if message["kind"] == "durable" and written > self.durable_sequence:
            self.durable_sequence, self.durable_step = written, message["step"]
        for handle in handles:
            handle.resolve(message.get("error"))

    def _stand_in(self) -> None:
        """Where there is no keeper, a thread writes the heartbeat and polls for requests."""
        layout, attempt = self.policy.layout, self.policy.attempt
        beat = 0
        while not self._quit.wait(_LOOK_SECONDS):
            beat += 1
            if beat % int(BEAT_SECONDS / _LOOK_SECONDS) == 1:
                record = {
                    "beat": beat,
                    "keeper": asdict(of_process()),
                    "time": time.time(),
                    "step": int(self.words[0]),
                    "durable_step": self.durable_step,
                }
                with contextlib.suppress(OSError):
                    write_json(layout.heartbeat(attempt), record, durable=False)
            self.hear_run({"kind": "tick"})
            for kind, details in take_requests(layout, attempt):
                told = {"kind": kind, **details}
                journal.append(layout.journal, "request", attempt=attempt, **told)
                if kind == "stacks":
                    continue  # `holdfast` reads the stacks itself where there is no keeper
                message: dict[str, Any] = {"kind": "request", "request": kind, "details": details}
                if kind == "stop" and details.get("now"):
                    reason = stop_from_file(details).reason
                    message = {"kind": "leave", "status": _errors.PERSON, "reason": reason}
                self.hear_run({**message, "step": self.durable_step})


# -- The job of a single process: its keeper finds out why a stop came, and requeues the job -------


_ANSWER_SECONDS = 50.0  # several questions to SLURM, each with its own bound
_OF_SCHEDULERS = (_errors.TERMINATED, _errors.REQUEUE)


class JobClient:
    """Asks the keeper of a single process about its job when it stops."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._heard: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._asked: dict[str, Any] = {}
        self.is_requeued = False

    def hear(self, message: dict[str, Any]) -> bool:
        """In the thread that receives: False if the message is no answer."""
        if message["kind"] not in ("settled", "requeued"):
            return False
        with self._changed:
            self._heard[message["kind"]] = message
            self._changed.notify_all()
        return True

    def resolve_stop(self, stopped: Stopped, number: int, durable_step: int | None) -> None:
        """Find out why the run was asked to stop, and set status and reason by it."""
        if stopped.status not in _OF_SCHEDULERS:
            return
        if stopped.status == _errors.TERMINATED:
            number = signal.SIGTERM  # outside the loop it acted at once
        told = {"reason": stopped.reason, "status": stopped.status, "signal": number}
        self._asked = {**told, "step": durable_step}
        self._keeper.send("settle", **self._asked)
        found = self._wait_for("settled")
        if found is not None:
            stopped.change(found["status"], found["reason"])

    def requeue(self, stopped: Stopped) -> None:
        """Wait until the job is requeued, and say so: its keeper may not outlive this process."""
        if stopped.status != _errors.REQUEUE:
            return
        found = self._wait_for("requeued")
        if found is None:
            say("there is no keeper to requeue the job. Submit it again to go on.")
            return
        self.is_requeued = True
        stopped.change(found["status"], stopped.reason)
        say(found["said"])

    def _wait_for(self, kind: str) -> dict[str, Any] | None:
        def ask_again() -> None:
            self._keeper.send("settle", **self._asked)

        is_there = functools.partial(self._heard.__contains__, kind)
        self._keeper.wait_for_answer(self._changed, is_there, _ANSWER_SECONDS, ask_again)
        return self._heard.get(kind)


def start_facts(settings: Settings) -> dict[str, Any]:
    """What the journal says of an attempt: host, job and settings."""
    facts = {"host": host_name(), "settings": asdict(settings)}
    job = find_job(variables.of_job())
    if job is None:
        return facts
    return {**facts, "job": job.id, "job_started": job.started, "restarts": job.restarts}


# -- Times that settings and environment give the keeper -------------------------------------------


def _seconds_in(text: str) -> float | None:
    """A variable's seconds, or its duration such as 5min; None if it is no time."""
    with contextlib.suppress(SettingsError):
        return parse_seconds(text if text[-1].isalpha() else f"{text}s", "")
    return None


def hang_policy(settings: Settings) -> dict[str, Any]:
    """How long a step may take, and whether the run leaves if it takes longer.

    Only under `holdfast run --hang-timeout` it leaves, since that restarts it.
    """
    wish = variables.text("HOLDFAST_HANG_TIMEOUT").lower()
    seconds = settings.hang_seconds
    if wish and wish != "auto" and (given := _seconds_in(wish)) is not None:
        seconds = given
    return {"hang_seconds": seconds or None, "hang_restarts": bool(wish)}


def keep_memory_of(settings: Settings, *, in_job: bool) -> float:
    """How long the arena of a dead attempt waits for the next one; 0: not at all.

    SLURM ends a task with its first process. So in a job it waits only below `holdfast run`, which
    starts the next attempt itself, and removes the arena before it leaves.
    """
    if in_job and not variables.text("HOLDFAST_LEADER"):
        return 0.0
    if settings.keep_memory is not None:
        return settings.keep_memory_seconds
    advice = "Write seconds, or a duration such as 5min; 0 keeps nothing."
    seconds = _seconds_by("HOLDFAST_KEEP_MEMORY", advice, may_be_zero=True)
    return settings.keep_memory_seconds if seconds is None else seconds


def grace_of(settings: Settings) -> float | None:
    """The time between SIGTERM and the kill, by the settings, or else by the environment."""
    if settings.grace_seconds is not None:
        return settings.grace_seconds
    advice = "Write the seconds between SIGTERM and the kill, minus a few: above 0."
    return _seconds_by("HOLDFAST_GRACE_SECONDS", advice)


def _seconds_by(name: str, advice: str, *, may_be_zero: bool = False) -> float | None:
    """A variable's seconds; None, with a line, if it is no time."""
    text = variables.text(name)
    seconds = _seconds_in(text) if text else None
    if text and (seconds is None or not (seconds > 0 or may_be_zero)):
        say(f"{name}={text!r} is not a time, and is ignored.\n{advice}")
        return None
    return seconds
