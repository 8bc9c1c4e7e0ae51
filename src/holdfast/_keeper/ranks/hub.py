"""Rank 0's keeper decides for all: where to stop, what to make durable, who is dead.

It knows of each rank what that rank's keeper tells: which boundary it is heading for,
which snapshots it holds, how its trainer ended. No trainer is asked, so one that sits in a
long call cannot hold up the answer. Every wait here has a bound.

    stop, save   hold all → ask where they are → the furthest boundary is the decision
    snapshot     set ahead, for a boundary that no rank has reached yet
    checkpoint   all hold it → each writes its part → the manifest, written by one
    death        the newest snapshot that all hold becomes a checkpoint, the rest leave
"""

from __future__ import annotations

import signal
from typing import Any

from holdfast import _errors
from holdfast._keeper.ranks.agreement import ANSWER_SECONDS, Rounds
from holdfast._keeper.ranks.commits import Commits
from holdfast._keeper.ranks.comparison import Sights
from holdfast._keeper.ranks.ending import Cause, Ending, worst
from holdfast._keeper.ranks.table import Seat, Wish
from holdfast._store.commit.retention import MEMORY
from holdfast._store.commit.write_queue import Key

__all__ = ["Hub", "Key"]

_SETTLE_SECONDS = 0.7  # after the first error: whoever is its cause is heard of by then
_END_SECONDS = 30.0
_SAY_AGAIN_SECONDS = 60.0


