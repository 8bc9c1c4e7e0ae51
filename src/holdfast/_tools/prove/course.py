"""One course of the script from its beginning to its end, in a copy of the user's folder."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast._environment.variables import child_environment
from holdfast._store.folder.errand import Errand
from holdfast._tools.prove.attempt import Client, Event, Life, Listener, Starter
from holdfast._tools.prove.copying import copy_folder, place_command
from holdfast._tools.prove.files import Filing
from holdfast._tools.prove.history import History
from holdfast._tools.prove.proof import Wishes

_INJECT = Path(__file__).resolve().parent / "witness" / "inject"
_PACKAGES = Path(__file__).resolve().parents[3]
_LEAST_SILENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.02
_LAST_WORDS = 6
_ORPHAN_SECONDS = 60.0
_ORPHAN_LOOK_SECONDS = 0.1

Hear = Callable[[Client, Event], Mapping[str, Any] | None]


class Hung(Exception):
    """The script has told nothing for too long, and was ended."""


class Course:
    """A folder of its own, and one life after the other in it."""

    def __init__(
        self,
        name: str,
        wishes: Wishes,
        workplace: Path,
        listener: Listener,
        start: Starter,
        hash_seed: int,
    ) -> None:
        self.folder = workplace / name
        self.work = self.folder / "work"
        self.end = self.folder / "end"
        for path in (self.work, self.end, self.folder / "runs", self.folder / "dir"):
            path.mkdir(parents=True, exist_ok=True)
        self.linked = copy_folder(wishes.folder, self.work, without=[workplace.resolve()])
        self._given = {path for path in self.work.rglob("*") if path.is_file()}
        self.filing = Filing(self.work)
        self.lives = 0
        self.runs: dict[str, str] = {}  # run folders, by the name that the script gave them
        self._wishes = wishes
        self._listener = listener
        self._start = start
        self._hash_seed = hash_seed
        self._has_opened = False  # a run of holdfast, in this life
        self.life: Life | None = None
        self.longest_silence = 0.0

    def live(
        self,
        hear: Hear,
        tick: Callable[[float], None] | None = None,
        patience: float | None = None,
        known: Filing | None = None,
    ) -> int:
        """Start the script and stay until it is over; its exit status, negative for a signal.

        `known` are the files of the undisturbed run: they tell what there is to resume from.
        """
        is_first, self.lives = self.lives == 0, self.lives + 1
        self._listener.drop_all()
        self._has_opened = False
        self.filing.begin_life()
        words = self._wishes.command
        if not is_first and self._wishes.resume_command and self._has_saved(known):
            words = self._wishes.resume_command
        life = self.life = Life(
            self._start(self._command(words), self.work, self._environment(), self.output),
            self._listener,
        )
        limit = math.inf if patience is None else max(_LEAST_SILENCE_SECONDS, 20 * patience)
        last = time.monotonic()
        try:
            while (status := life.process.poll()) is None:
                for client, event in life.hear(_LOOK_SECONDS):
                    now = time.monotonic()
                    self.longest_silence = max(self.longest_silence, now - last)
                    last = now
                    self._hear(client, event, hear)
                now = time.monotonic()
                if tick is not None:
                    tick(now)
                if now - last > limit:
                    raise Hung
            self._hear_orphans(life, hear)
            self._hear_the_rest(hear)
        finally:
            life.end()
        return status

    def _has_saved(self, known: Filing | None) -> bool:
        if known is not None and known.saved:
            return self.filing.has_any_like(known.saved)
        # It saves in a way that is not seen: any new file may be a checkpoint.
        places = (self.work, self.folder / "dir", self.folder / "runs")
        files = {path for place in places for path in place.rglob("*") if path.is_file()}
        return bool({path for path in files if "__pycache__" not in path.parts} - self._given)

    @property
    def output(self) -> Path:
        """What the present life prints."""
        return self.folder / f"output-{self.lives}.txt"

    def last_words(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return "\n".join([line for line in lines if line.strip()][-_LAST_WORDS:])

    def _hear(self, client: Client, event: Event, hear: Hear) -> None:
        if event["event"] == "run":
            self._has_opened = True
            self.runs[event["name"]] = event["folder"]
        answer = hear(client, event)
        if "ask" in event:
            client.answer(event["ask"], answer or {})

    def _hear_orphans(self, life: Life, hear: Hear) -> None:
        """Ranks may outlive whatever has started them: the life is over when they are gone.

        Those of a run save and leave by themselves. Of other scripts nobody would end them.
        """
        last = time.monotonic()
        while self._has_opened and life.outlives_its_leader():
            for client, event in life.hear(_ORPHAN_LOOK_SECONDS):
                last = time.monotonic()
                self._hear(client, event, hear)
            if time.monotonic() - last > _ORPHAN_SECONDS:
                raise Hung

    def _hear_the_rest(self, hear: Hear) -> None:
        """What was said before the end, and not heard yet."""
        while heard := list(self._listener.hear(0.0)) or self._listener.clients:
            for item in heard:
                if isinstance(item, tuple):
                    self._hear(*item, hear)
            if heard is self._listener.clients:
                # Connections of processes that outlive the script, such as its workers.
                rest = list(self._listener.hear(0.05))
                if not rest:
                    return
                for client, event in rest:
                    self._hear(client, event, hear)

    def _command(self, words: Sequence[str]) -> list[str]:
        substitutes = {"{dir}": str(self.folder / "dir")}
        if self._wishes.ranks is not None:
            substitutes["{ranks}"] = str(self._wishes.ranks)
        return place_command(tuple(words), self._wishes.folder, self.work, substitutes)

    def _environment(self) -> dict[str, str]:
        errand = Errand(
            socket=str(self._listener.path),
            work=str(self.work.resolve()),
            runs=str(self.folder / "runs"),
            end=str(self.end),
        )
        environment = child_environment()
        paths = [str(_INJECT), *filter(None, [environment.get("PYTHONPATH")])]
        if not any((Path(entry) / "holdfast").is_dir() for entry in sys.path if "site-" in entry):
            paths.append(str(_PACKAGES))  # run from a checkout, by a path on sys.path
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        # Another one for each life, as without a proof, but one that can be had again.
        environment.setdefault("PYTHONHASHSEED", str(self._hash_seed + self.lives))
        environment["HOLDFAST_ERRAND"] = errand.to_text()
        return environment


class Undisturbed:
    """What an undisturbed course has shown."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.histories: dict[int, History] = {}
        self.start_seconds = 0.0
        self.step_seconds = 0.02
        self.phases = 0
        self._sight_times: list[float] = []
        self._boundary_times: list[float] = []

    def run(self, on_step: Callable[[int], None]) -> int:
        """Run it to its end."""
        began = time.monotonic()

        def hear(client: Client, event: Event) -> None:
            now = time.monotonic()
            kind = event["event"]
            history = self.histories.get(client.rank)
            if kind in ("sight", "boundary") and history is None:
                history = self.histories[client.rank] = History()
                self.start_seconds = self.start_seconds or now - began
            if history is not None and client.trains:
                history.note(event)
            if kind == "sight" and client.rank == 0:
                self._sight_times.append(now)
            if kind == "boundary" and client.rank == 0:
                self._boundary_times.append(now)
            if client.rank == 0:
                on_step(self.steps)
                self.phases += kind == "phase"
                self.course.filing.note(event, self.steps)

        status = self.course.live(hear)
        times = self._sight_times or self._boundary_times
        gaps = sorted(after - before for before, after in itertools.pairwise(times))
        if gaps:
            self.step_seconds = gaps[len(gaps) // 2]
        return status

    @property
    def steps(self) -> int:
        """Updates of the first rank, or boundaries of runs where no update was seen."""
        history = self.histories.get(0)
        if history is None:
            return 0
        return len(history.sights) or len(history.boundaries)

    def moments(self) -> list[str]:
        """Which moments there are to interrupt it at."""
        history = self.histories.get(0, History())
        found = ["start", "step"]
        if history.sights:
            found += ["update", "gradient"]
        if self.course.filing.save_places:
            found += ["save", "load"]
        if history.boundaries:
            found += ["boundary", "commit"]
        if self.phases:
            found.append("phase")
        return found
