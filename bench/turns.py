"""Ways that take turns, each in a process of its own.

A process is forked from one that has torch imported and the state in memory, and that has used no
thread of torch's yet; all of them share the state's memory, and what one changes in it all others
see. In each round every way has its turn, in an order that is drawn; a turn ends when what it wrote
is durable and nothing goes on in the background. What fails or takes too long is said in the tables
by a word.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.figures import PEER
from bench.machine import cores, memory_in_use
from bench.states import State
from bench.ways import Way

_LOOK_SECONDS = 0.01
TURN_SECONDS = 120.0
_OURS: set[int] = set()  # ends of pipes that processes are asked through


class Failed(Exception):
    """A way did not do what it was asked; the message is one line."""


@dataclass
class Answer:
    """What a process said, and how much memory was in use while it worked."""

    value: Any
    most_bytes: int


class Seat:
    """A forked process that does what it is asked, one thing after another."""

    def __init__(self, log: Path, acts: Callable[[], dict[str, Callable[..., Any]]]) -> None:
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        _OURS.update((self._ask, self._answers))
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            # Of the other processes too: each ends when its last client is gone.
            for descriptor in _OURS:
                os.close(descriptor)
            _serve(asked, answer, log, acts)
        os.close(asked)
        os.close(answer)
        self._log = log

    def ask(self, act: str, *arguments: Any, seconds: float = TURN_SECONDS) -> Answer:
        line = json.dumps([act, *arguments]) + "\n"
        try:
            os.write(self._ask, line.encode())
        except BrokenPipeError:
            raise Failed("its process is gone") from None
        until, most, text = time.monotonic() + seconds, 0, b""
        while not text.endswith(b"\n"):
            most = max(most, memory_in_use())
            if time.monotonic() > until:
                self.kill()
                raise Failed(f"took more than {seconds:.0f} s")
            if select.select([self._answers], [], [], _LOOK_SECONDS)[0]:
                piece = os.read(self._answers, 1 << 16)
                if not piece:
                    raise Failed(f"died: {self._last_words()}")
                text += piece
        value, error = json.loads(text)
        if error:
            raise Failed(error)
        return Answer(value, most)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return lines[-1][:200] if lines else "without a word"
        return "without a word"

    def kill(self) -> None:
        """The process and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        for descriptor in {self._ask, self._answers} & _OURS:
            _OURS.remove(descriptor)
            os.close(descriptor)
        until = time.monotonic() + 10
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                self.kill()
            time.sleep(0.01)
        # What it has started may have something to clean up, and goes by itself then.
        until = time.monotonic() + 2
        while self._has_company() and time.monotonic() < until:
            time.sleep(0.01)
        self.kill()

    def _has_company(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def _serve(asked: int, answer: int, log: Path, acts: Callable[[], Any]) -> None:
    """The child's life; never returns."""
    status = 0
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(cores())
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(written, 1)
        os.dup2(written, 2)
        can = acts()
        with os.fdopen(asked) as lines:
            for line in lines:
                act, *arguments = json.loads(line)
                value, error = None, ""
                try:
                    value = can[act](*arguments)
                except Exception as caught:  # noqa: BLE001  a peer may fail in any way: a row says so
                    traceback.print_exc()
                    error = f"{type(caught).__name__}: {caught}".splitlines()[0][:200]
                os.write(answer, (json.dumps([value, error]) + "\n").encode())
    except BaseException:  # noqa: BLE001  a forked child must never return into its parent's code
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)


@dataclass
class Contestant:
    """A way with its figures."""

    way: Way
    seat: Seat | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    extra_bytes: int = 0
    word: str = ""
    held_bytes: int = 0

    def note(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.figures.setdefault(name, []).append(value)


def saving(
    way: Way, shared: State | None, folder: Path
) -> Callable[[], dict[str, Callable[..., Any]]]:
    """What a process can be asked that saves by one way."""

    def acts() -> dict[str, Callable[..., Any]]:
        state = way.make_state() if way.make_state is not None else shared
        assert state is not None
        numbers = iter(range(1_000_000))

        def save() -> dict[str, float]:
            state.change()
            number = next(numbers)
            found = way.save(number)
            remove(folder / f"save-{number - 1}")
            way.rest()
            return found

        def open_and_warm() -> None:
            way.open(state, folder)
            for _ in range(way.warm_ups):
                save()

        return {"open": open_and_warm, "save": save, "close": way.close}

    return acts


def remove(place: Path) -> None:
    """A file, or a folder with all that is in it, if it is there."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


class Field:
    """All ways that take part in one topic, with a folder for each."""

    def __init__(
        self, ways: list[Way], state: State | None, folder: Path, *, together: bool
    ) -> None:
        self.contestants = [Contestant(way) for way in ways]
        self._state, self._folder, self._together = state, folder, together

    def folder_of(self, way: Way) -> Path:
        return self._folder / way.folder_name

    def run(self, rounds: int, saves: int = 1, seed: int = 0) -> None:
        """Every way in every round, in an order that is drawn, with so many saves in a turn."""
        drawn = random.Random(seed)
        try:
            for _ in range(rounds):
                for each in drawn.sample(self.contestants, len(self.contestants)):
                    with self._failure_as_a_word(each):
                        self._turn(each, saves)
        finally:
            for each in self.contestants:
                self._close(each)

    def _turn(self, each: Contestant, saves: int) -> None:
        if each.word:
            return
        if each.seat is None:
            self._open(each)
        assert each.seat is not None
        for _ in range(saves):
            before = memory_in_use()
            answer = each.seat.ask("save")
            each.extra_bytes = max(each.extra_bytes, each.held_bytes + answer.most_bytes - before)
            each.note(answer.value)
        if not self._together:
            self._close(each)

    def _open(self, each: Contestant) -> None:
        way = each.way
        if way.package and not _is_there(way.package):
            raise Failed("not installed")
        folder = self.folder_of(way)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        before = memory_in_use()
        each.seat = Seat(self._folder / f"{folder.name}.log", saving(way, self._state, folder))
        answer = each.seat.ask("open")
        each.held_bytes = memory_in_use() - before
        each.extra_bytes = max(each.extra_bytes, answer.most_bytes - before)

    def _close(self, each: Contestant) -> None:
        if each.seat is not None:
            with contextlib.suppress(Failed):
                each.seat.ask("close", seconds=60)
            each.seat.leave()
            each.seat = None

    @contextlib.contextmanager
    def _failure_as_a_word(self, each: Contestant) -> Iterator[None]:
        try:
            yield
        except Failed as failure:
            if each.way.kind != PEER:
                log = self._folder / f"{self.folder_of(each.way).name}.log"
                print(log.read_text(errors="replace") if log.exists() else "", file=sys.stderr)
                raise
            each.word = f"failed: {failure}" if str(failure) != "not installed" else str(failure)
            each.figures.clear()
            if each.seat is not None:
                each.seat.kill()
                each.seat.leave()
                each.seat = None


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def once(log: Path, work: Callable[[], Any], seconds: float = TURN_SECONDS) -> Any:
    """Do one thing in a process of its own and have its answer."""
    seat = Seat(log, lambda: {"do": work})
    try:
        return seat.ask("do", seconds=seconds).value
    finally:
        seat.leave()
