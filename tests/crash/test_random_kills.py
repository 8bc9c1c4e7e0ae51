"""kill -9 at random instants, of the trainer or of trainer and keeper, and started again each time.

Half of the kills meet a run with the default settings, and none of those costs more than
a second of work. The other half meet one that saves all the time, and many of them hit a
snapshot or a commit. Both runs end with the bits of an undisturbed one.
"""

from __future__ import annotations

import functools
import json
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.stages import (
    Life,
    attempt_of_arena,
    check_spread,
    show,
)
from tests.support import (
    Trainer,
    arena_files,
    environment,
    journal_events,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

ENDLESS = 1_000_000  # steps: a life ends by its kill, however late that comes
LAST_STEPS = 200
STEP_SECONDS = 0.01
MOST_LOST_SECONDS = 1.0

DEFAULT_AIMS = ("step", "snapshot", "step", "restoring", "step", "start-up")
SAVING_AIMS = ("snapshot", "commit", "step", "commit", "snapshot", "restoring")
SAVING = {"checkpoint_every": 5, "max_overhead": 0.2}


@dataclass
class Kill:
    """One kill and what the next life made of it."""

    life: Life
    stage: str
    both: bool
    left: int  # the newest step that the kill has left
    began_at: float  # when the life's loop began
    only_in_memory: bool  # and no keeper to make it durable
    lost_seconds: float = 0.0
    from_memory: bool = False


class Killed:
    """A run that is killed again and again."""

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        start: Callable[..., Trainer],
        arguments: list[str],
        keep_memory: str = "0",
    ) -> None:
        self.folder = folder
        self.trace = folder.with_name(f"{folder.name}.trace")
        self._rng = rng
        self._start = start
        self._arguments = arguments
        self._environment = environment(OMP_NUM_THREADS="1", HOLDFAST_KEEP_MEMORY=keep_memory)
        self.at = 0  # the step that is there to begin from
        self._unjudged: list[Kill] = []

    def begin(self, *more: object) -> Life:
        words = (self.folder, *self._arguments, *map(str, more), "--trace", self.trace)
        begin = functools.partial(self._start, *words, env=self._environment)
        return Life(self.folder, self.trace, begin)

    def kill(self, life: Life, aim: str, both: bool) -> Kill:
        """Kill this life at a random instant."""
        began_at = self._come_to(life, aim)
        assert life.trainer.process.poll() is None, life.trainer.output
        # The keeper first: with the trainer dead it would begin to bury it.
        pids = [*(life.keeper_pids() if both else []), life.trainer.pid]
        life.kill(signal.SIGKILL, pids, inside=aim)
        life.trainer.wait()
        if life.has_begun():
            self.judge(life)
        if both:
            wait_for_keeper_gone(self.folder)
        in_memory, on_disk = life.newest_in_memory(hashed=both), life.newest_on_disk()
        self.at = max(self.at, in_memory, on_disk)
        found = Kill(life, life.stage(), both, self.at, began_at, both and in_memory > on_disk)
        life.close()
        self._unjudged.append(found)
        return found

    def _come_to(self, life: Life, aim: str) -> float:
        """Wait for the instant of the kill; returns when the loop began."""
        if aim == "start-up":
            time.sleep(self._rng.uniform(0.1, 1.0))
            return time.time()
        if aim == "restoring":
            wait_until(life.has_claimed, 60)
            time.sleep(self._rng.uniform(0.0, 0.02))
            return time.time()
        life.trainer.ready()
        began_at = time.time()
        self.judge(life)
        wait_until(life.look, 60)
        wait_until(life.steps, 60)
        time.sleep(self._rng.uniform(0.1, 1.3 if aim == "step" else 0.5))
        return began_at

    def judge(self, life: Life) -> None:
        """This life has begun at the step that the kills before it have left."""
        step = life.trainer.ready()
        assert "Traceback" not in life.trainer.output, life.trainer.output
        said = next((line for line in life.trainer.lines if "resumed at step" in line), "")
        for kill in self._unjudged:
            assert step == kill.left, f"{kill}: resumed at {step}\n{life.trainer.output}"
            _weigh(kill, step)
        if len(self._unjudged) == 1 and self._unjudged[0].only_in_memory:
            assert "from memory" in said, life.trainer.output
            self._unjudged[0].from_memory = True
        self._unjudged.clear()
        if life.trainer.process.poll() is None:
            wait_until(
                lambda: all(attempt_of_arena(p) >= life.attempt for p in arena_files(self.folder)),
                60,
                "the end of the dead life's arena",
            )


def _weigh(kill: Kill, step: int) -> None:
    """How much work the kill has cost."""
    done = kill.life.steps()
    if done:
        known = {t.step: t.time for t in done}
        kill.lost_seconds = done[-1].time - known.get(step, min(kill.began_at, done[0].time))


def kill_again_and_again(
    run: Killed, aims: tuple[str, ...], kills: int, rng: random.Random
) -> tuple[list[Kill], int, str]:
    """Kill the run so often, then let it end; returns the kills, its steps and its hash."""
    wanted = [aims[i % len(aims)] for i in range(kills)]
    rng.shuffle(wanted)
    found = []
    for number, aim in enumerate(wanted):
        life = run.begin("--total", ENDLESS, "--sleep", STEP_SECONDS)
        found.append(run.kill(life, aim, both=number % 2 == 1))
    total = run.at + LAST_STEPS
    last = run.begin("--total", total)
    run.judge(last)
    ended = last.trainer.state_hash()
    wait_for_keeper_gone(run.folder)
    return found, total, ended


def kill_all(
    tmp_path: Path,
    start: Callable[..., Trainer],
    reference: Callable[[int], str],
    kills: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    half = kills // 2
    plain = Killed(tmp_path / "plain", rng, start, [], keep_memory="5min")
    plain_kills, total, plain_hash = kill_again_and_again(plain, DEFAULT_AIMS, half, rng)
    assert plain_hash == reference(total)

    larger = ["--size", "2048"]
    saving = Killed(tmp_path / "saving", rng, start, [*larger, "--settings", json.dumps(SAVING)])
    saving_kills, total, saving_hash = kill_again_and_again(saving, SAVING_AIMS, kills - half, rng)
    undisturbed = train_to_the_end(
        *(tmp_path / "undisturbed", *larger, "--total", total),
        env=environment(OMP_NUM_THREADS="1"),
    )
    assert saving_hash == undisturbed

    found = [*plain_kills, *saving_kills]
    show(f"kill -9, seed {seed}", [k.stage for k in found])
    lost = sorted(k.lost_seconds for k in plain_kills)
    print(
        f"  lost at default settings: most {lost[-1]:.3f} s, median {statistics.median(lost):.3f}"
    )
    print(f"  of trainer and keeper at once: {sum(k.both for k in found)}")
    assert lost[-1] <= MOST_LOST_SECONDS, lost
    assert any(k.from_memory for k in found)
    resumed = [e for e in journal_events(plain.folder, "start") if e["source"] == "memory"]
    assert len(resumed) > sum(k.from_memory for k in plain_kills)  # waiting memory was used
    check_spread([k.stage for k in found], inside_share=0.1)
    for folder in (plain.folder, saving.folder):
        assert arena_files(folder) == []


@pytest.mark.nightly  # tests/processes/test_kill.py
@pytest.mark.timeout(300)
def test_a_dozen_random_kills_change_no_bit_and_cost_no_second(tmp_path, start, reference):
    kill_all(tmp_path, start, reference, kills=12, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_hundred_random_kills_change_no_bit_and_cost_no_second(tmp_path, start, reference):
    kill_all(tmp_path, start, reference, kills=100, seed=2)
