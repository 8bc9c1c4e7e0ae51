"""Rank 0's keeper decides for all ranks: where to stop, what to make durable, which one is dead.

The hub knows what each rank's keeper reports: the next boundary, the snapshots it holds, how its
trainer ended. It asks no trainer, so a long call there delays no answer. Every wait is bounded.

    stop, save   hold all → ask where they are → the furthest boundary is the decision   Agreement
    snapshot     set ahead, for a boundary that no rank has reached yet                  Agreement
    checkpoint   all hold it → each writes its part → one writes the manifest            Commits
    death        the newest snapshot that all hold becomes a checkpoint, all leave       RunEnd
"""

from __future__ import annotations

import signal
from typing import Any

from holdfast import _errors
from holdfast._keeper import protocol
from holdfast._keeper.ranks.agreement import Agreement
from holdfast._keeper.ranks.commits import Commits
from holdfast._keeper.ranks.comparison import Comparison
from holdfast._keeper.ranks.state import EndCause, HubState, RankEntry, RankRequest
from holdfast._store.commit.retention import MEMORY

_SAY_AGAIN_SECONDS = 60.0


class Hub:
    """Receives what the ranks' keepers report, and passes it to the part that decides."""

    def __init__(
        self, state: HubState, unreachable_seconds: float = protocol.UNREACHABLE_SECONDS
    ) -> None:
        self.state = state
        self.agreement = Agreement(state, self)
        self.commits = Commits(state, self)
        self.comparison = Comparison(state)
        self.end = RunEnd(state, self)
        self.stop: RankRequest | None = None  # the newest stop that was asked for
        self.kill_at: float | None = None  # when all may be killed
        self._insure_at: float | None = None  # when the last common snapshot must be saved
        self._alarms: dict[str, float] = {}  # when it was reported that a host's memory gets full
        self._unreachable_seconds = unreachable_seconds

    # -- connections ------------------------------------------------------------

    def receive(self, rank: int, kind: str, /, **fields: Any) -> None:
        """Receive a message of a rank's keeper."""
        entry = self.state.entries.get(rank)
        if entry is None:
            return
        if entry.lost_at is not None:
            entry.lost_at = self.state.clock()  # no connection, but it sends letters
        for part in (self, self.agreement, self.commits, self.comparison):
            if protocol.receive_call(part, kind, entry, **fields):
                return

    def lost(self, rank: int) -> None:
        """There is no connection to a rank's keeper any more."""
        entry = self.state.entries[rank]
        entry.lost_at = self.state.clock()
        if entry.is_here and not entry.released:
            self.state.services.note("keeper-lost", rank=rank)

    def found(self, rank: int) -> None:
        """The keeper of a rank is connected, for the first time or again."""
        entry = self.state.entries[rank]
        if entry.lost_at is not None and entry.is_here:
            self.state.services.note("keeper-found", rank=rank)
        entry.lost_at = None
        self.agreement.ask_again(rank)

    def is_out_of_reach(self, rank: int) -> bool:
        """True if nothing was received from a rank's keeper for so long that it must be gone."""
        lost = self.state.entries[rank].lost_at
        return lost is not None and self.state.clock() - lost > self._unreachable_seconds

    def on_hello(self, entry: RankEntry, held: list[protocol.Key], who: dict[str, Any]) -> None:
        entry.is_here = True
        entry.beat = {**entry.beat, **who}
        self.commits.forget_asked(entry.rank)
        self.commits.on_held(entry, held)
        self.agreement.repeat_decision(entry)

    def on_beat(self, entry: RankEntry, beat: dict[str, Any]) -> None:
        entry.beat = {**entry.beat, **beat}
        entry.observe(self.state.clock(), 2 * int(entry.beat.get("step") or 0))

    # -- requests ---------------------------------------------------------------

    def on_wish(
        self, entry: RankEntry, wish: dict[str, Any], mark: int | None = None, *, now: bool = False
    ) -> None:
        asked = RankRequest(rank=entry.rank, **wish)
        if asked.kind == "stop" and asked.signal == signal.SIGTERM and self.state.services.has_job:
            # The scheduler sends it for several reasons, with opposite meanings. The answer may
            # come late, or never: what all hold must be durable by then.
            self._insure(asked)
            self.state.services.resolve_stop(
                asked, lambda found: self._take_wish(found, mark, now=now)
            )
        else:
            self._take_wish(asked, mark, now=now)

    def _take_wish(self, wish: RankRequest, mark: int | None, *, now: bool = False) -> None:
        """`mark`: the boundary at which it was asked for, if that is known."""
        stop, has_job = self.stop, self.state.services.has_job
        if self.end.is_under_way:
            return
        if now:
            self._leave_now(wish)
        elif wish.kind == "stop" and stop and not self.agreement.is_behind(mark):
            by_person = wish.status == _errors.PERSON and not wish.signal
            if wish.status == _errors.BAD or (by_person and has_job):
                stop.status = wish.status  # by the one before it, the job would come back
            self._insure(wish)
        elif wish.kind == "stop":
            self.stop = wish
            self._insure(wish)
            self.state.services.note("stop-asked", rank=wish.rank, reason=wish.reason)
            self.agreement.ask_for(wish)
        elif not self.agreement.covers(mark):
            self.agreement.ask_for(wish)

    def on_danger(
        self, entry: RankEntry, mark: int, host: str, figures: dict[str, Any], *, first: bool
    ) -> None:
        """The memory of a rank will be full soon: what all hold is made durable, then more."""
        step = self.commits.save_common(MEMORY)
        if first:
            self.state.services.note("memory", rank=entry.rank, host=host, step=step, **figures)
            told_at, now = self._alarms.get(host), self.state.clock()
            # Ranks of one host share its memory, and observe the same.
            if told_at is None or now - told_at > _SAY_AGAIN_SECONDS:
                self._alarms[host] = now
                report = {"of_rank": entry.rank, "host": host, "step": step, **figures}
                self.state.trainer(0).memory(**report)
        if self.stop is None:
            self._take_wish(RankRequest("save", MEMORY, rank=entry.rank), mark)

    def on_notice(self, entry: RankEntry, host: str, mark: int, told: dict[str, Any]) -> None:
        """The cloud has announced something for the machine of a rank."""
        self.state.services.note("notice", rank=entry.rank, host=host, **told)
        self.state.trainer(0).notice(**told)
        if told["acts"] == "save" and self.stop is None:
            wish = RankRequest("save", f"notice: {told['what']}", rank=entry.rank)
            self._take_wish(wish, mark)

    def _insure(self, wish: RankRequest) -> None:
        """Have the last common snapshot on disk by the time that the ranks may be killed."""
        # This keeper may know from the scheduler what the others have to guess.
        grace = self.state.services.grace_of(wish.signal) if wish.signal else wish.grace
        if grace is not None:
            self.kill_at = self.state.clock() + grace
            at = self._insurance_time(grace)
            self._insure_at = at if self._insure_at is None else min(at, self._insure_at)

    def _insurance_time(self, grace: float) -> float:
        seconds = max(0.0, grace - self.state.services.write_seconds() - 1.0)
        return self.state.clock() + seconds

    # -- ends -------------------------------------------------------------------

    def on_died(self, entry: RankEntry, how: str, step: int, host: str) -> None:
        if entry.ended is None:
            cause = EndCause(entry.rank, how, kind="died", host=host)
            self._lose_rank(entry, cause, host=host, step=step)

    def _lose_rank(self, entry: RankEntry, cause: EndCause, **known: Any) -> None:
        entry.ended = cause
        self.state.services.note("rank-died", rank=entry.rank, how=cause.how, **known)
        self.end.begin(cause, waits=False)

    def on_farewell(
        self,
        entry: RankEntry,
        *,
        clean: bool,
        reason: str,
        status: int,
        agreed: bool,
        victim: bool,
        host: str = "",
    ) -> None:
        """A trainer leaves by itself: after a stop or the end of training, or for an error."""
        kind = "left" if clean else ("victim" if victim else "failed")
        entry.ended = EndCause(entry.rank, reason, kind, host, status)
        if clean and status and not agreed:
            # By a signal outside of its loop: the others cannot go on without it.
            reason = f"{reason} (rank {entry.rank})"
            wish = RankRequest("stop", reason, status, rank=entry.rank)
            if status == _errors.TERMINATED and self.state.services.has_job:
                wish.signal = signal.SIGTERM
                self.commits.save_common(f"stop: {reason}")
                self.state.services.resolve_stop(wish, self._leave_now)
            else:
                self._leave_now(wish)
        elif clean:
            self.commits.give_up_hopeless()
            self.end.release_clean()
            self.agreement.decide_if_all()
            self.agreement.begin_round()
        else:
            self.end.begin(entry.ended, waits=True)

    def on_launcher(self, entry: RankEntry, reason: str) -> None:
        """The process that started the ranks is gone: nothing would end or restart them."""
        wish = RankRequest("stop", reason, _errors.REQUEUE, grace=30.0, rank=entry.rank)
        self._take_wish(wish, None)

    def _leave_now(self, wish: RankRequest) -> None:
        """All ranks leave at once, because this was asked for."""
        self.stop = self.stop or wish
        cause = EndCause(wish.rank, wish.reason, kind="asked", status=wish.status)
        self.end.begin(cause, waits=False)

    def end_hung(self, rank: int | None) -> None:
        """No rank makes a step any more: save what all hold, and let the supervisor restart."""
        if not self.end.is_under_way:
            how = "all ranks hang" if rank is None else f"rank {rank} hangs"
            cause = EndCause(rank or 0, how, kind="hung", status=_errors.HUNG)
            self.end.begin(cause, waits=False)

    def after_commit(self) -> None:
        """One checkpoint less is in progress."""
        self.commits.advance()
        self.end.advance()

    @property
    def is_over(self) -> bool:
        """True if every keeper has been told that it may go."""
        return all(entry.released or not entry.is_here for entry in self.state.entries.values())

    # -- by the clock -----------------------------------------------------------

    def tick(self) -> None:
        self.agreement.tick()
        self._insure_if_due()
        self.commits.give_up_hopeless()
        self.end.tick()
        for entry in self.state.entries.values():
            if entry.trains and self.is_out_of_reach(entry.rank):
                entry.held = set()  # its host is gone, with all that it held
                host = str(entry.beat.get("host", ""))
                how = "cannot be reached any more"
                self._lose_rank(entry, EndCause(entry.rank, how, kind="died", host=host))

    def _insure_if_due(self) -> None:
        if self._insure_at is None:
            return
        grace = self.state.services.preemption_seconds()
        if grace is not None:  # longer than what SIGTERM usually leaves
            self._insure_at = self._insurance_time(grace)
        if self.state.clock() < self._insure_at:
            return
        self._insure_at = None
        stop = self.stop
        is_requeued = stop is not None and stop.status == _errors.REQUEUE
        is_cut_short = is_requeued and self.state.services.has_job
        if stop is not None and is_cut_short and not self.agreement.is_carried_out():
            # The job ends before the agreed boundary, and nothing would be left to requeue it.
            self._leave_now(stop)
        else:
            self.commits.save_common("deadline")

    def next_at(self) -> float:
        """When `tick` has something to do."""
        times = [self.agreement.next_at(), self._insure_at, self.end.next_at()]
        return min([self.state.clock() + 1.0, *(at for at in times if at is not None)])


