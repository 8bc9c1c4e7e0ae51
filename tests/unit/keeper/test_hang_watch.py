"""The watch over one trainer: a look that gets on is waited for, one that is silent is not."""

from __future__ import annotations

import threading
import time
from typing import Any

from holdfast._keeper.hangs import monitor
from holdfast._keeper.hangs.monitor import HangWatch
from holdfast._keeper.protocol import sender
from holdfast._store.memory.control import BOUNDARY_NS, LOOP_NS, private_words
from tests.support import wait_until

_LOOK = {"pid": 1, "processes": []}


class Looker:
    """Looks until it is told to end."""

    def __init__(self) -> None:
        self.alive_at = 0.0
        self.may_end = threading.Event()

    def look(self) -> dict[str, Any]:
        self.alive_at = time.monotonic()
        self.may_end.wait(30)
        return dict(_LOOK)


class Scene:
    """A watch whose clock the test moves."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.looker = Looker()
        self.words = private_words()
        judge = sender(self._post)
        self.watch = HangWatch(self.words, 1, 0, 1.0, judge, lambda: self.looker)

    def _post(self, kind: str, /, **fields: Any) -> None:
        self.posted.append((kind, fields))

    def see(self, now: float) -> list[str]:
        self.watch.observe(now, None, is_over=False)
        return [kind for kind, _ in self.posted]


def _begun() -> tuple[Scene, float]:
    scene = Scene()
    scene.watch.inspections.ask(7)
    wait_until(lambda: scene.looker.alive_at, what="the look")
    return scene, time.monotonic()


def test_a_look_that_gets_on_is_waited_for_and_the_judge_is_told():
    scene, now = _begun()
    for second in range(1, 60):
        scene.looker.alive_at = now + second  # on a crowded machine it takes a minute
        told = scene.see(now + second)
    assert "looked" not in told
    assert told.count("looking") in range(14, 21)
    assert scene.posted[0] == ("looking", {"round": 7})
    scene.looker.may_end.set()
    wait_until(lambda: "looked" in scene.see(now + 60), what="the answer")
    assert scene.posted[-1][1]["look"]["processes"] == []
    assert "stacks_error" not in scene.posted[-1][1]["look"]


def test_a_look_without_a_sign_of_life_is_given_up():
    scene, now = _begun()
    assert "looked" not in scene.see(now + 7)
    scene.see(now + 9)
    assert scene.posted[-1][0] == "looked"
    assert scene.posted[-1][1]["look"]["stacks_error"] == "the inspection did not end"
    scene.looker.may_end.set()


def test_in_the_calm_nobody_reads_how_long_it_has_waited(monkeypatch):
    asked: list[str] = []

    def read(folder: str) -> tuple[float, float]:
        asked.append(folder)
        return 0.0, 0.0

    monkeypatch.setattr(monitor, "read_schedstat", read)
    scene = Scene()
    for step in range(1, 9):
        scene.words[BOUNDARY_NS] = step
        scene.see(100.0 + step / 4)
    assert asked == []
    scene.see(103.0)
    assert asked == ["/proc/1/task/1"]


def test_the_first_step_is_as_old_as_its_loop():
    scene, now = _begun()
    scene.words[LOOP_NS] = int((now - 40) * 1e9)
    scene.looker.may_end.set()
    wait_until(lambda: "looked" in scene.see(now), what="the answer")
    assert 40 <= scene.posted[-1][1]["look"]["boundary_age"] < 100
