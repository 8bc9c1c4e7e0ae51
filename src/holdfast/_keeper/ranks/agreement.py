"""Agreement: one boundary at which all ranks stop, or save, or take a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast._keeper.ranks.state import HubState, RankEntry, RankRequest
from holdfast._store.commit.write_queue import Key

if TYPE_CHECKING:
    from holdfast._keeper.ranks.hub import Hub

# For a keeper to say where its rank is. If the network was just cut, that takes until both sides
# notice, plus one file message in each direction. A decision without that rank would stop the ranks
# at different boundaries.
ANSWER_SECONDS = 12.0
_SOON_SECONDS = 0.1  # how far ahead a snapshot is set
_PLAN_SECONDS = 30.0


@dataclass
class _Round:
    """One agreement in progress."""

    number: int
    wish: RankRequest
    began: float
    asked: set[int]
    marks: dict[int, int] = field(default_factory=dict)
    mark: int = -1  # the decision


class Agreement:
    """Asks all ranks where they are, and decides where they act."""

    def __init__(self, state: HubState, hub: Hub) -> None:
        self._state = state
        self._hub = hub
        self._round: _Round | None = None
        self.rounds = int(state.clock() * 1000)  # a hub before this one had smaller numbers
        self._waiting: list[RankRequest] = []
        self.decision: _Round | None = None  # the newest
        self._plan: tuple[int, float] | None = None  # mark, and since when
        self._due_reason: str | None = None  # why the next snapshot is to be kept

    # -- rounds -----------------------------------------------------------------

    def ask_for(self, wish: RankRequest) -> None:
        self._waiting.append(wish)
        self.begin_round()

    def begin_round(self) -> None:
        if self._round is not None or not self._waiting or self._hub.end.is_under_way:
            return
        wish = next((w for w in self._waiting if w.kind == "stop"), self._waiting[0])
        self._waiting = [w for w in self._waiting if w.kind != wish.kind]
        self.rounds += 1
        self._plan = None
        asked = set(self._state.remaining_ranks())
        self._round = _Round(self.rounds, wish, self._state.clock(), asked)
        for rank in asked:
            self._state.keeper(rank).hold(round=self.rounds)
        self.decide_if_all()

    def on_at(self, entry: RankEntry, round: int, mark: int) -> None:
        found = self._round
        if found is not None and round == found.number:
            found.marks[entry.rank] = mark
            self.decide_if_all()
        elif self.decision is not None and round == self.decision.number:
            # Its keeper was silent while the others decided: what it is past, it has not saved.
            entry.past = mark - 1
            self._hub.commits.give_up_hopeless()

    def decide_if_all(self) -> None:
        """Decide when all have answered, or when the time for that is over."""
        found, state = self._round, self._state
        if found is None:
            return
        is_late = state.clock() - found.began > ANSWER_SECONDS
        missing = {r for r in found.asked if r not in found.marks and not state.entries[r].ended}
        if missing and not is_late:
            return
        self._round = None
        if found.marks:
            # A copy: a later stop may change the status of this one.
            wish = replace(found.wish)
            self.decision = replace(found, wish=wish, mark=max(found.marks.values()))
            for rank in state.remaining_ranks():
                self._send(rank, self.decision)
        elif state.remaining_ranks():
            self._waiting.append(found.wish)  # no rank has answered: ask again
        self.begin_round()

    def ask_again(self, rank: int) -> None:
        """A rank's keeper is connected again, or is another one."""
        if self._round is not None:
            self._state.keeper(rank).hold(round=self._round.number)

    def repeat_decision(self, entry: RankEntry) -> None:
        """For a keeper that may not know it."""
        if self.decision is not None and not entry.ended and not self.is_carried_out():
            self._send(entry.rank, self.decision)

    def _send(self, rank: int, decided: _Round) -> None:
        wish = vars(decided.wish).copy()
        self._state.keeper(rank).decide(round=decided.number, mark=decided.mark, wish=wish)

    def is_carried_out(self) -> bool:
        """True if the boundary that was decided on is durable."""
        decided = self.decision
        if decided is None:
            return False
        return self._hub.commits.is_durable((self._state.attempt, decided.mark))

    def covers(self, mark: int | None) -> bool:
        """True if a save that was asked for at this boundary is decided, or about to be."""
        if mark is None:
            return False
        if self._round is not None and self._round.wish.kind == "save":
            return True
        return self.decision is not None and mark <= self.decision.mark

    def is_behind(self, mark: int | None) -> bool:
        """True if the last decision lies behind: a loop ended there, and another follows."""
        if mark is None or self.decision is None:
            return False
        return mark // 2 > -(-self.decision.mark // 2)

    def cancel(self) -> None:
        """The run ends: nothing is agreed on any more."""
        self._round = self._plan = None
        self._waiting.clear()

    def tick(self) -> None:
        at = self.next_at()
        if at is not None and self._state.clock() > at:
            self.decide_if_all()

    def next_at(self) -> float | None:
        return None if self._round is None else self._round.began + ANSWER_SECONDS

    # -- snapshots, set ahead ---------------------------------------------------

    def on_due(self, entry: RankEntry, mark: int, reason: str | None = None) -> None:
        """Rank 0 finds that it is time for a snapshot, or for a checkpoint if it has a reason."""
        entry.observe(self._state.clock(), mark)
        # Kept until a snapshot is common: one may be on its way, or be missed.
        self._due_reason = reason or self._due_reason
        self._plan_ahead()

    def _plan_ahead(self) -> None:
        """Set a snapshot for a boundary that no rank has reached yet."""
        now, entries = self._state.clock(), self._state.entries.values()
        is_stopping = self._hub.end.is_under_way or self._hub.stop is not None
        if is_stopping or self._round is not None or not all(entry.is_here for entry in entries):
            return
        if self._plan is not None and now - self._plan[1] < _PLAN_SECONDS:
            return
        furthest = max(entry.expected_at(now + _SOON_SECONDS) for entry in entries)
        target = 2 * (int(furthest) // 2 + 2)
        self._plan = (target, now)
        for rank in self._state.training_ranks():
            self._state.keeper(rank).plan(mark=target)

    def plan_missed(self, mark: int) -> None:
        """A rank had passed the boundary already, or had no slot for it."""
        if self._plan is not None and self._plan[0] == mark:
            self._plan = None
            if self._due_reason is not None:
                self._plan_ahead()

    def common_reached(self, key: Key) -> str | None:
        """All ranks hold this snapshot; returns why it is to be kept, if it is."""
        if self._plan is not None and key == (self._state.attempt, self._plan[0]):
            self._plan = None
        reason, self._due_reason = self._due_reason, None
        return reason
