"""A scene for the judge of hangs: ranks that answer as they are told, by a clock of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from holdfast._keeper.hangs.judge import HangJudge
from holdfast._keeper.protocol import FromHub, sender

IDLE: dict[str, Any] = {}
BUSY = {"cpu": 1.0}
MOVING = {"moved": True}
DISK = {"state": "D"}
STOPPED = {"state": "T"}
TRACED = {"tracer": 77, "tracer_name": "gdb"}


def make_look(rank: int, does: dict[str, Any] = IDLE, line: int = 7, **more: Any) -> dict[str, Any]:
    frames = [{"file": "train.py", "line": line, "name": "step"}]
    thread = {"tid": 5, "is_main": True, "frames": frames, "moved": does.get("moved", False)}
    process = {"pid": 5, "state": "S", "cpu": 0.0, "threads": [thread], **does}
    process.pop("moved", None)
    told = {"rank": rank, "mark": 20, "boundary_age": 25.0, "stretch": "step"}
    return {"seconds": 0.5, "processes": [process], "patience": 20.0, "stood": 25.0, **told, **more}


class Scene:
    """The hands of a judge, its clock, and ranks that answer as they are told."""

    def __init__(self, ranks: int = 1, policy: str = "report") -> None:
        self.time = 1000.0
        self.looks: dict[int, dict[str, Any] | None] = {r: make_look(r) for r in range(ranks)}
        self.notes: list[str] = []
        self.said: list[str] = []
        self.orders: list[tuple[int, str]] = []
        self.filed: list[dict[str, Any]] = []
        self.restarted: list[int | None] = []
        self.saved = 0
        self.since: dict[int, float] = {}  # when a stuck rank stood already
        self.starved = 0.0  # of each second, that its main thread waits for a processor
        self._policy = policy
        self.cause = "hang-lock"
        self.judge = HangJudge(self, lambda: self.time)

    def ranks(self) -> list[int]:
        return sorted(self.looks)

    def keeper(self, rank: int) -> FromHub:
        return sender(partial(self._order, rank))

    def _order(self, rank: int, kind: str, /, **fields: Any) -> None:
        self.orders.append((rank, kind))
        look = self.looks[rank]
        if kind == "look" and look is not None:
            if rank in self.since:
                look = {**look, "stood": self.time - self.since[rank]}
            self.judge.on_looked(rank, look=look, **fields)

    def say(self, kind: str, **fields: Any) -> None:
        self.said.append(kind)

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append(event)

    def facts(self) -> dict[str, Any]:
        return {"policy": self._policy, "attempt": 1, "durable_step": 3}

    def file(self, record: dict[str, Any], *, is_over: bool = False) -> None:
        self.filed.append(dict(record) if is_over else record)
        if not is_over:
            record |= {"cause": self.cause, "sentence": "It waits."}
            self.judge.explained(record, 0)

    def secure(self, rank: int | None, *, restart: bool) -> None:
        self.saved += not restart
        self.restarted += [rank] * restart

    def stuck(self, rank: int = 0, **more: Any) -> None:
        told = {"stood": 20.0, "patience": 20.0, "how": "learned", "paused": "", **more}
        self.since[rank] = self.time - told["stood"]
        self.judge.on_stuck(rank, **told)

    def going(self, rank: int = 0, *, moved: bool = True) -> None:
        self.judge.on_going(rank, moved=moved)

    def wait(self, seconds: float) -> None:
        for _ in range(int(4 * seconds)):
            self.time += 0.25
            self.since = {r: at + 0.25 * self.starved for r, at in self.since.items()}
            self.judge.tick()
