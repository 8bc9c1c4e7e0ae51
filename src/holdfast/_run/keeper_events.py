"""What an open run hears from its keeper, in the link's thread."""

from __future__ import annotations

import re
from typing import Any

from holdfast import _errors
from holdfast._errors import HoldfastError, RunIsLive, is_interactive
from holdfast._run.exit.bounded import leave_at_once
from holdfast._run.exit.record import ExitRecord
from holdfast._run.progress import Progress
from holdfast._run.ruling import Ruled
from holdfast._run.saving.job import JobSide
from holdfast._run.saving.keeper_client import Handle
from holdfast._run.saving.messages import sentence_of, uneven
from holdfast._run.saving.rank_orders import Decision
from holdfast._run.signals.guard import Guard, TimeLeft, announce_signal
from holdfast._store.folder.requests import StopRequest, stop_from_file
from holdfast._store.memory.control import IN_LOOP, MARK, REST
from holdfast._text import say, speak_as


class Hearing(Ruled):
    """The part of an open run that is told something."""

    _words: Any
    _guard: Guard
    _job: JobSide | None
    _asked: StopRequest | None
    _trouble: HoldfastError | None
    _progress: Progress
    _noted: list[int]
    _announced: bool
    _total: int | None
    _leaves_at: int | None  # the step that is being saved, as the last one
    _failure_told: tuple[str, int | None] | None = None

    def _hear_decision(self, decision: Decision) -> None:
        """All ranks will stop: say so, and leave a phase whose boundary it is."""
        if decision.kind != "stop":
            return
        whom = f" (rank {decision.rank})" if decision.signal else ""
        step = -(-decision.mark // 2)
        then = f"all ranks finish step {step} and save it, then the run leaves"
        if decision.status == _errors.BAD:
            then = f"all ranks leave at step {step}, which nobody saves"
        elif decision.status == _errors.FINISHED:
            then = f"all ranks end their training with step {step}"
        say(f"{decision.reason}{whom}: {then}.")
        if self._words[REST] and decision.mark <= self._words[MARK]:
            self._asked = StopRequest(decision.reason, decision.status, decision.signal)
            self._guard.nudge()

    def _hear_stop(self, request: StopRequest, said: str) -> None:
        """Leave at the next boundary, or a phase at once."""
        if self._asked is None or self._asked.is_by_clock:
            self._asked = request
        resting = bool(self._words[REST])
        doing = f" Finishing step {self._step_at_hand()}." if self._words[IN_LOOP] else ""
        say(f"{said}.{' Leaving.' if resting else doing}")
        if resting:
            self._guard.nudge()

    def _hear_failure(self, message: dict[str, Any]) -> None:
        """A checkpoint was not made: say so once, until another one is durable."""
        if self._bad is not None or self._leaves_at is not None:
            return  # a bad step is never saved; the stop itself reports its failed save
        told = re.sub(r"[\d.]+", "", message["error"]), self._durable_step()
        if told != self._failure_told:
            self._failure_told = told
            say(sentence_of(message) or "")

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if self._job is not None and self._job.hear(message):
            return
        if self._crew is not None and (decision := self._crew.hear(message)) is not False:
            if isinstance(decision, Decision):
                self._hear_decision(decision)
        elif kind == "noted":
            if not message["rests"]:  # else it leaves at once, and says so then
                newest, durable = self._saver.newest, self._durable_step()
                held = durable if newest is None else newest.step
                time_left = TimeLeft(message["grace"], message["needed"])
                announce_signal(message["signal"], self._step_at_hand(), held, durable, time_left)
        elif kind == "void":
            self._hear_void(message)
        elif kind == "request" and message["request"] == "stop":
            asked = stop_from_file(message["details"])
            self._hear_stop(asked, f"asked to stop: {asked.reason}")
        elif kind == "request":
            self._saver.want(Handle(message.get("reason", "holdfast save")))
        elif kind == "ending":
            asked = StopRequest(message["reason"], message["status"])
            self._hear_stop(asked, f"{asked.reason} is in {message['seconds']:.0f} s")
        elif kind == "failed":
            self._hear_failure(message)
        elif (sentence := sentence_of(message)) is not None:
            say(sentence)
        elif kind == "fenced":
            text = f"{self._folder}: {message['error']}.\nThis process writes nothing any more."
            self._trouble = RunIsLive(text, pid=0, host="")
        elif kind == "uneven":
            self._trouble = uneven(message["epoch"], message["batches"])
        elif kind == "leave" and is_interactive():
            self._asked = self._asked or StopRequest(message["reason"], message["status"])
            if self._words[IN_LOOP]:
                self._words[IN_LOOP] = 0  # the signal that follows is ours, no news to the keeper
                self._guard.nudge(ends_the_step=True)
        elif kind == "leave":
            # If the keeper has written nothing, the trainer has, or an earlier attempt.
            step = message["step"] or self._durable_step()
            record = {"status": message["status"], "step": self.step, "durable_step": step}
            self._progress.close()
            if message.get("speaks"):
                speak_as(0)  # the ranks before it are gone
            details = {"asked": bool(message.get("asked", True)), "then": message.get("said", "")}
            leave_at_once(self._exit_record(), message["reason"], record, **details)
        elif kind == "tick" and self._noted and not self._announced:
            self._announced = True
            announce_signal(self._noted[0], self._step_at_hand())
        self._next_look = 0.0

    def _step_at_hand(self) -> int:
        """The step that is being made: after the last one, still the last."""
        if self._leaves_at is not None:  # told of the signal when the step it met was over
            return self._leaves_at
        return self.step + 1 if self._total is None else min(self.step + 1, self._total)

    def _durable_step(self) -> int | None:
        raise NotImplementedError

    def _exit_record(self) -> ExitRecord:
        raise NotImplementedError
