"""What a keeper asks its decider, and the decider of a run of one process.

`Alone` decides at once. `ranks.member.Member` has the same methods: it passes everything to the hub
of rank 0 and does what that decides. Methods named `on_…` report an event; all run in the keeper's
loop but `on_written` and `on_closed`, which the writer's threads call.
"""

from __future__ import annotations

import math
import signal
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast import _errors
from holdfast._environment import variables
from holdfast._keeper.memory_alarm import Alarm
from holdfast._keeper.storage import HeldArena
from holdfast._keeper.timers import in_background
from holdfast._keeper.trainer import PostMortem, SignalArrival, Trainer, state_of
from holdfast._keeper.writer import WriteJob, WriteOutcome
from holdfast._store.commit.retention import MEMORY
from holdfast._store.folder import journal
from holdfast._store.folder.requests import StopRequest, stop_from_file
from holdfast._store.folder.supervised import tell_leader_of_death
from holdfast._store.memory import control
from holdfast._store.memory.arena import SlotRecord

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper
    from holdfast._keeper.ranks.member import Member

    Decider: TypeAlias = "Alone | Member"

_PHASE_SECONDS = 3.0  # for a phase to react to a stop: a long call in C does not
SLOT_GONE = "the slot is gone"
# Names of timers.
_INSURE = "insure"  # when the newest slot must be on its way to disk
_PHASE_END = "phase end"
# Statuses of a trainer that left without a message, as subprocess gives them: it was done, or
# asked to end.
_WANTED_ENDS = (
    _errors.FINISHED,
    *(_errors.PERSON, _errors.TERMINATED, _errors.HUNG_UP),
    *(-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP),
)


