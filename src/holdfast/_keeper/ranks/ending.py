"""The end of a run of several ranks: its cause, its last checkpoint, and who is told what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._keeper.protocol import LeaveOrder, RankBye
from holdfast._keeper.ranks.state import EndCause, HubState

if TYPE_CHECKING:
    from holdfast._keeper.ranks.hub import Hub

_SETTLE_SECONDS = 0.7  # after the first error: its cause is reported by then
_END_SECONDS = 30.0
# The kinds of causes, the surest first. A rank whose peer is gone fails too, within a second.
_ORDER = ("asked", "hung", "died", "failed", "left", "victim")


@dataclass
class _Ending:
    """The end of a run that not all ranks survived."""

    causes: list[EndCause]
    began: float
    settles_at: float | None = None  # until then a better cause may be reported
    has_saved: bool = False
    is_told: bool = False


class RunEnd:
    """Ends a run of several ranks: saves what all hold, then releases every rank."""

    def __init__(self, state: HubState, hub: Hub) -> None:
        self._state = state
        self._hub = hub
        self._ending: _Ending | None = None  # of one that is not clean
        self._requeued: dict[str, Any] | None = None  # what became of a requeue
        self._is_requeueing = False

    @property
    def is_under_way(self) -> bool:
        return self._ending is not None

    def begin(self, cause: EndCause, *, settle: bool) -> None:
        """`settle`: wait a moment for reports of another rank, which may be the cause."""
        now = self._state.clock()
        if self._ending is None:
            self._ending = _Ending([cause], now)
        else:
            self._ending.causes.append(cause)
        self._hub.agreement.cancel()
        if not settle:
            self._ending.settles_at = 0.0
        elif self._ending.settles_at is None:
            self._ending.settles_at = now + _SETTLE_SECONDS
        self._advance()

    def advance(self) -> None:
        """A checkpoint less is in progress, or a requeue is answered."""
        if self._ending is not None:
            self._advance()
        self.release_clean()

    def _advance(self) -> None:
        ending, stop = self._ending, self._hub.stop
        assert ending is not None
        if ending.is_told or self._state.clock() < (ending.settles_at or 0.0):
            return
        if not ending.has_saved:
            ending.has_saved = True
            # First what can be saved: when nothing is in progress any more, the end is told.
            self._hub.commits.save_common("death" if stop is None else f"stop: {stop.reason}")
        self._hub.commits.forget_incomplete()
        if self._hub.commits.is_empty:
            self._tell(ending)

    def tick(self) -> None:
        ending = self._ending
        if ending is None:
            return
        self._advance()
        # How long the last checkpoint may take.
        seconds = _END_SECONDS + 3 * self._state.services.write_seconds()
        if not ending.is_told and self._state.clock() - ending.began > seconds:
            self._tell(ending)  # a keeper that holds a part is gone too

    def next_at(self) -> float | None:
        if self._ending is None or self._ending.is_told:
            return None
        return self._ending.settles_at or 0.0

    def _tell(self, ending: _Ending) -> None:
        cause, stop, step = worst(ending.causes), self._hub.stop, self._hub.commits.durable_step
        status = cause.status or _errors.REQUEUE
        if stop is not None and stop.status:
            status = stop.status  # a rule that ends it well has none, and this is no good end
        if stop is not None and status == _errors.REQUEUE and self._requeue_first(step):
            return
        ending.is_told = True
        reason = cause.sentence()
        self._state.services.note("end", reason=reason, rank=cause.rank, durable_step=step)
        kinds = {rank: seat.ended and seat.ended.kind for rank, seat in self._state.seats.items()}
        speaker = min((r for r, kind in kinds.items() if kind in (None, "victim")), default=-1)
        for rank, seat in self._state.seats.items():
            if seat.released:
                continue
            seat.released = True
            told: dict[str, Any] = {
                "status": status,
                "reason": reason,
                "step": step,
                "asked": stop is not None and bool(stop.status),
                "speaks": rank == speaker,
                **(self._requeued or {}),
            }
            # A rank that failed by itself prints its own error.
            is_own = kinds[rank] in ("failed", "left")
            self._state.send(rank, RankBye(**told) if is_own else LeaveOrder(**told))

    def release_clean(self) -> None:
        """Release the ranks that have left cleanly, once nothing waits to be written."""
        leaving = [
            (seat, seat.ended.status)
            for seat in self._state.seats.values()
            if seat.ended and seat.ended.kind == "left" and not seat.released
        ]
        if not leaving or self._ending is not None:
            return
        self._hub.commits.close_common()
        if not self._hub.commits.is_empty:
            return
        step = self._hub.commits.durable_step
        goes_on = any(status == _errors.REQUEUE for _, status in leaving)
        if goes_on and self._requeue_first(step):
            return
        for seat, _ in leaving:
            seat.released = True
            self._state.send(seat.rank, RankBye(step=step, **(self._requeued or {})))

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
    "tcpstore",
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
