"""What a session does about the keeper's messages, in the thread that receives them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._errors import RunIsLive, is_interactive
from holdfast._run.exit.bounded import leave_at_once
from holdfast._run.exit.exception_record import look_for_graphs
from holdfast._run.saving.keeper_client import Handle
from holdfast._run.saving.messages import sentence_of, uneven
from holdfast._run.saving.rank_orders import Decision
from holdfast._run.signals.guard import TimeLeft, announce_signal
from holdfast._store.folder.requests import StopRequest, stop_from_file
from holdfast._store.memory.control import IN_LOOP, MARK, REST
from holdfast._text import say, speak_as

if TYPE_CHECKING:
    from holdfast._run.session import Session

Message = dict[str, Any]


class KeeperEvents:
    """Dispatches each message by its kind; one without an entry is only said."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._failure_said: tuple[str, int | None] | None = None
        self._by_kind: dict[str, Callable[[Message], None]] = {
            "noted": self._on_signal,
            "void": self._on_void,
            "request": self._on_request,
            "ending": self._on_ending,
            "failed": self._on_failed_checkpoint,
            "fenced": self._on_fenced,
            "uneven": self._on_uneven,
            "leave": self._on_leave,
            "tick": self._on_tick,
        }

    def receive(self, message: Message) -> None:
        session = self._session
        session.mirror.heed(message)
        if session.job is not None and session.job.hear(message):
            return
        self._dispatch(message)
        session.boundary.poll_soon()
        if message["kind"] == "memory" and "of_rank" not in message:  # of this process
            look_for_graphs(session.scene(None), session.attempt.thread)

    def _dispatch(self, message: Message) -> None:
        ranks = self._session.ranks
        if ranks is not None and (decision := ranks.hear(message)) is not False:
            if isinstance(decision, Decision):
                self._on_decision(decision)
        elif (handler := self._by_kind.get(message["kind"])) is not None:
            handler(message)
        elif (sentence := sentence_of(message)) is not None:
            say(sentence)

    # -- stops ------------------------------------------------------------------------

    def _on_decision(self, decision: Decision) -> None:
        """All ranks will stop: say so, and leave a phase whose boundary it is."""
        if decision.kind != "stop":
            return
        session, words = self._session, self._session.boundary.words
        whom = f" (rank {decision.rank})" if decision.signal else ""
        step = -(-decision.mark // 2)
        then = f"all ranks finish step {step} and save it, then the run leaves"
        if decision.status == _errors.BAD:
            then = f"all ranks leave at step {step}, which nobody saves"
        elif decision.status == _errors.FINISHED:
            then = f"all ranks end their training with step {step}"
        say(f"{decision.reason}{whom}: {then}.")
        if words[REST] and decision.mark <= words[MARK]:
            request = StopRequest(decision.reason, decision.status, decision.signal)
            session.stops.ask(request, replaces=True)
            session.guard.nudge()

    def _on_signal(self, message: Message) -> None:
        if message["rests"]:
            return  # it leaves at once, and says so then
        session = self._session
        newest, durable = session.saver.newest, session.durable_step()
        held = durable if newest is None else newest.step
        time_left = TimeLeft(message["grace"], message["needed"])
        step = session.loops.step_at_hand()
        announce_signal(message["signal"], step, held, durable, time_left)

    def _on_request(self, message: Message) -> None:
        if message["request"] == "stop":
            asked = stop_from_file(message["details"])
            self._ask(asked, f"asked to stop: {asked.reason}")
        else:
            self._session.saver.want(Handle(message.get("reason", "holdfast save")))

    def _on_ending(self, message: Message) -> None:
        asked = StopRequest(message["reason"], message["status"])
        self._ask(asked, f"{asked.reason} is in {message['seconds']:.0f} s")

    def _ask(self, request: StopRequest, said: str) -> None:
        """Stop at the next boundary, or leave a phase at once."""
        session, words = self._session, self._session.boundary.words
        session.stops.ask(request)
        rests = bool(words[REST])
        doing = f" Finishing step {session.loops.step_at_hand()}." if words[IN_LOOP] else ""
        say(f"{said}.{' Leaving.' if rests else doing}")
        if rests:
            session.guard.nudge()

    def _on_leave(self, message: Message) -> None:
        session = self._session
        if is_interactive():
            if session.stops.asked is None:
                session.stops.ask(StopRequest(message["reason"], message["status"]))
            words = session.boundary.words
            if words[IN_LOOP]:
                words[IN_LOOP] = 0  # the signal that follows is ours: the keeper ignores it
                session.guard.nudge(ends_the_step=True)
            return
        # If the keeper has written nothing, the trainer has, or an earlier attempt.
        durable = message["step"] or session.durable_step()
        step = session.boundary.step
        record = {"status": message["status"], "step": step, "durable_step": durable}
        session.progress.close()
        if message.get("speaks"):
            speak_as(0)  # the ranks before it are gone
        details = {"asked": bool(message.get("asked", True)), "then": message.get("said", "")}
        leave_at_once(session.exit_record(), message["reason"], record, **details)

    def _on_tick(self, _: Message) -> None:
        self._session.stops.announce(self._session.loops.step_at_hand())

    # -- states -----------------------------------------------------------------------

    def _on_void(self, message: Message) -> None:
        self._session.ruling.receive_bad(message["reason"], message["step"], message["rank"])

    def _on_failed_checkpoint(self, message: Message) -> None:
        """Say so once, until another checkpoint is durable."""
        session = self._session
        if session.ruling.bad is not None or session.stops.last_step is not None:
            return  # a bad step is never saved; the stop itself reports its failed save
        said = re.sub(r"[\d.]+", "", message["error"]), session.durable_step()
        if said != self._failure_said:
            self._failure_said = said
            say(sentence_of(message) or "")

    def _on_fenced(self, message: Message) -> None:
        folder = self._session.spec.folder
        text = f"{folder}: {message['error']}.\nThis process writes nothing any more."
        self._session.stops.fail(RunIsLive(text, pid=0, host=""))

    def _on_uneven(self, message: Message) -> None:
        self._session.stops.fail(uneven(message["epoch"], message["batches"]))
