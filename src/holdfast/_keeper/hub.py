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

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast._errors import SaveFailed
from holdfast._keeper.ending import Cause, Ending, worst
from holdfast._leave import statuses

Key = tuple[int, int]  # (attempt, mark): a boundary of some life, the same on all ranks

_ANSWER_SECONDS = 5.0  # for a keeper to say where its rank is
_SETTLE_SECONDS = 0.7  # after the first error: whoever is its cause is heard of by then
_UNREACHABLE_SECONDS = 60.0
_SOON_SECONDS = 0.1  # how far ahead a snapshot is set
_PLAN_SECONDS = 30.0


class Books(Protocol):
    """What the hub does outside of itself."""

    def begin(self, key: Key) -> str | None: ...
    def commit(self, key: Key, reason: str, files: dict[int, dict[str, Any]]) -> None: ...
    def note(self, event: str, **fields: Any) -> None: ...
    def write_seconds(self) -> float: ...


@dataclass
class Seat:
    """What is known of one rank."""

    rank: int
    is_here: bool = False
    held: set[Key] = field(default_factory=set)
    ended: Cause | None = None  # its trainer is dead or has left
    released: bool = False  # its keeper may go
    lost_at: float | None = None
    beat: dict[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.is_here and self.ended is None


@dataclass
class Wish:
    """Something that all ranks are to do at one boundary."""

    kind: str  # "stop" or "save"
    reason: str
    status: int = 0
    signal: int = 0
    grace: float | None = None
    rank: int = 0


@dataclass
class Round:
    """One agreement on its way."""

    number: int
    wish: Wish
    began: float
    asked: set[int]
    marks: dict[int, int] = field(default_factory=dict)


@dataclass
class Commit:
    """One checkpoint on its way."""

    key: Key
    reason: str
    began: float
    is_writing: bool = False
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_closing: bool = False  # the manifest is being written


class Hub:
    """The state of all ranks, and what follows from it."""

    def __init__(
        self,
        size: int,
        attempt: int,
        send: Callable[..., None],
        books: Books,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._attempt = attempt
        self._send = send
        self._books = books
        self._clock = clock
        self.seats = {rank: Seat(rank) for rank in range(size)}
        self._round: Round | None = None
        self._rounds = 0
        self._waiting: list[Wish] = []
        self.stop: Wish | None = None
        self._stop_mark: int | None = None
        self._insure_at: float | None = None
        self._plan: tuple[int, str | None, float] | None = None  # mark, reason if it is to be kept
        self._commits: dict[Key, Commit] = {}
        self.common: Key | None = None
        self.durable: Key | None = None
        self._ending: Ending | None = None
        self._pace = (0.0, 0)  # when rank 0 was seen at which mark
        self._marks_per_second = 0.0
        self.straggler: dict[str, Any] | None = None

    # -- what keepers tell ----------------------------------------------------------

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Take in what the keeper of a rank says."""
        act = getattr(self, f"_on_{message['kind']}", None)
        if act is not None and rank in self.seats:
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
        self._on_held(seat, message)

    def _on_held(self, seat: Seat, message: dict[str, Any]) -> None:
        seat.held = {(key[0], key[1]) for key in message["held"]}
        self._look_at_common()
        self._advance_commits()

    def _on_beat(self, seat: Seat, message: dict[str, Any]) -> None:
        seat.beat = {**seat.beat, **message["beat"]}

    def _on_at(self, seat: Seat, message: dict[str, Any]) -> None:
        found = self._round
        if found is not None and message["round"] == found.number:
            found.marks[seat.rank] = message["mark"]
            self._decide_if_all()

    def _on_wish(self, seat: Seat, message: dict[str, Any]) -> None:
        wish = Wish(rank=seat.rank, **message["wish"])
        if self._ending is not None:
            return
        if message.get("now"):
            self._leave_now(wish)
        elif wish.kind == "stop" and self.stop is not None:
            self._insure(wish)
        else:
            if wish.kind == "stop":
                self.stop = wish
                self._insure(wish)
                self._books.note("stop-asked", rank=seat.rank, reason=wish.reason)
            self._waiting.append(wish)
            self._begin_round()

    def _on_due(self, seat: Seat, message: dict[str, Any]) -> None:  # noqa: ARG002  rank 0's
        """Rank 0 finds that it is time for a snapshot, or for a checkpoint if it has a reason."""
        now = self._clock()
        if self._ending is not None or self.stop is not None or self._round is not None:
            return
        if not all(seat.is_here for seat in self.seats.values()):
            return
        if self._plan is not None and now - self._plan[2] < _PLAN_SECONDS:
            return
        mark = message["mark"]
        before, seen = self._pace
        if seen and mark > seen and now > before:
            self._marks_per_second = (mark - seen) / (now - before)
        self._pace = (now, mark)
        lead = 1 + int(self._marks_per_second / 2 * _SOON_SECONDS)
        target = 2 * (mark // 2 + 1 + lead)
        self._plan = (target, message.get("reason"), now)
        for rank in self._those_who_train():
            self._send(rank, "plan", mark=target)

    def _on_missed(self, seat: Seat, message: dict[str, Any]) -> None:
        """A rank had passed the boundary already, or had no slot for it."""
        mark = message["mark"]
        if self._plan is not None and self._plan[0] == mark:
            self._plan = None
        commit = self._commits.get((self._attempt, mark))
        if commit is not None:
            self._fail(commit, f"rank {seat.rank}: {message.get('why', 'no slot was free')}")

    def _on_order(self, seat: Seat, message: dict[str, Any]) -> None:  # noqa: ARG002  any may
        """A trainer wants this boundary on disk; so do the others, who pass it too."""
        key = (message["key"][0], message["key"][1])
        if self._is_durable(key):
            self._tell_durable(key)
            return
        if key not in self._commits:
            self._commits[key] = Commit(key, message["reason"], self._clock())
        self._advance_commits()

    def _on_written(self, seat: Seat, message: dict[str, Any]) -> None:
        commit = self._commits.get((message["key"][0], message["key"][1]))
        if commit is None:
            return
        if message.get("error"):
            self._fail(commit, f"rank {seat.rank}: {message['error']}")
            return
        commit.files[seat.rank] = message["file"]
        if len(commit.files) == self._size and not commit.is_closing:
            commit.is_closing = True
            self._books.commit(commit.key, commit.reason, commit.files)

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
        if clean:
            self._say_goodbyes()
            self._advance_round()
        else:
            self._end(seat.ended, settle=True)

    def _on_launcher(self, seat: Seat, message: dict[str, Any]) -> None:
        """What started the ranks is gone, and nobody would end or restart them."""
        wish = {"kind": "stop", "reason": message["reason"], "status": statuses.REQUEUE}
        self._on_wish(seat, {"wish": {**wish, "grace": 30.0}})

    # -- agreement -----------------------------------------------------------------

    def _those_who_train(self) -> list[int]:
        return [rank for rank, seat in self.seats.items() if seat.trains]

    def _begin_round(self) -> None:
        if self._round is not None or not self._waiting or self._ending is not None:
            return
        wish = next((w for w in self._waiting if w.kind == "stop"), self._waiting[0])
        self._waiting = [w for w in self._waiting if w.kind != wish.kind]
        self._rounds += 1
        self._plan = None
        asked = set(self._those_who_train())
        self._round = Round(self._rounds, wish, self._clock(), asked)
        for rank in asked:
            self._send(rank, "hold", round=self._rounds)
        self._decide_if_all()

    def _decide_if_all(self) -> None:
        found = self._round
        if found is None:
            return
        late = self._clock() - found.began > _ANSWER_SECONDS
        missing = {r for r in found.asked if r not in found.marks and self.seats[r].trains}
        if missing and not late:
            return
        self._round = None
        if found.marks:
            mark = max(found.marks.values())
            wish = found.wish
            if wish.kind == "stop":
                self._stop_mark = mark
            for rank in self._those_who_train():
                self._send(
                    rank, "decide", round=found.number, mark=mark, wish=vars(wish).copy()
                )
        self._begin_round()

    def _advance_round(self) -> None:
        self._decide_if_all()
        self._begin_round()

    def _insure(self, wish: Wish) -> None:
        """Have the last common snapshot on disk by the time that somebody may kill us."""
        if wish.grace is not None:
            at = self._clock() + max(0.0, wish.grace - self._books.write_seconds() - 1.0)
            self._insure_at = at if self._insure_at is None else min(at, self._insure_at)

    def _leave_now(self, wish: Wish) -> None:
        cause = Cause(wish.rank, wish.reason, kind="asked")
        cause.status = wish.status
        self.stop = self.stop or wish
        self._end(cause, settle=False)

    # -- checkpoints ----------------------------------------------------------------

    def _look_at_common(self) -> None:
        held = [seat.held for seat in self.seats.values()]
        both = set.intersection(*held) if held else set()
        newest = max(both, default=None)
        if newest is None or (self.common is not None and newest <= self.common):
            return
        self.common = newest
        for rank in self.seats:
            self._send(rank, "common", key=list(newest))
        if self._plan is not None and newest == (self._attempt, self._plan[0]):
            _, reason, _ = self._plan
            self._plan = None
            if reason is not None:
                self._want(newest, reason)

    def _want(self, key: Key, reason: str) -> None:
        if not self._is_durable(key) and key not in self._commits:
            self._commits[key] = Commit(key, reason, self._clock())
        self._advance_commits()

    def _is_durable(self, key: Key) -> bool:
        return self.durable is not None and key <= self.durable

    def _advance_commits(self) -> None:
        """Let the parts of one checkpoint be written as soon as all ranks hold it."""
        if any(commit.is_writing for commit in self._commits.values()):
            return
        for key in sorted(self._commits):
            commit = self._commits[key]
            if all(key in seat.held for seat in self.seats.values()):
                commit.is_writing = True
                self._begin_writing(commit)
                return

    def _begin_writing(self, commit: Commit) -> None:
        try:
            partial = self._books.begin(commit.key)
        except SaveFailed as error:
            self._fail(commit, str(error))
            return
        if partial is None:  # it is there already
            self.committed(commit.key, None)
            return
        for rank in self.seats:
            self._send(rank, "write", key=list(commit.key), partial=partial)

    def committed(self, key: Key, error: str | None, *, is_fenced: bool = False) -> None:
        """The manifest is written, or could not be."""
        commit = self._commits.get(key)
        if error is not None:
            if commit is not None:
                self._fail(commit, error, is_fenced=is_fenced)
            return
        self._commits.pop(key, None)
        self.durable = key if self.durable is None else max(self.durable, key)
        self._tell_durable(key)
        self._after_commit()

    def _tell_durable(self, key: Key) -> None:
        for rank in self.seats:
            self._send(rank, "durable", key=list(key))

    def _fail(self, commit: Commit, error: str, *, is_fenced: bool = False) -> None:
        self._commits.pop(commit.key, None)
        self._books.note("save-failed", step=commit.key[1] // 2, error=error)
        for rank in self.seats:
            self._send(rank, "failed", key=list(commit.key), error=error, fenced=is_fenced)
        self._after_commit()

    def _after_commit(self) -> None:
        self._advance_commits()
        if self._ending is not None:
            self._go_on_ending()
        self._say_goodbyes()

    # -- the end --------------------------------------------------------------------

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
            for key in [k for k, c in self._commits.items() if not self._can_be_whole(c)]:
                self._fail(self._commits[key], "a rank that it needs is gone")
            if self.common is not None and not self._is_durable(self.common):
                self._want(self.common, "death" if self.stop is None else f"stop: {self.stop.reason}")
        if not self._commits:
            self._tell_the_end(ending)

    def _can_be_whole(self, commit: Commit) -> bool:
        return all(commit.key in seat.held for seat in self.seats.values())

    def _tell_the_end(self, ending: Ending) -> None:
        ending.is_told = True
        cause = worst(ending.causes)
        step = None if self.durable is None else self.durable[1] // 2
        status = cause.status or statuses.REQUEUE
        if self.stop is not None:
            status = self.stop.status
        self._books.note("end", reason=cause.sentence(), rank=cause.rank, durable_step=step)
        speaker = min(self._those_who_train(), default=-1)
        for rank, seat in self.seats.items():
            if seat.released:
                continue
            # Whoever fails by himself shows his own error; the others are told of it.
            own = seat.ended is not None and seat.ended.kind == "failed"
            seat.released = True
            self._send(
                rank,
                "bye" if own else "leave",
                status=status,
                reason=cause.sentence(),
                step=step,
                asked=self.stop is not None,
                speaks=rank == speaker,
            )

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
        for seat in leaving:
            seat.released = True
            self._send(seat.rank, "bye", step=step)

    @property
    def is_over(self) -> bool:
        """Whether every keeper has been told that it may go."""
        return all(seat.released or not seat.is_here for seat in self.seats.values())

    # -- time -----------------------------------------------------------------------

    def tick(self) -> None:
        """What is due by the clock."""
        now = self._clock()
        if self._round is not None and now - self._round.began > _ANSWER_SECONDS:
            self._decide_if_all()
        if self._insure_at is not None and now >= self._insure_at:
            self._insure_at = None
            if self.common is not None and not self._is_durable(self.common):
                self._want(self.common, "deadline")
        if self._ending is not None:
            self._go_on_ending()
        for seat in self.seats.values():
            gone = seat.lost_at is not None and now - seat.lost_at > _UNREACHABLE_SECONDS
            if gone and seat.trains:
                cause = Cause(seat.rank, "cannot be reached any more", kind="died")
                seat.ended = cause
                self._books.note("rank-died", rank=seat.rank, how=cause.how)
                self._end(cause, settle=False)

    def next_at(self) -> float:
        """When `tick` has something to do."""
        times = [self._clock() + 1.0]
        if self._round is not None:
            times.append(self._round.began + _ANSWER_SECONDS)
        if self._insure_at is not None:
            times.append(self._insure_at)
        if self._ending is not None and not self._ending.is_told:
            times.append(self._ending.settles_at or 0.0)
        return min(times)