class Alone:
    """Decides for one trainer."""

    is_trainer_gone = False  # the keeper is done as soon as it is
    link = None  # to a hub: the judge of hangs is in this keeper

    def __init__(self) -> None:
        self.stop: StopRequest | None = None

    def attach(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._storage = keeper.storage
        self._trainer = keeper.trainer
        self._timers = keeper.timers
        self._limit = keeper.time_limit

    def tick(self, now: float) -> float:  # noqa: ARG002  all is done by timers
        return math.inf

    # -- the trainer ------------------------------------------------------------

    def on_message(self, kind: str, fields: dict[str, Any]) -> None:
        pass  # for all ranks

    def on_arena(self) -> None:
        pass

    def on_snapshot(self, generation: int) -> None:
        self._storage.holdings.drop_before(generation)

    def on_order(
        self, order: int, found: tuple[HeldArena, SlotRecord], reason: str, *, is_last: bool
    ) -> None:
        if not found[0].pin(found[1]):
            self._trainer.tell.failed(order=order, error=SLOT_GONE)
            return
        if is_last:
            self._timers.cancel(_INSURE)
        if not self._storage.writer.submit(WriteJob(*found, reason, order, is_last=is_last)):
            self._trainer.tell.waits(order=order)

    def on_salvage(self, held: HeldArena, record: SlotRecord) -> None:
        self._storage.salvage(held, record)

    def on_invalid(self, step: int, reason: str) -> None:
        pass

    def on_leaving(self) -> None:
        self._timers.cancel(_INSURE)
        self._timers.cancel(_PHASE_END)
        if self._storage.keeps_memory and self._trainer.leave_status in _errors.RESTARTED:
            # The next attempt may begin before this process has ended: exit.json is there.
            self._storage.writer.wait_idle()
            self._keeper.end_series()
            self._storage.offer_memory()
        else:
            self._release_when_idle()

    def on_goodbye(self) -> None:
        self._storage.withdraw_offer()
        self._release_when_idle()
        self._keeper.finish()

    def _release_when_idle(self) -> None:
        self._storage.writer.wait_idle()
        self._keeper.end_series()
        self._storage.release(is_needed=self._storage.has_failed())

    def on_death(self) -> None:
        """Save what the trainer left in memory, and record how it died."""
        keeper, storage = self._keeper, self._storage
        storage.hasten()
        keeper.end_series()
        death = keeper.examine_death()
        keeper.receive_rest()
        keeper.end_series()  # with the metrics that had been sent and not been received yet
        self._persist_newest("death")
        if (led := variables.led_folder()) is not None and keeper.is_unexpected(death):
            tell_leader_of_death(led, self._trainer.pid, keeper.policy.attempt)
        storage.writer.wait_idle()
        death.wait_for_status()
        if keeper.is_unexpected(death):
            death.write(durable_step=storage.durable_step)
        # What was durable went with a folder that was removed: memory has the only state.
        is_only = not self._trainer.is_leaving and not storage.has_folder()
        is_needed = is_only or storage.has_failed()
        if storage.keeps_memory and not is_needed and _comes_back(self._trainer, self.stop, death):
            storage.offer_memory()
        keeper.record_death(death)
        storage.release(is_needed=is_needed)
        keeper.finish()

    # -- stops ------------------------------------------------------------------

    def on_signal(self, arrival: SignalArrival) -> None:
        number, name = arrival.number, arrival.name
        if arrival.is_final:
            if number == signal.SIGINT:
                self._keeper.journal("signal", name=name, count=2)
            if number == signal.SIGINT and self._trainer.stays:
                self._persist_newest(arrival.reason)  # the trainer ends its step by itself
            else:
                self._leave_now(arrival.reason, arrival.status)
            return
        self._storage.hasten()
        self._keeper.journal("signal", name=name)
        grace = self._limit.grace_of(number)
        self.stop = self.stop or StopRequest(name, arrival.status, number)
        if self._limit.job is not None:
            self._limit.job.heard(number)
        # The trainer may have received it already.
        rests = self._trainer.words[control.REST] in (control.RESTS, control.HEARD)
        needed = self._storage.writer.seconds_of_a_write()
        self._trainer.tell.noted(signal=number, grace=grace, rests=rests, needed=needed)
        if rests:
            self._leave_phase(name, arrival.status)
        if grace is not None:
            self._insure_within(grace)

    def on_request(self, kind: str, details: dict[str, Any]) -> None:
        self._keeper.journal("request", kind=kind, **details)
        if kind == "stacks":
            self._keeper.hangs.ask_stacks(details)
            return
        if kind == "stop":
            stop = stop_from_file(details)
            self._storage.hasten()
            if details.get("now"):
                self._leave_now(f"stop --now: {stop.reason}", _errors.PERSON)
                return
            self.stop = stop  # of a person: a later warning does not undo it
            if self._trainer.rests:
                self._keeper.signals.expect_nudge()
                self._leave_phase(stop.reason, stop.status)
        self._trainer.tell.request(request=kind, details=details)

    @property
    def is_stopping(self) -> bool:
        return self.stop is not None

    def stop_reason(self) -> str | None:
        return None if self.stop is None else self.stop.reason

    def stop_status(self) -> int | None:
        return None if self.stop is None else self.stop.status

    def on_time_short(self, reason: str, left: float) -> None:
        self.stop = StopRequest(reason, _errors.REQUEUE)
        self._storage.hasten()
        if self._trainer.rests:
            self._keeper.signals.expect_nudge()
            self._leave_phase(reason, _errors.REQUEUE)
        self._trainer.tell.ending(reason=reason, status=_errors.REQUEUE, seconds=left)
        self._insure_within(left)

    def on_time_left(self, left: float) -> None:
        """The end of the job may have been moved."""
        if self.stop is None or self._timers.due_at(_INSURE) is None:
            return
        job = self._limit.job
        grace = None if job is None else job.preemption_seconds()
        if grace is not None:
            self._timers.cancel(_INSURE)  # set for what SIGTERM usually leaves
        self._insure_within(left if grace is None else grace)

    def on_notice(self, told: dict[str, Any]) -> None:
        journal.append(self._keeper.policy.layout.journal, "notice", **told)
        self._trainer.tell.notice(**told)
        if told["acts"] == "save":
            self._trainer.tell.request(request="save", reason=f"notice: {told['what']}")

    def stop_for_notice(self, reason: str, left: float) -> None:
        if self.stop is None:
            self.on_time_short(reason, left)
        else:
            self._insure_within(left)

    def _leave_phase(self, reason: str, status: int) -> None:
        """A stop within a phase: its boundary is in memory, and the phase is repeated anyway."""
        self._persist_newest(f"stop: {reason}")

        def leave() -> None:
            if self._trainer.rests:
                self._leave_now(reason, status)

        self._timers.after(_PHASE_SECONDS, leave, _PHASE_END)

    def _insure_within(self, seconds: float) -> None:
        """Have the newest slot on disk before this time is over, even if the step goes on.

        Half of the time is left for the write: on a busy machine it takes much longer than before.
        """
        now = time.monotonic()
        self._storage.writer.deadline = now + seconds
        at = now + max(0.0, min(seconds / 2, seconds - self._storage.write_seconds() - 1.0))
        before = self._timers.due_at(_INSURE)
        self._timers.at(at if before is None else min(at, before), self._insure, _INSURE)

    def _insure(self) -> None:
        """The step has not ended in time."""
        stop, job = self.stop, self._limit.job
        # The job's end is certain, and nothing would be left that could requeue it.
        is_ended = job is not None and not job.is_elsewhere
        # No boundary will come in a hang.
        must_leave = is_ended or self._keeper.hangs.is_hung
        if stop is not None and stop.status != _errors.PERSON and must_leave:
            self._leave_now(stop.reason, stop.status)
        else:
            self._persist_newest("deadline")

    def _leave_now(self, reason: str, status: int) -> None:
        self._storage.hasten()
        self._trainer.expect_exit_after_save(status)
        if not self._persist_newest(reason, leave_status=status):
            self._send_away(reason, status)

    def _send_away(self, reason: str, status: int) -> None:
        """Tell the trainer to leave; ask SLURM first why that is, and for a requeue."""
        job, storage, trainer = self._limit.job, self._storage, self._trainer
        is_settled = self._limit.is_requeued() or status in (_errors.PERSON, _errors.HUNG)
        if job is None or is_settled or trainer.stays:
            answer, said = None if job is None else job.answer, {}
            if status == _errors.REQUEUE and answer is not None and answer.status != status:
                # The job does not come back: it was cancelled meanwhile, for example.
                status, said = answer.status, {"said": answer.said}
            trainer.order_to_leave(reason, status, storage.durable_step, **said)
            return
        number = self.stop.number if self.stop is not None else 0

        def resolve_and_send() -> None:
            why, found = job.resolve_stop(reason, status, number)
            said = {}
            if found == _errors.REQUEUE:
                requeued = job.requeue(storage.durable_step)
                found, said = requeued.status, {"said": requeued.said}
            trainer.order_to_leave(why, found, storage.durable_step, **said)

        in_background(resolve_and_send)

    # -- saves ------------------------------------------------------------------

    def on_memory_alarm(self, alarm: Alarm) -> None:
        newest = self._storage.holdings.newest()
        is_writing = self._persist_newest(MEMORY)
        if alarm.is_first:
            step = newest[1].step if newest is not None and is_writing else None
            self._keeper.journal("memory", step=step, **alarm.figures())
            self._trainer.tell.memory(step=step, **alarm.figures())
        # That snapshot is some steps old: the next boundary is worth more.
        self._trainer.tell.request(request="save", reason=MEMORY)

    def _persist_newest(self, reason: str, leave_status: int | None = None) -> bool:
        self._keeper.receive_pending()
        return self._storage.persist_newest(reason, leave_status)

    def on_written(self, outcome: WriteOutcome) -> None:
        job, record = outcome.job, outcome.job.record
        order, step, tell = job.order, record.step, self._trainer.tell
        if outcome.error is None:
            self._storage.record_save(outcome.seconds)
            self._storage.mark_durable(job.held.arena.attempt, step, record.sequence)
            sequence, seconds = record.sequence, outcome.seconds
            tell.durable(order=order, step=step, sequence=sequence, seconds=seconds)
        elif outcome.is_dropped:
            tell.dropped(order=order, step=step, error=outcome.error)
        else:
            self._storage.mark_failed(step, is_fenced=outcome.is_fenced)
            self._keeper.journal("save-failed", step=step, error=outcome.error)
            answer = tell.fenced if outcome.is_fenced else tell.failed
            answer(order=order, step=step, error=outcome.error)
        if job.leave_status is not None:
            self._send_away(job.reason, job.leave_status)

    def on_closed(self, *_: object) -> None:
        raise AssertionError("only several ranks write a manifest by itself")

    # -- hangs ------------------------------------------------------------------

    def on_hang(self, rank: int | None, *, restart: bool) -> None:  # noqa: ARG002  the one
        if restart:
            self._leave_now("it hangs", _errors.HUNG)
        else:
            self._persist_newest("hang")

    # -- what others read -------------------------------------------------------

    def row_facts(self) -> dict[str, Any]:
        return {}

    def publish_beat(self, beat: dict[str, Any]) -> None:
        self._keeper.write_beat(beat)


def _comes_back(trainer: Trainer, stop: StopRequest | None, death: PostMortem) -> bool:
    """True if another attempt is likely to follow soon, on this machine."""
    if state_of(trainer.pid) not in ("", "Z", "X"):
        return False  # a device may still write into its slots
    status = trainer.leave_status
    if status is None and stop is not None:
        status = stop.status
    if status is not None:
        return status in _errors.RESTARTED
    return death.status not in _WANTED_ENDS