class Hub(Rounds, Commits, Sights):
    """The state of all ranks, and what follows from it."""

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Take in what the keeper of a rank says."""
        act = getattr(self, f"_on_{message['kind']}", None)
        if rank not in self.seats:
            return
        if self.seats[rank].lost_at is not None:
            self.seats[rank].lost_at = self._clock()  # it has no connection, but it writes letters
        if act is not None:
            act(self.seats[rank], message)

    def lost(self, rank: int) -> None:
        """There is no connection to a rank's keeper any more."""
        seat = self.seats[rank]
        seat.lost_at = self._clock()
        if seat.is_here and not seat.released:
            self._books.note("keeper-lost", rank=rank)

    def found(self, rank: int) -> None:
        """The keeper of a rank is there, for the first time or again."""
        seat = self.seats[rank]
        if seat.lost_at is not None and seat.is_here:
            self._books.note("keeper-found", rank=rank)
        seat.lost_at = None
        if self._round is not None:
            self._send(rank, "hold", round=self._round.number)

    def _on_hello(self, seat: Seat, message: dict[str, Any]) -> None:
        seat.is_here = True
        seat.beat = {**seat.beat, **message.get("who", {})}
        for commit in self._commits.values():
            commit.asked.discard(seat.rank)  # it may be another keeper than before
        self._on_held(seat, message)
        decided = self._decision
        if decided and not seat.ended and not self._is_durable((self._attempt, decided["mark"])):
            self._send(seat.rank, "decide", **decided)

    def _on_beat(self, seat: Seat, message: dict[str, Any]) -> None:
        seat.beat = {**seat.beat, **message["beat"]}
        self._see(seat, 2 * int(seat.beat.get("step") or 0))

    def _on_wish(self, seat: Seat, message: dict[str, Any]) -> None:
        wish = Wish(rank=seat.rank, **message["wish"])
        if wish.kind == "stop" and wish.signal == signal.SIGTERM and self._books.has_job:
            # The scheduler sends it for several reasons, with opposite meanings. Which one it was
            # may be told late, or never: what all hold must be durable by then.
            self._insure(wish)
            self._books.settle(wish, lambda found: self._take_wish(found, message))
        else:
            self._take_wish(wish, message)

    def _take_wish(self, wish: Wish, message: dict[str, Any]) -> None:
        if self._ending is not None:
            return
        if message.get("now"):
            self._leave_now(wish)
        elif wish.kind == "stop" and self.stop and not self._is_behind(message.get("mark")):
            by_person = wish.status == _errors.PERSON and not wish.signal
            if wish.status == _errors.BAD or (by_person and self._books.has_job):
                self.stop.status = wish.status  # by the one before it, the job would come back
            self._insure(wish)
        elif wish.kind == "stop" or not self._is_covered(message.get("mark")):
            if wish.kind == "stop":
                self.stop = wish
                self._insure(wish)
                self._books.note("stop-asked", rank=wish.rank, reason=wish.reason)
            self._waiting.append(wish)
            self._begin_round()

    def _on_danger(self, seat: Seat, message: dict[str, Any]) -> None:
        """The memory of a rank will be full soon: what all hold is made durable, then more."""
        figures, host, step = message["figures"], str(message["host"]), None
        if self.common is not None and not self._is_durable(self.common):
            step = self.common[1] // 2
            self._want(self.common, MEMORY, is_last=True)
        if message["first"]:
            self._books.note("memory", rank=seat.rank, host=host, step=step, **figures)
            told_at, now = self._dangers.get(host), self._clock()
            # Ranks of one host share its memory, and see the same.
            if told_at is None or now - told_at > _SAY_AGAIN_SECONDS:
                self._dangers[host] = now
                self._send(0, "memory", of_rank=seat.rank, host=host, step=step, **figures)
        if self.stop is None:
            self._take_wish(Wish("save", MEMORY, rank=seat.rank), message)

    def _on_notice(self, seat: Seat, message: dict[str, Any]) -> None:
        """The cloud has announced something for the machine of a rank."""
        told, host = message["told"], str(message["host"])
        self._books.note("notice", rank=seat.rank, host=host, **told)
        self._send(0, "notice", **told)
        if told["acts"] == "save" and self.stop is None:
            self._take_wish(Wish("save", f"notice: {told['what']}", rank=seat.rank), message)

    def _on_died(self, seat: Seat, message: dict[str, Any]) -> None:
        if seat.ended is None:
            cause = Cause(seat.rank, message["how"], kind="died", host=message.get("host", ""))
            seat.ended = cause
            self._books.note(
                "rank-died", rank=seat.rank, how=cause.how, host=cause.host, step=message["step"]
            )
            self._end(cause, settle=False)

    def _on_farewell(self, seat: Seat, message: dict[str, Any]) -> None:
        """A trainer leaves by itself: after a stop or the end of training, or for an error."""
        clean = message["clean"]
        kind = "left" if clean else ("victim" if message.get("victim") else "failed")
        seat.ended = Cause(seat.rank, message["reason"], kind, message.get("host", ""))
        seat.ended.status = message["status"]
        if clean and message["status"] and not message["agreed"]:
            # By a signal outside of its loop: the others cannot go on without it.
            reason = f"{message['reason']} (rank {seat.rank})"
            wish = Wish("stop", reason, message["status"], rank=seat.rank)
            if wish.status == _errors.TERMINATED and self._books.has_job:
                wish.signal = signal.SIGTERM
                self.save_common(f"stop: {reason}")
                self._books.settle(wish, self._leave_now)
            else:
                self._leave_now(wish)
        elif clean:
            self._give_up_hopeless()
            self._say_goodbyes()
            self._advance_round()
        else:
            self._end(seat.ended, settle=True)

    def _on_launcher(self, seat: Seat, message: dict[str, Any]) -> None:
        """What started the ranks is gone, and nobody would end or restart them."""
        wish = {"kind": "stop", "reason": message["reason"], "status": _errors.REQUEUE}
        self._on_wish(seat, {"wish": {**wish, "grace": 30.0}})

    def _leave_now(self, wish: Wish) -> None:
        cause = Cause(wish.rank, wish.reason, kind="asked")
        cause.status = wish.status
        self.stop = self.stop or wish
        self._end(cause, settle=False)

    def end_hung(self, rank: int | None) -> None:
        """No rank makes a step any more: what all hold is saved, and whoever leads starts anew."""
        if self._ending is None:
            how = "all ranks hang" if rank is None else f"rank {rank} hangs"
            cause = Cause(rank or 0, how, kind="hung", status=_errors.HUNG)
            self._end(cause, settle=False)

    def _end(self, cause: Cause, *, settle: bool) -> None:
        """Somebody is gone for good, or all are to go now: save what all hold, and leave."""
        if self._ending is None:
            self._ending = Ending([cause], self._clock())
        else:
            self._ending.causes.append(cause)
        self._round, self._plan = None, None
        self._waiting.clear()
        if not settle:
            self._ending.settles_at = 0.0
        elif self._ending.settles_at is None:
            self._ending.settles_at = self._clock() + _SETTLE_SECONDS
        self._go_on_ending()

    def _go_on_ending(self) -> None:
        ending = self._ending
        assert ending is not None
        if ending.is_told or self._clock() < (ending.settles_at or 0.0):
            return
        if not ending.has_saved:
            ending.has_saved = True
            # First what can be saved: when nothing is on its way any more, the end is told.
            self.save_common("death" if self.stop is None else f"stop: {self.stop.reason}")
        # Not failed, but forgotten: whoever waits for it is told to leave instead.
        self._commits = {key: c for key, c in self._commits.items() if self._can_be_whole(c)}
        if not self._commits:
            self._tell_the_end(ending)

    def _after_commit(self) -> None:
        self._advance_commits()
        if self._ending is not None:
            self._go_on_ending()
        self._say_goodbyes()

    def _tell_the_end(self, ending: Ending) -> None:
        cause = worst(ending.causes)
        step = None if self.durable is None else self.durable[1] // 2
        status = cause.status or _errors.REQUEUE
        if self.stop is not None and self.stop.status:
            status = self.stop.status  # a rule that ends it well has none, and this is no good end
        if self.stop is not None and status == _errors.REQUEUE and self._requeue_first(step):
            return
        ending.is_told = True
        self._books.note("end", reason=cause.sentence(), rank=cause.rank, durable_step=step)
        kinds = {rank: seat.ended and seat.ended.kind for rank, seat in self.seats.items()}
        speaker = min((r for r, kind in kinds.items() if kind in (None, "victim")), default=-1)
        for rank, seat in self.seats.items():
            if seat.released:
                continue
            # Whoever fails by himself shows his own error; the others are told of it.
            own = kinds[rank] in ("failed", "left")
            seat.released = True
            told = {"status": status, "reason": cause.sentence(), "step": step}
            told |= {"asked": self.stop is not None and bool(self.stop.status)}
            told |= {"speaks": rank == speaker}
            told |= self._afterwards or {}
            self._send(rank, "bye" if own else "leave", **told)

    def _requeue_first(self, step: int | None) -> bool:
        """Whether the job is being requeued: while that goes on, nobody is let go.

        Whoever leaves may be the last of its node, and the scheduler ends what is left there.
        """
        if not self._books.has_job or self._afterwards is not None:
            return False
        if self.stop is not None and self.stop.status == _errors.PERSON:
            said = "a person has asked to stop: the job is not requeued."
            self._afterwards = {"said": said, "status": _errors.PERSON}
            return False
        if not self._is_requeueing:
            self._is_requeueing = True
            self._books.requeue(step, self._is_requeued)
        return True

    def _is_requeued(self, said: str, status: int) -> None:
        self._afterwards = {"said": said, "status": status}
        if self._ending is not None:
            self._go_on_ending()
        self._say_goodbyes()

    def _say_goodbyes(self) -> None:
        """Let those go who have left cleanly, once nothing waits to be written."""
        leaving = [s for s in self.seats.values() if s.ended and s.ended.kind == "left"]
        leaving = [seat for seat in leaving if not seat.released]
        if not leaving or self._ending is not None:
            return
        if self.common is not None and not self._is_durable(self.common):
            self._want(self.common, "closed")
        if self._commits:
            return
        step = None if self.durable is None else self.durable[1] // 2
        is_to_go_on = any(s.ended and s.ended.status == _errors.REQUEUE for s in leaving)
        if is_to_go_on and self._requeue_first(step):
            return
        for seat in leaving:
            seat.released = True
            self._send(seat.rank, "bye", step=step, **(self._afterwards or {}))

    @property
    def is_over(self) -> bool:
        """Whether every keeper has been told that it may go."""
        return all(seat.released or not seat.is_here for seat in self.seats.values())

    def tick(self) -> None:
        """What is due by the clock."""
        now = self._clock()
        if self._round is not None and now - self._round.began > ANSWER_SECONDS:
            self._decide_if_all()
        grace = self._books.preemption_seconds() if self._insure_at is not None else None
        if grace is not None:  # longer than what SIGTERM usually leaves
            self._insure_at = now + max(0.0, grace - self._books.write_seconds() - 1.0)
        if self._insure_at is not None and now >= self._insure_at:
            self._insure_at = None
            if self.stop is not None and self._is_cut_short(self.stop):
                self._leave_now(self.stop)
            else:
                self.save_common("deadline")
        self._give_up_hopeless()
        if self._ending is not None:
            self._go_on_ending()
            if not self._ending.is_told and now - self._ending.began > self._ending_seconds():
                self._tell_the_end(self._ending)  # a keeper that holds a part is gone too
        for seat in self.seats.values():
            if seat.trains and self.is_out_of_reach(seat.rank):
                host = str(seat.beat.get("host", ""))
                cause = Cause(seat.rank, "cannot be reached any more", kind="died", host=host)
                seat.ended, seat.held = cause, set()  # gone with all that it held
                self._books.note("rank-died", rank=seat.rank, how=cause.how)
                self._end(cause, settle=False)

    def save_common(self, reason: str) -> None:
        """Make the newest snapshot that all ranks hold durable, before anything older."""
        if self.common is not None and not self._is_durable(self.common):
            self._want(self.common, reason, is_last=True)

    def _is_cut_short(self, stop: Wish) -> bool:
        """Whether the job ends before its ranks have come to the boundary that was agreed on.

        Then nobody would be left who could have it come back.
        """
        if stop.status != _errors.REQUEUE or not self._books.has_job:
            return False
        decided = self._decision
        return decided is None or not self._is_durable((self._attempt, decided["mark"]))

    def is_out_of_reach(self, rank: int) -> bool:
        """Whether nothing was heard of a rank's keeper for so long that it must be gone."""
        lost = self.seats[rank].lost_at
        return lost is not None and self._clock() - lost > self._unreachable_seconds

    def _ending_seconds(self) -> float:
        """How long the last checkpoint may take."""
        return _END_SECONDS + 3 * self._books.write_seconds()

    def next_at(self) -> float:
        """When `tick` has something to do."""
        times = [self._clock() + 1.0]
        if self._round is not None:
            times.append(self._round.began + ANSWER_SECONDS)
        if self._insure_at is not None:
            times.append(self._insure_at)
        if self._ending is not None and not self._ending.is_told:
            times.append(self._ending.settles_at or 0.0)
        return min(times)
