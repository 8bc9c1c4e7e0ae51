"""The keeper finds a run that stands still, says why, and is not deceived by what only takes long.

Here with given or short times; learned times are in tests/unit/environment/test_patience.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.requests import ask
from tests.support import (
    checkpoint_steps,
    environment,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
)

_GIVEN = ("--settings", '{"hang_timeout": 1.5, "max_overhead": 1.0}')
_STEPS = ("--total", 60, "--sleep", 0.05)


def _hang(folder: Path) -> dict[str, Any]:
    return read_json(folder / "attempts/0001/hang.json")


def _beat(folder: Path) -> dict[str, Any]:
    return read_json(folder / "attempts/0001/heartbeat.json")


@pytest.mark.nightly  # a hang is found in tests/hangs; what is learned is in test_patience.py
def test_steps_of_50_ms_that_stop_are_found_within_30_seconds_without_any_setting(folder, light):
    trainer = light(folder, *_STEPS, "--hold-at", 40, "--stick", "without-gil")
    trainer.wait_for("holding ")
    began = time.monotonic()
    line = trainer.wait_for("stick_in_c", 40)
    assert time.monotonic() - began < 30
    assert line.startswith("holdfast: ")
    (told,) = journal_events(folder, "hang")
    assert told["policy"] == "report"
    found = _hang(folder)
    assert (found["how"], found["patience"], found["ended"]) == ("learned", 20.0, None)
    assert found["usual_step_seconds"] == pytest.approx(0.05, rel=0.8)
    assert found["sentence"] in trainer.output
    assert 15 < found["found"] - found["began"] < 30
    wait_until(lambda: _beat(folder).get("hang"), 5, "the heartbeat")
    assert _beat(folder)["hang"]["sentence"] == found["sentence"]
    assert psutil.pid_exists(trainer.pid), "nothing was done to it"


# Over 5 s: a hang is called one after its time and two looks.
def test_a_run_that_hangs_saves_and_leaves_when_it_is_told_to(folder, light):
    settings = '{"hang_timeout": 1.5, "max_overhead": 1.0, "grace_seconds": 2}'
    trainer = light(
        folder, *_STEPS, "--settings", settings, "--hold-at", 30, "--stick", "without-gil"
    )
    in_memory = int(trainer.wait_for("holding").split()[1])
    trainer.wait_for("More: holdfast why", 20)
    os.kill(trainer.pid, signal.SIGTERM)
    assert trainer.wait(20) in (143, -signal.SIGTERM), trainer.output
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder)[-1] == in_memory


# Over 5 s: as above.
def test_a_call_that_holds_the_interpreter_is_said_by_the_keeper(folder, light):
    settings = '{"hang_timeout": 4, "max_overhead": 1.0}'
    trainer = light(folder, *_STEPS, "--settings", settings, "--hold-at", 30, "--stick", "with-gil")
    line = trainer.wait_for("holds the interpreter", 30)
    assert line.startswith("holdfast: No step for ")
    assert trainer.wait_for("More: holdfast why").startswith(f"More: holdfast why {folder}")
    assert _hang(folder)["cause"] == "hang-gil"
    trainer.kill()


# tests/hangs/test_one_process.py shows a hang that ends by itself.
@pytest.mark.nightly
def test_a_step_that_is_made_after_all_ends_the_hang(folder, light, gate):
    trainer = light(folder, *_STEPS, *_GIVEN, "--hold-at", 30)
    trainer.wait_for("More: holdfast why", 20)
    gate.touch()
    trainer.wait_for("the run continues: a step was completed")
    wait_until(lambda: _hang(folder).get("ended"), 5, "its end in the record")
    assert trainer.wait() == 0
    assert len(journal_events(folder, "hang-over")) == 1


# With the interpreter held: test_supervisor_hangs.py has it below a real leader.
@pytest.mark.nightly  # test_supervisor_hangs.py
@pytest.mark.parametrize(
    "stick", [pytest.param("with-gil", marks=pytest.mark.nightly), "without-gil"]
)
def test_under_a_leader_it_saves_and_leaves_with_77(folder, light, light_reference, stick):
    led = environment(HOLDFAST_HANG_TIMEOUT="1.5")
    trainer = light(folder, *_STEPS, *_GIVEN, "--hold-at", 30, "--stick", stick, env=led)
    # One that holds its interpreter cannot leave, and is killed.
    assert trainer.wait(30) == (-signal.SIGKILL if stick == "with-gil" else 77)
    wait_for_keeper_gone(folder)
    ended = read_json(folder / "attempts/0001/exit.json")
    assert ended["status"] == 77
    assert not ended.get("asked")
    assert _hang(folder)["policy"] == "restart"
    step = checkpoint_steps(folder)[-1]
    assert step >= 28
    again = light(folder, "--total", 60, env=led)
    assert again.ready() == step
    assert again.state_hash() == light_reference(60)


# tests/ranks/test_hangs.py has it of a rank.
@pytest.mark.nightly
def test_what_is_stopped_is_no_hang_and_is_never_killed(folder, light):
    led = environment(HOLDFAST_HANG_TIMEOUT="1.5")
    trainer = light(folder, *_STEPS, env=led)
    trainer.wait_for("ready")
    wait_until(lambda: _beat(folder).get("step", 0) > 5, 20, "steps")
    trainer.send(signal.SIGSTOP)
    (paused,) = wait_until(lambda: journal_events(folder, "paused"), 20, "the note")
    assert paused["by"] == "SIGSTOP"
    wait_until(lambda: _beat(folder).get("paused"), 5, "the heartbeat")
    time.sleep(3)  # twice what it was given
    trainer.send(signal.SIGCONT)
    assert trainer.wait() == 0
    assert journal_events(folder, "hang") == []
    assert len(journal_events(folder, "resumed")) == 1


@pytest.mark.nightly  # tests/unit/keeper/test_hang_judge.py
def test_a_run_that_waits_for_a_reader_of_what_it_prints_is_never_ended(folder, script):
    trainer = script(
        folder,
        """
        os.environ["HOLDFAST_HANG_TIMEOUT"] = "1.5"
        reads, writes = os.pipe()
        os.dup2(writes, 1)

        def read_late():
            wait_for(gate)
            while os.read(reads, 1 << 16):
                pass

        threading.Thread(target=read_late, daemon=True).start()
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                time.sleep(0.03)
                if step == 20:
                    os.write(1, bytes(1 << 20))
        """,
    )
    line = trainer.wait_for("which no process reads", 30)
    assert line.startswith("holdfast: the run is held by its own output")
    time.sleep(3)  # twice what it was given
    Path(f"{folder}.gate").touch()
    assert trainer.wait() == 0, trainer.output
    assert journal_events(folder, "hang") == []


# tests/unit/environment/test_patience.py: test_who_was_away_himself_counts_anew
@pytest.mark.nightly
def test_a_keeper_that_was_stopped_together_with_its_trainer_raises_no_alarm(folder, light):
    trainer = light(folder, *_STEPS, *_GIVEN)
    trainer.ready()
    wait_until(lambda: _beat(folder).get("step", 0) > 5, 20, "steps")
    (keeper,) = keepers(folder)
    keeper.suspend()
    trainer.send(signal.SIGSTOP)
    time.sleep(7)
    keeper.resume()  # first: it sees one that has stood for long
    time.sleep(0.5)
    trainer.send(signal.SIGCONT)
    assert trainer.wait() == 0
    assert journal_events(folder, "hang") == journal_events(folder, "paused") == []


# Each of them by its times: tests/unit/environment/test_patience.py and test_hang_judge.py.
@pytest.mark.nightly
def test_no_alarm_for_a_slow_first_step_an_evaluation_or_work_that_moves(folder, script):
    trainer = script(
        folder,
        """
        settings = holdfast.Settings(hang_timeout=1.5)
        weights = make_weights()

        def compile_something(seconds):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sum(n * n for n in range(300))
                sorted(range(300), key=lambda n: -n)

        with holdfast.Run(folder, settings=settings, weights=weights) as run:
            for step in run.steps(60):
                if step == 0:
                    time.sleep(5)
                train_one(weights)
                time.sleep(0.03)
                if step == 20:
                    with run.phase("eval"):
                        time.sleep(5)
                if step == 40:
                    compile_something(6)
            print("trained", flush=True)
        """,
    )
    assert trainer.wait() == 0, trainer.output
    assert journal_events(folder, "hang") == []
    # A busy machine may make other steps slow as well, and then it is true; but once for each.
    slow = [event["step"] for event in journal_events(folder, "slow")]
    assert len(slow) == len(set(slow))
    assert not {0, 20} & set(slow), "what has a patience of its own is not called slow"


# tests/unit/environment/test_patience.py:
# test_a_keeper_that_takes_over_does_not_know_how_long_it_stood_before
@pytest.mark.nightly
def test_a_keeper_that_takes_over_knows_nothing_of_the_time_before(folder, light, gate):
    trainer = light(folder, *_STEPS, "--settings", '{"hang_timeout": 2.5}', "--hold-at", 30)
    trainer.wait_for("holding ")
    (keeper,) = keepers(folder)
    keeper.kill()
    # Who stands in a step cannot start another one: its next boundary does.
    time.sleep(3)
    gate.touch()
    trainer.wait_for("started another")
    assert trainer.wait() == 0
    assert journal_events(folder, "hang") == []


@pytest.mark.nightly  # by `holdfast stacks` in tests/cli/test_stacks.py
def test_stacks_on_request(folder, light, gate):
    trainer = light(folder, *_STEPS, "--hold-at", 10)
    trainer.wait_for("holding ")
    ask(folder, "stacks", token="abc")
    path = folder / "attempts/0001/look.json"
    wait_until(lambda: read_json(path).get("token") == "abc", 15, "the look")
    (look,) = json.loads(path.read_text())["looks"]
    assert (look["rank"], look["pid"], look["in_loop"]) == (0, trainer.pid, True)
    assert "wait_for" in json.dumps(look["processes"][0])
    gate.touch()
    assert trainer.wait() == 0
    assert journal_events(folder, "hang") == []
