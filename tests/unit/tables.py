"""A hub with a clock that stands still, and all that it says, for tests of what it decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from holdfast._errors import SaveFailed
from holdfast._keeper.ranks.hub import Hub
from holdfast._keeper.ranks.state import HubState, RankRequest
from holdfast._store.commit.write_queue import Key

ATTEMPT = 3


class Shelf:
    """What the hub has written down, and begun and closed in the run folder."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.begun: list[Key] = []
        self.closing: list[tuple[Key, str, list[int]]] = []
        self.wanted: list[set[str]] = []  # the folders that stay, at each removal of the others
        self.there: set[Key] = set()
        self.refuses: str | None = None
        self.seconds = 0.5
        self.grace: dict[int, float] = {}  # that a signal leaves
        self.has_job = False
        self.preemption: float | None = None
        self.asked: list[Callable[[str, int], None]] = []  # why a stop was wished for
        self.requeued: list[int | None] = []
        self.answers: list[Callable[[str, int], None]] = []  # to what became of that

    def begin(self, key: Key) -> str | None:
        if self.refuses is not None:
            raise SaveFailed(self.refuses)
        if key in self.there:
            return None
        self.begun.append(key)
        return f".partial-{key[1]}"

    def remove_given_up(self, wanted: Collection[str]) -> None:
        self.wanted.append(set(wanted))

    def commit(self, key: Key, reason: str, files: dict[int, dict[str, Any]]) -> None:
        self.closing.append((key, reason, sorted(files)))

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))

    def set_aside_void(self) -> None:
        self.note("set-aside-void")

    def write_seconds(self) -> float:
        return self.seconds

    def grace_of(self, number: int) -> float | None:
        return self.grace.get(number)

    def preemption_seconds(self) -> float | None:
        return self.preemption

    def resolve_stop(self, wish: RankRequest, then: Callable[[RankRequest], None]) -> None:
        self.asked.append(lambda why, status: then(replace(wish, reason=why, status=status)))

    def requeue(self, step: int | None, then: Callable[[str, int], None]) -> None:
        self.requeued.append(step)
        self.answers.append(then)

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.notes if name == event]


class Table:
    """The hub of so many ranks, all of them there, and what it has told each."""

    def __init__(self, size: int = 2, *, here: int | None = None) -> None:
        self.now = 1000.0
        self.size = size
        self.sent: list[tuple[int, str, dict[str, Any]]] = []
        self.shelf = Shelf()
        self.hub = Hub(HubState(size, ATTEMPT, self._send, self.shelf, lambda: self.now))
        for rank in range(size if here is None else here):
            self.hub.found(rank)
            self.say(rank, "hello", who={"rank": rank}, held=[])

    def _send(self, rank: int, kind: str, /, **fields: Any) -> None:
        self.sent.append((rank, kind, json.loads(json.dumps(fields))))

    # -- what keepers say -----------------------------------------------------------

    def say(self, rank: int, kind: str, **fields: Any) -> None:
        self.hub.receive(rank, kind, **fields)

    def wish(self, rank: int, kind: str = "stop", *, now: bool = False, **more: Any) -> None:
        wish = {"kind": kind, "reason": f"{kind} by {rank}", "status": 143, **more}
        self.say(rank, "wish", wish=wish, now=now)

    def at(self, rank: int, mark: int, number: int | None = None) -> None:
        """Answer the hold that was sent last."""
        if number is None:
            number = self.told(rank, "hold")[-1]["round"]
        self.say(rank, "at", round=number, mark=mark)

    def hold(self, *marks: int, ranks: range | None = None, attempt: int = ATTEMPT) -> None:
        """All ranks have snapshots of these boundaries, or some ranks have."""
        for rank in range(self.size) if ranks is None else ranks:
            self.say(rank, "held", held=[[attempt, mark] for mark in marks])

    def order(self, rank: int, mark: int, reason: str = "asked") -> None:
        self.say(rank, "order", key=[ATTEMPT, mark], reason=reason)

    def write(self, rank: int, mark: int, error: str | None = None) -> None:
        outcome = {"error": error} if error else {"file": {"name": f"rank-{rank}"}}
        asked = self.told(rank, "write")
        number = asked[-1]["number"] if asked else 0
        self.say(rank, "written", key=[ATTEMPT, mark], number=number, **outcome)

    def write_all(self, mark: int) -> None:
        """All parts are written, and the manifest is too."""
        for rank in range(self.size):
            self.write(rank, mark)
        self.hub.commits.committed((ATTEMPT, mark), None)

    def die(self, rank: int, how: str = "was killed by SIGKILL") -> None:
        self.say(rank, "died", how=how, host="here", step=4)

    def leave(self, rank: int, *, clean: bool = True, **more: Any) -> None:
        told = {"clean": clean, "reason": "closed", "status": 0, "victim": False, "agreed": False}
        self.say(rank, "farewell", **told | more)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.hub.tick()

    # -- what they are told -----------------------------------------------------------

    def told(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [fields for to, what, fields in self.sent if (to, what) == (rank, kind)]

    def all_told(self, kind: str) -> list[int]:
        """The ranks that were told such a thing, in order."""
        return sorted(to for to, what, _ in self.sent if what == kind)

    def decisions(self) -> list[tuple[int, int, str]]:
        """(rank, mark, what) of all that was decided."""
        found = ((to, f) for to, what, f in self.sent if what == "decide")
        return [(to, fields["mark"], fields["wish"]["kind"]) for to, fields in found]

    def forget(self) -> None:
        """Only what is said from now on counts."""
        self.sent.clear()
