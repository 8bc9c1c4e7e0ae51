"""Where a death takes place: the folder, the user, the limits, and what is judged afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.gather import gather_led, gather_run
from holdfast._diagnose.verdict import Sure, Verdict
from tests.cgroups import limited_memory
from tests.cli.command import PROGRAM
from tests.deaths.table import Death
from tests.ordinary_user import as_user
from tests.small_shm import small_shm
from tests.support import Trainer, environment, wait_for_keeper_gone

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_BYTES = 128 << 20
TORCH_LIMIT_BYTES = 640 << 20  # torch alone takes more than the other
RANKS_LIMIT_BYTES = 1280 << 20  # torchrun and two ranks have torch
LEAD = (str(PROGRAM), "run", "--max-restarts", "0", "--")


class Stage:
    """One death of one script, as root or as an ordinary user."""

    def __init__(self, home: Path, *, is_user: bool = False) -> None:
        self.home = home
        self.folder = home / "run"
        self.state = home / "state"
        self._is_user = is_user
        self._trainer: Trainer | None = None
        self._words: tuple[str, ...] = ()
        self.place = home

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        """Whatever starts now has little memory."""
        with limited_memory(limit_bytes) as group:
            self._words = group.prefix
            yield
            self.end()

    def small_shm(self, size: str) -> None:
        """Whatever starts now has a /dev/shm of its own, and a small one."""
        self._words = small_shm(size)
        self.place = Path("/dev/shm")

    @property
    def user_words(self) -> tuple[str, ...]:
        return as_user() if self._is_user else ()

    def environment(self, **more: str) -> dict[str, str]:
        own = {"HOLDFAST_STATE": str(self.state), "OMP_NUM_THREADS": "1"}
        own |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(self.home)}
        return environment(**own, **more)

    def start(
        self,
        script: str,
        *arguments: Any,
        is_run: bool = False,
        is_led: bool = False,
        launcher: tuple[str, ...] = (),
    ) -> Trainer:
        """Start a script that is to die, by itself or by torchrun."""
        words = [*arguments, *(["--run", self.folder] if is_run else [])]
        self._trainer = Trainer(
            *words,
            script=SCRIPTS / script,
            prefix=(*self._words, *self.user_words, *(LEAD if is_led else ()), *launcher),
            env=self.environment(),
            cwd=self.home,
        )
        return self._trainer

    def send(self, number: int) -> None:
        """Somebody sends a signal, when it is in the step that waits for one.

        To whoever stands in front, as a person and SLURM do; what nobody can hear or what is sent
        to deceive goes to the trainer itself.
        """
        assert self._trainer is not None
        self._trainer.wait_for("dying")
        own = int(self._trainer.wait_for("ready").split()[1])
        is_direct = number in (signal.SIGKILL, signal.SIGSEGV)
        os.kill(own if is_direct else self._trainer.pid, number)

    def end(self) -> None:
        if self._trainer is not None:
            self._trainer.end()
        if (self.folder / "run.json").exists():
            wait_for_keeper_gone(self.folder)

    def judge_run(self) -> Verdict:
        """What the run's folder tells, when its keeper has left."""
        wait_for_keeper_gone(self.folder)
        return judge(gather_run(self.folder))

    def judge_live(self) -> Verdict:
        """The same while it runs."""
        return judge(gather_run(self.folder))

    def life(self) -> Path:
        """The only life that `holdfast run` has led here."""
        (life,) = (self.state / "led").glob("*/life-0001")
        return life

    def judge_led(self) -> Verdict:
        """What the leader alone has noted."""
        return judge(gather_led(self.life()))

    def ask_why(self, *words: Any) -> dict[str, Any]:
        """What `holdfast why` says, asked by whoever ran it."""
        command = [*self.user_words, str(PROGRAM), "why", *map(str, words), "--json"]
        done = subprocess.run(
            command, env=self.environment(), cwd=self.home, capture_output=True, text=True
        )
        assert done.stderr == "", done.stderr
        found = json.loads(done.stdout)
        return dict(found)


def die(stage: Stage, death: Death, *words: str, is_run: bool, is_led: bool) -> Trainer:
    """Make it happen, and see that it looks as the table says."""
    if death.script != "dying_ranks.py":
        words = (*words, "--place", str(stage.place))
    trainer = stage.start(death.script, death.how, *words, is_run=is_run, is_led=is_led)
    if death.sent:
        stage.send(death.sent)
    status = trainer.wait()
    expected = 128 - death.status if is_led and death.status < 0 else death.status
    assert status == expected, trainer.output
    return trainer


def text_of(verdict: Verdict) -> str:
    return "\n".join([verdict.sentence, *verdict.evidence])


def check(verdict: Verdict, death: Death, sure: Sure | None) -> None:
    """Whether it is the verdict of the table; if not, all of it is shown."""
    head = f"{verdict.cause} {verdict.sure} rank {verdict.rank}"
    whole = "\n".join([head, text_of(verdict), *verdict.advice, *verdict.others])
    assert (verdict.cause, verdict.sure) == (death.cause, sure), whole
    for words in death.says:
        assert re.search(words, text_of(verdict)), f"nothing of {words!r} in {whole}"
    assert death.rank in (None, verdict.rank), whole
    assert "\n" not in verdict.sentence
    assert verdict.sentence.endswith(".")
