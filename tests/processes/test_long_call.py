"""A deadline is kept although the main thread never comes back from a call into C."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.support import (
    arena_files,
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)

_GRACE_SECONDS = 4.0
_EAGER = {"max_overhead": 1.0}
_STUCK = ("--total", 40, "--hold-at", 8, "--sleep", 0.06)


@pytest.mark.parametrize("stick", ["with-gil", "without-gil"])
def test_the_last_snapshot_is_durable_before_the_grace_time_ends(
    folder, light, light_reference, stick
):
    settings = json.dumps({**_EAGER, "grace_seconds": _GRACE_SECONDS})
    trainer = light(folder, *_STUCK, "--stick", stick, "--settings", settings)
    in_memory = int(trainer.wait_for("holding").split()[1])
    assert in_memory > 0
    assert checkpoint_steps(folder) == []
    began = time.time()
    trainer.send(signal.SIGTERM)
    if stick == "without-gil":
        trainer.wait_for("If 4 s are not enough")
    wait_until(lambda: checkpoint_steps(folder), 20, "the checkpoint")
    assert trainer.process.poll() is None
    assert checkpoint_steps(folder) == [in_memory]
    made = wait_until(lambda: journal_events(folder, "checkpoint"))
    assert (made[0]["reason"], made[0]["step"]) == ("deadline", in_memory)
    assert made[0]["time"] - began < _GRACE_SECONDS
    assert journal_events(folder, "signal")[0]["name"] == "SIGTERM"
    assert journal_events(folder, "stop") == []  # no boundary was ever passed
    trainer.kill()  # as a scheduler does when the time is up
    assert trainer.wait() == -signal.SIGKILL
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    again = light(folder, "--total", 40)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40)


def _press_twice(trainer, folder) -> None:
    trainer.send(signal.SIGINT)
    wait_until(lambda: journal_events(folder, "signal"), what="the keeper's notice")
    time.sleep(0.25)  # what comes sooner counts as the same press
    trainer.send(signal.SIGINT)


def test_a_second_ctrl_c_leaves_at_once_from_a_call_that_never_returns(
    folder, light, light_reference
):
    settings = json.dumps(_EAGER)
    trainer = light(folder, *_STUCK, "--stick", "without-gil", "--settings", settings)
    in_memory = int(trainer.wait_for("holding").split()[1])
    _press_twice(trainer, folder)
    assert trainer.wait(20) == 130
    assert checkpoint_steps(folder) == [in_memory]
    assert light(folder, "--total", 40).state_hash() == light_reference(40)


@pytest.mark.nightly  # above: one Ctrl-C; test_terminal.py: a second one to a step that can be left
@pytest.mark.parametrize(
    "settings",
    [_EAGER, {"max_overhead": 0.0, "checkpoint_every": 1}],
    ids=["to-be-saved", "saved-already"],
)
def test_a_second_ctrl_c_ends_a_process_that_holds_the_interpreter(
    folder, light, light_reference, settings
):
    """Nobody in the process can say os._exit, so the keeper saves and then kills it."""
    trainer = light(folder, *_STUCK, "--stick", "with-gil", "--settings", json.dumps(settings))
    in_memory = int(trainer.wait_for("holding").split()[1])
    if "checkpoint_every" in settings:
        wait_until(lambda: in_memory in checkpoint_steps(folder))
    _press_twice(trainer, folder)
    assert trainer.wait(20) == -signal.SIGKILL
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder)[-1] == in_memory
    assert journal_events(folder, "killed-by-keeper") != []
    record = json.loads((folder / "attempts/0001/exit.json").read_text())
    assert (record["status"], record["how"]) == (130, "left")
    again = light(folder, "--total", 40)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40)
