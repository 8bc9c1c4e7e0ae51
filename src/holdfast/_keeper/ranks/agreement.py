"""Agreement: one boundary at which all ranks stop, or save, or take a snapshot."""

from __future__ import annotations

from typing import Any

from holdfast._keeper.ranks.table import Round, Seat, Table, Wish

# For a keeper to say where its rank is. If the network was cut just now, that takes until both
# ends have found out, and a letter each way; a decision without that rank would not be one stop.
ANSWER_SECONDS = 12.0
_SOON_SECONDS = 0.1  # how far ahead a snapshot is set
_PLAN_SECONDS = 30.0


class Rounds(Table):
    """Where is everybody, and so: where do all act?"""

    def _on_at(self, seat: Seat, message: dict[str, Any]) -> None:
        found = self._round
        if found is not None and message["round"] == found.number:
            found.marks[seat.rank] = message["mark"]
            self._decide_if_all()
        elif self._decision is not None and message["round"] == self._decision["round"]:
            # Its keeper was silent while the others decided: what it is past, it has not saved.
            seat.past = message["mark"] - 1
            self._give_up_hopeless()

    def _on_due(self, seat: Seat, message: dict[str, Any]) -> None:
        """Rank 0 finds that it is time for a snapshot, or for a checkpoint if it has a reason."""
        self._see(seat, message["mark"])
        # Kept until a snapshot is common: one may be on its way, or be missed.
        self._due_reason = message.get("reason") or self._due_reason
        self._plan_ahead()

    def _plan_ahead(self) -> None:
        """Set a snapshot for a boundary that no rank has reached yet."""
        now = self._clock()
        if self._ending is not None or self.stop is not None or self._round is not None:
            return
        if not all(seat.is_here for seat in self.seats.values()):
            return
        if self._plan is not None and now - self._plan[1] < _PLAN_SECONDS:
            return
        furthest = max(each.expected_at(now + _SOON_SECONDS) for each in self.seats.values())
        target = 2 * (int(furthest) // 2 + 2)
        self._plan = (target, now)
        for rank in self.training_ranks():
            self._send(rank, "plan", mark=target)

    def _see(self, seat: Seat, mark: int) -> None:
        """Note how far a rank is, and how quick: it may run free of the others."""
        seat.see(self._clock(), mark)

    def _begin_round(self) -> None:
        if self._round is not None or not self._waiting or self._ending is not None:
            return
        wish = next((w for w in self._waiting if w.kind == "stop"), self._waiting[0])
        self._waiting = [w for w in self._waiting if w.kind != wish.kind]
        self._rounds += 1
        self._plan = None
        asked = set(self._those_who_go_on())
        self._round = Round(self._rounds, wish, self._clock(), asked)
        for rank in asked:
            self._send(rank, "hold", round=self._rounds)
        self._decide_if_all()

    def _decide_if_all(self) -> None:
        found = self._round
        if found is None:
            return
        late = self._clock() - found.began > ANSWER_SECONDS
        missing = {r for r in found.asked if r not in found.marks and not self.seats[r].ended}
        if missing and not late:
            return
        self._round = None
        if found.marks:
            mark = max(found.marks.values())
            wish = vars(found.wish).copy()
            self._decision = {"round": found.number, "mark": mark, "wish": wish}
            for rank in self._those_who_go_on():
                self._send(rank, "decide", **self._decision)
        elif self._those_who_go_on():
            self._waiting.append(found.wish)  # nobody has answered: ask again
        self._begin_round()

    def _is_covered(self, mark: int | None) -> bool:
        """Whether a save that was asked for at this boundary is decided, or just about to be."""
        if mark is None:
            return False
        if self._round is not None and self._round.wish.kind == "save":
            return True
        return self._decision is not None and mark <= self._decision["mark"]

    def _is_behind(self, mark: int | None) -> bool:
        """Whether what was decided last lies behind: a loop ended there, and another follows."""
        if mark is None or self._decision is None:
            return False
        return bool(mark // 2 > -(-self._decision["mark"] // 2))

    def _advance_round(self) -> None:
        self._decide_if_all()
        self._begin_round()

    def _insure(self, wish: Wish) -> None:
        """Have the last common snapshot on disk by the time that somebody may kill us."""
        # This keeper may know from the scheduler what the others have to guess.
        grace = self._books.grace_of(wish.signal) if wish.signal else wish.grace
        if grace is not None:
            self._kill_at = self._clock() + grace
            at = self._clock() + max(0.0, grace - self._books.write_seconds() - 1.0)
            self._insure_at = at if self._insure_at is None else min(at, self._insure_at)
