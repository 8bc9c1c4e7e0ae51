"""Where a hang takes place: the processes, what is found of them, and what is judged."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from holdfast._diagnose.verdict import Cause
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from tests.cli.command import succeed
from tests.hangs.table import SCRIPTS, Hang
from tests.support import Trainer, environment, keepers, wait_until, words_of

FOUND_SECONDS = 40.0  # a machine that is busy with other tests is slow to find anything


class Stage:
    """One hang of one script."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "run"
        self.prefix: tuple[str, ...] = ()  # the words before a command
        self.layout = RunLayout(self.folder)
        self._trainer: Trainer | None = None

    def start(self, how: str, *words: Any, script: str = "hanging.py") -> Trainer:
        self._trainer = Trainer(
            how,
            *("--run", self.folder, *words),
            script=SCRIPTS / script,
            prefix=self.prefix,
            env=environment(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1"),
            cwd=self.home,
        )
        return self._trainer

    def start_hang(self, hang: Hang) -> Trainer:
        return self.start(hang.how, "--timeout", hang.timeout, script=hang.script)

    @property
    def output(self) -> str:
        return self._trainer.output if self._trainer is not None else ""

    @property
    def step(self) -> int:
        """In which it hangs."""
        assert self._trainer is not None
        return int(self._trainer.wait_for("hanging ").split()[1])

    @property
    def is_alive(self) -> bool:
        assert self._trainer is not None
        return self._trainer.process.poll() is None

    @property
    def beat(self) -> dict[str, Any]:
        return read_json(self.layout.heartbeat(1))

    @property
    def pace(self) -> dict[str, Any]:
        found = self.beat.get("pace")
        return found if isinstance(found, dict) else {}

    def found(self, seconds: float = FOUND_SECONDS) -> dict[str, Any]:
        """The hang as the keeper has noted it, when it has."""
        return wait_until(
            lambda: read_json(self.layout.hang(1)), seconds, f"a hang in\n{self.output}\n"
        )

    def why(self) -> dict[str, Any]:
        """What `holdfast why` says of it now."""
        return dict(json.loads(succeed("why", self.folder, "--json")))

    def why_until(self, cause: Cause, *words: str) -> dict[str, Any]:
        """The same, when it is this with all these words; what it said last if it never is."""
        deadline = time.monotonic() + FOUND_SECONDS
        while True:
            said = self.why()
            is_it = said["cause"] == cause.value
            if is_it and all(word in json.dumps(said) for word in words):
                return said
            if time.monotonic() > deadline:
                return said
            time.sleep(0.5)

    def end(self) -> None:
        """End whatever is left, with the keepers after it."""
        if self._trainer is not None:
            children = _children(self._trainer.pid)
            with contextlib.suppress(OSError):
                os.kill(self._trainer.pid, signal.SIGCONT)
            self._trainer.kill()
            for process in children:
                with contextlib.suppress(psutil.Error):
                    process.kill()  # workers of a pool would wait for ever
            self._trainer.end()
        wait_until(lambda: not keepers(self.folder), 30, "the keeper's end")


def _children(pid: int) -> list[psutil.Process]:
    """All below a process but for its keeper, which leaves by itself."""
    try:
        found = psutil.Process(pid).children(recursive=True)
        words = {each: words_of(each) for each in found}
        return [each for each in found if words[each] and "holdfast._keeper" not in words[each]]
    except psutil.Error:
        return []


def check(verdict: dict[str, Any], hang: Hang, scripts: Path = SCRIPTS) -> None:
    """Whether it is the verdict of the table; if not, all of it is shown."""
    whole = json.dumps(verdict, indent=1)
    text = "\n".join([verdict["sentence"], *verdict["evidence"], *verdict["others"]])
    assert verdict["cause"] == hang.cause.value, whole
    for place in hang.places(scripts):
        assert place in text, f"nothing of {place} in {whole}"
    for words in hang.says:
        assert re.search(words, text), f"nothing of {words!r} in {whole}"
    assert hang.rank in (None, verdict["rank"]), whole
    assert "\n" not in verdict["sentence"]
    assert verdict["sentence"].endswith(".")
    assert verdict["advice"], whole
