"""What a session does about the keeper's messages, in the thread that receives them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._errors import RanksError, RunIsLive, is_interactive
from holdfast._keeper.hangs.record import paused_sentence, told_of
from holdfast._keeper.protocol import DecisionForTrainer as Decision
from holdfast._run.exit.leaving import leave_at_once, look_for_graphs
from holdfast._run.saving.keeper_client import Handle
from holdfast._run.signals.handlers import announce_signal
from holdfast._store.folder.requests import StopRequest, stop_from_file
from holdfast._store.memory.control import IN_LOOP, MARK, REST
from holdfast._text import say, size, speak_as

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
            "void": lambda m: session.ruling.receive_bad(m["reason"], m["step"], m["rank"]),
            "request": self._on_request,
            "ending": self._on_ending,
            "failed": self._on_failed_checkpoint,
            "fenced": self._on_fenced,
            "uneven": lambda m: session.stops.fail(uneven(m["epoch"], m["batches"])),
            "leave": self._on_leave,
            "tick": lambda _: session.stops.announce(session.loops.step_at_hand()),
        }

    def receive(self, message: Message) -> None:
        session = self._session
        session.mirror.note_grace(message)
        if session.job is not None and session.job.hear(message):
            return
        self._dispatch(message)
        session.boundary.poll_soon()
        if message["kind"] == "memory" and "of_rank" not in message:  # of this process
            look_for_graphs(session.error_context(None), session.attempt.thread)

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
        if decision.what != "stop":
            return
        session, words = self._session, self._session.boundary.words
        whom = f" (rank {decision.rank})" if decision.signal else ""
        is_next = decision.mark == words[MARK] + 1  # a step's end, or an epoch's
        step = session.loops.step_at_hand() if is_next else -(-decision.mark // 2)
        then = f"all ranks finish step {step} and save it, then the run leaves"
        if decision.status == _errors.BAD:
            then = f"all ranks leave at step {step}, which is not saved"
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
        step, left = session.loops.step_at_hand(), {k: message[k] for k in ("grace", "needed")}
        announce_signal(message["signal"], step, held, durable, **left)

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

    # -- states -----------------------------------------------------------------------

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


# -- Messages that are only said -------------------------------------------------------------------

_MOST_RANKS = 8


def sentence_of(message: Message) -> str | None:
    """The words for a message; None if it is not to be said."""
    words = _WORDS.get(message["kind"])
    return None if words is None else words(message)


def _of_paused(message: Message) -> str | None:
    if message.get("is_deaf"):
        return None  # this very process: it would read the line when the pause is over
    return paused_sentence(message)


def uneven(epoch: int, batches: list[list[int]]) -> RanksError:
    """The ranks have different numbers of batches: no later step exists on all of them."""
    counts = ", ".join(f"rank {rank}: {count}" for rank, count in batches[:_MOST_RANKS])
    more = ", …" if len(batches) > _MOST_RANKS else ""
    return RanksError(
        f"the ranks have different numbers of batches in epoch {epoch} ({counts}{more}), and a "
        "step is saved only where all ranks have made it.\n"
        "Give all ranks the same number: a DistributedSampler, drop_last=True, or "
        "run.batches(loader, steps=…). DDP's Join is not supported."
    )


def _of_notice(message: Message) -> str | None:
    reason = message["reason"]
    if message["what"] == "deaf":
        return (
            f"{message['cloud']} does not tell whether this machine is about to end ({reason}).\n"
            "Let this process reach 169.254.169.254 (AWS: from a container with a hop limit of "
            "2), or switch this off: holdfast.Settings(notices='off')"
        )
    if message["acts"] == "save":
        return f"{reason}: the next step is made durable, and the run goes on."
    if message["acts"] == "later":
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(message["at"]))
        return f"{reason} comes at {at} UTC: the run leaves {message['lead']:.0f} s before."
    return None  # the stop itself is said


def _of_memory(message: Message) -> str | None:
    if message.get("quiet"):
        return None
    growth, limit = size(message["bytes_per_second"]), size(message["limit"])
    if message["what"] == "shm":
        fact = f"/dev/shm fills by {growth}/s: its {limit} are full"
    elif message["what"] == "machine":
        fact = f"memory grows by {growth}/s: the machine's {limit} are used up"
    else:
        fact = f"memory grows by {growth}/s: the limit of {limit} ({message['what']}) is reached"
    who = f"rank {message['of_rank']} on {message['host']}: " if "of_rank" in message else ""
    step = message["step"]
    then = "The next step" if step is None else f"Step {step}"
    now = "" if step is None else " now"
    return f"{who}{fact} in about {message['seconds']:.0f} s. {then} is made durable{now}."


_WORDS: dict[str, Callable[[Message], str | None]] = {
    "failed": lambda m: f"a checkpoint could not be made: {m['error']}. It will be tried again.",
    "mirror": lambda m: str(m["text"]),
    "twins": lambda m: (
        f"ranks {m['ranks'][0]} and {m['ranks'][1]} train on identical batches: each should have "
        "its own share of the data.\nGive the loader a DistributedSampler, or seed each rank's "
        "data in another way."
    ),
    "short-warning": lambda m: (
        f"SLURM warns {m['warning']:.0f} s before the time limit, and a step with its save takes "
        f"{m['needed']:.0f} s here.\n"
        f"Ask for more: --signal=USR2@{2 * m['needed'] + 30:.0f}"
    ),
    "hang": told_of,
    "hang-over": lambda _: "the run continues: a step was completed.",
    "paused": _of_paused,
    "notice": _of_notice,
    "memory": _of_memory,
}
