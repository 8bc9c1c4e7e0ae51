"""SIGINT, SIGTERM and SIGQUIT at random instants, and started again each time.

Asked to stop in its loop, a run loses nothing at all. Ctrl-\\ costs what a kill costs, and
leaves the stacks of all threads. Every run ends with the bits of an undisturbed one.
"""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from tests.crash.stages import AFTER_THE_FIRST_STEP, Life, check_spread, show
from tests.support import arena_files, environment, wait_for_keeper_gone, wait_until

ENDLESS = 1_000_000  # steps: a life ends by its signal, however late that comes
LAST_STEPS = 100
SAVING = {"checkpoint_every": 5, "max_overhead": 0.2}
AIMS = ("step", "snapshot", "commit", "step", "start-up")
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGQUIT: -signal.SIGQUIT}
# Before the run is open nobody has asked us, and Python does what it always does.
EARLY_STATUS = {n: {-n} for n in STATUS} | {signal.SIGINT: {-signal.SIGINT, 1, 130}}


def interrupt(life: Life, number: signal.Signals, aim: str, rng: random.Random) -> str:
    """Send the signal at a random instant, and check how the process ends; returns the stage."""
    if aim == "start-up":
        time.sleep(rng.uniform(0.1, 0.8))
    else:
        life.trainer.ready()
        wait_until(life.look, 60, f"an arena of attempt {life.attempt}: {life.trainer.output}")
        wait_until(life.steps, 60)
        time.sleep(rng.uniform(0.05, 0.6))
    assert life.trainer.process.poll() is None, life.trainer.output
    # A stop is clean, and changes the slots: what it hit is to be seen before it only.
    before = life.kill(number, [life.trainer.pid], inside=aim)
    if aim == "start-up" and _goes_on(life):
        # Somewhere in the imports a bare `except` took the KeyboardInterrupt for its own.
        before = life.kill(number, [life.trainer.pid])
    status = life.trainer.wait()
    stage = life.stage() if number == signal.SIGQUIT else before or life.stage()
    if stage in AFTER_THE_FIRST_STEP:
        assert status == STATUS[number], life.trainer.output
        assert "Traceback" not in life.trainer.output
    elif stage == "start-up":
        assert status in EARLY_STATUS[number], life.trainer.output
    return stage


def _goes_on(life: Life) -> bool:
    """Whether a process that was interrupted while it started still trains."""
    # One that has only opened its run may still be about to die.
    wait_until(lambda: life.steps() or life.trainer.process.poll() is not None, 60)
    return life.trainer.process.poll() is None


def newest_left(life: Life, number: signal.Signals, at: int) -> int:
    """The step that the next life must begin at."""
    done = life.steps()
    if number == signal.SIGQUIT:
        stacks = life.layout.stacks(life.attempt)
        if done:
            assert "most recent call first" in stacks.read_text()
        return max(at, life.newest_in_memory(hashed=False), life.newest_on_disk())
    return done[-1].step if done else at


def interrupt_again_and_again(folder, start, reference, number, count, seed) -> None:
    rng = random.Random(seed)
    trace = folder.with_name("trace")
    arguments = (folder, "--settings", json.dumps(SAVING), "--trace", trace)
    endless = (*arguments, "--total", ENDLESS, "--sleep", 0.01)
    env = environment(OMP_NUM_THREADS="1")
    wanted = [AIMS[i % len(AIMS)] for i in range(count)]
    rng.shuffle(wanted)
    stages, left = [], 0
    for aim in wanted:
        life = Life(folder, trace, lambda: start(*endless, env=env))
        stages.append(interrupt(life, number, aim, rng))
        if life.has_begun():
            assert life.trainer.ready() == left, f"after {stages}"
        left = newest_left(life, number, left)
        life.close()
    total = left + LAST_STEPS
    last = start(*arguments, "--total", total, env=env)
    assert last.ready() == left, f"after {stages}"
    assert last.state_hash() == reference(total)
    show(f"{number.name}, seed {seed}", stages)
    check_spread(stages, inside_share=0.1)
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


@pytest.mark.nightly  # tests/processes/test_exit_status.py
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        signal.SIGTERM,
        pytest.param(signal.SIGQUIT, marks=pytest.mark.nightly),
    ],
    ids=lambda number: number.name,
)
def test_a_few_random_signals_change_no_bit(number, folder, start, reference):
    interrupt_again_and_again(folder, start, reference, number, count=4, seed=int(number))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", list(STATUS), ids=lambda number: number.name)
def test_many_random_signals_change_no_bit(number, folder, start, reference):
    interrupt_again_and_again(folder, start, reference, number, count=25, seed=100 + int(number))