# -- The end of a run: its cause, its last checkpoint, and what each rank is told ------------------

_SETTLE_SECONDS = 0.7  # after the first error: its cause is reported by then
_END_SECONDS = 30.0
# The kinds of causes, the surest first. A rank whose peer is gone fails too, within a second.
_ORDER = ("asked", "hung", "died", "failed", "left", "victim")


class RunEnd:
    """Ends a run of several ranks: saves what all hold, then releases every rank."""

    def __init__(self, state: HubState, hub: Hub) -> None:
        self._state = state
        self._hub = hub
        self._causes: list[EndCause] = []  # of an end that not all ranks survived
        self._began = 0.0
        self._settles_at: float | None = None  # until then a better cause may be reported
        self._has_saved = self._is_told = False
        self._requeued: dict[str, Any] | None = None  # what became of a requeue
        self._is_requeueing = False

    @property
    def is_under_way(self) -> bool:
        return bool(self._causes)

    def begin(self, cause: EndCause, *, waits: bool) -> None:
        """`waits`: wait a moment for reports of another rank, which may be the cause."""
        now = self._state.clock()
        self._began = self._began if self._causes else now
        self._causes.append(cause)
        self._hub.agreement.cancel()
        if not waits:
            self._settles_at = 0.0
        elif self._settles_at is None:
            self._settles_at = now + _SETTLE_SECONDS
        self._advance()

    def advance(self) -> None:
        """A checkpoint less is in progress, or a requeue is answered."""
        self._advance()
        self.release_clean()

    def _advance(self) -> None:
        stop, is_settled = self._hub.stop, self._state.clock() >= (self._settles_at or 0.0)
        if not self._causes or self._is_told or not is_settled:
            return
        if not self._has_saved:
            self._has_saved = True
            # First what can be saved: when nothing is in progress any more, the end is told.
            self._hub.commits.save_common("death" if stop is None else f"stop: {stop.reason}")
        self._hub.commits.forget_incomplete()
        if self._hub.commits.is_empty:
            self._tell()

    def tick(self) -> None:
        self._advance()
        # How long the last checkpoint may take.
        seconds = _END_SECONDS + 3 * self._state.services.write_seconds()
        is_late = self._state.clock() - self._began > seconds
        if self._causes and not self._is_told and is_late:
            self._tell()  # a keeper that holds a part is gone too

    def next_at(self) -> float | None:
        return self._settles_at or 0.0 if self._causes and not self._is_told else None

    def _tell(self) -> None:
        cause, stop, step = worst(self._causes), self._hub.stop, self._hub.commits.durable_step
        status = cause.status or _errors.REQUEUE
        if stop is not None and stop.status:
            status = stop.status  # a rule that ends it well has none, and this is no good end
        if stop is not None and status == _errors.REQUEUE and self._requeue_first(step):
            return
        self._is_told = True
        reason = cause.sentence()
        self._state.services.note("end", reason=reason, rank=cause.rank, durable_step=step)
        kinds = {
            rank: entry.ended and entry.ended.kind for rank, entry in self._state.entries.items()
        }
        speaker = min((r for r, kind in kinds.items() if kind in (None, "victim")), default=-1)
        for rank, entry in self._state.entries.items():
            if entry.released:
                continue
            entry.released = True
            told: dict[str, Any] = {
                "status": status,
                "reason": reason,
                "step": step,
                "asked": stop is not None and bool(stop.status),
                "speaks": rank == speaker,
                **(self._requeued or {}),
            }
            keeper = self._state.keeper(rank)
            # A rank that failed by itself prints its own error.
            say_end = keeper.bye if kinds[rank] in ("failed", "left") else keeper.leave
            say_end(**told)

    def release_clean(self) -> None:
        """Release the ranks that have left cleanly, once nothing waits to be written."""
        leaving = [
            (entry, entry.ended.status)
            for entry in self._state.entries.values()
            if entry.ended and entry.ended.kind == "left" and not entry.released
        ]
        if not leaving or self._causes:
            return
        self._hub.commits.save_common_at_end()
        if not self._hub.commits.is_empty:
            return
        step = self._hub.commits.durable_step
        goes_on = any(status == _errors.REQUEUE for _, status in leaving)
        if goes_on and self._requeue_first(step):
            return
        for entry, _ in leaving:
            entry.released = True
            self._state.keeper(entry.rank).bye(step=step, **(self._requeued or {}))

    def _requeue_first(self, step: int | None) -> bool:
        """True while the job is being requeued: until then no rank is released.

        One that leaves may be the last of its node, and the scheduler ends what is left there.
        """
        stop, services = self._hub.stop, self._state.services
        if not services.has_job or self._requeued is not None:
            return False
        if stop is not None and stop.status == _errors.PERSON:
            said = "a person has asked to stop: the job is not requeued."
            self._requeued = {"said": said, "status": _errors.PERSON}
            return False
        if not self._is_requeueing:
            self._is_requeueing = True
            services.requeue(step, self._note_requeue)
        return True

    def _note_requeue(self, said: str, status: int) -> None:
        self._requeued = {"said": said, "status": status}
        self.advance()


def worst(causes: list[EndCause]) -> EndCause:
    """The cause to report: of one kind, the first that was reported."""
    return min(causes, key=lambda cause: _ORDER.index(cause.kind))


_SIGNS_OF_A_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo",
    "nccl",
    "socket",
    "store",
    "timed out",
    "connection refused",
    "process group",
    "distbackenderror",
)


def looks_like_a_lost_peer(error: str) -> bool:
    """True for the errors that ranks get when another one is gone."""
    text = error.lower()
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
