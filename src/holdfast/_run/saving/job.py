"""The trainer's side of a SLURM job: its keeper finds out why a stop came, and requeues the job."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from typing import Any

from holdfast import _errors
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.slurm.job import find_job
from holdfast._errors import Stopped
from holdfast._run.saving.keeper_client import KeeperClient
from holdfast._settings import Settings
from holdfast._text import say

_ANSWER_SECONDS = 50.0  # several questions to SLURM, each with its own bound
_LOOK_SECONDS = 0.05
_OF_SCHEDULERS = (_errors.TERMINATED, _errors.REQUEUE)


def start_facts(settings: Settings) -> dict[str, Any]:
    """What the journal says of an attempt: host, job and settings."""
    facts = {"host": host_name(), "settings": asdict(settings)}
    job = find_job(variables.of_job())
    if job is None:
        return facts
    return {**facts, "job": job.id, "job_started": job.started, "restarts": job.restarts}


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
        deadline = FairDeadline(_ANSWER_SECONDS, self._keeper.keeper_pids)
        keeper = self._keeper.keeper_pid
        while kind not in self._heard and not deadline.is_over() and keeper is not None:
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
            self._keeper.check_keeper()
            if keeper != self._keeper.keeper_pid:
                keeper = self._keeper.keeper_pid  # the keeper that died had the question
                self._keeper.send("settle", **self._asked)
        return self._heard.get(kind)
