"""A stop inside a phase is durable at once and loses nothing, even if it never looks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from tests.support import (
    SCRIPTS,
    Trainer,
    arena_files,
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)

PHASES = SCRIPTS / "phases.py"
SHAPES = ("epochs", "steps", "by_hand")
STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}
SOON_SECONDS = 5.0  # a fraction of a second where nothing else runs; the grace time is ten


@pytest.fixture
def begin(start) -> Callable[..., Trainer]:
    def begin(folder: Path, *arguments: object) -> Trainer:
        return start(folder, *arguments, script=PHASES)

    return begin


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], str]:
    known: dict[str, str] = {}

    def find(shape: str) -> str:
        if shape not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            trainer = Trainer(folder, "--shape", shape, script=PHASES)
            known[shape] = trainer.state_hash()
        return known[shape]

    return find


def hold(trainer: Trainer, count: int) -> tuple[int, int]:
    """Wait for the phase that is held up; returns the step it stands at and the one in memory."""
    wait_until(lambda: sum(line.startswith("phase ") for line in trainer.lines) > count, 30)
    last = [line for line in trainer.lines if line.startswith("phase ")][count]
    return int(last.split()[1]), int(last.split()[2])


@pytest.mark.parametrize("number", STATUSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stop_in_a_phase_is_durable_at_once_and_loses_nothing(
    folder, tmp_path, begin, undisturbed, shape, number
):
    first = begin(folder, "--shape", shape, "--hold-at", 2, "--gate", tmp_path / "never")
    step, _ = hold(first, 2)
    asked = time.monotonic()
    first.send(number)
    # Durable comes first, then the end; a machine that is busy takes a little longer to leave.
    wait_until(lambda: step in checkpoint_steps(folder), 10, "the checkpoint")
    assert time.monotonic() - asked < SOON_SECONDS
    assert first.wait(10) == STATUSES[number]
    assert f"step {step} is durable" in first.output
    assert "Traceback" not in first.output
    wait_for_keeper_gone(folder)
    second = begin(folder, "--shape", shape)
    assert second.ready() == step
    assert second.state_hash() == undisturbed(shape)


# Over 5 s: the call holds the interpreter until the keeper ends it.
@pytest.mark.parametrize("stick", ["with-gil", "without-gil"])
def test_a_phase_that_sits_in_c_is_left_for_it(folder, begin, undisturbed, stick):
    first = begin(folder, "--hold-at", 1, "--stick", stick)
    step, in_memory = hold(first, 1)
    assert in_memory == step
    asked = time.monotonic()
    first.send(signal.SIGTERM)
    wait_until(lambda: step in checkpoint_steps(folder), 10, "the checkpoint")
    assert time.monotonic() - asked < SOON_SECONDS
    first.wait(20)
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    second = begin(folder)
    assert second.ready() == step
    assert second.state_hash() == undisturbed("epochs")


def test_holdfast_stop_in_a_phase_leaves_at_once_and_cleanly(folder, tmp_path, begin, undisturbed):
    first = begin(folder, "--hold-at", 1, "--gate", tmp_path / "never")
    step, _ = hold(first, 1)
    holdfast.stop(folder, "enough")
    assert first.wait(10) == 130
    assert "enough" in first.output
    assert f"step {step} is durable" in first.output
    second = begin(folder)
    assert second.ready() == step
    assert second.state_hash() == undisturbed("epochs")


def test_a_phase_that_swallows_the_stop_ends_at_the_next_boundary(folder, tmp_path, begin):
    gate = tmp_path / "gate"
    first = begin(folder, "--hold-at", 1, "--gate", gate, "--swallow")
    step, _ = hold(first, 1)
    first.send(signal.SIGTERM)
    wait_until(lambda: step in checkpoint_steps(folder), 2, "the checkpoint")
    gate.touch()
    assert first.wait(10) == 143
    second = begin(folder)
    assert second.ready() == step  # at the turn of the epoch, behind the phase
    second.state_hash()


def test_a_kill_in_a_phase_costs_no_step(folder, tmp_path, begin, undisturbed):
    first = begin(folder, "--hold-at", 2, "--gate", tmp_path / "never")
    step, in_memory = hold(first, 2)
    assert in_memory == step
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    second = begin(folder)
    assert second.ready() == step
    assert second.state_hash() == undisturbed("epochs")


@pytest.mark.parametrize("shape", ["steps", "by_hand"])
def test_from_the_second_time_on_a_phase_amid_steps_finds_its_boundary_in_memory(
    folder, tmp_path, begin, shape
):
    slow = '{"max_overhead": 0.0001}'
    first = begin(
        folder, "--shape", shape, "--settings", slow, "--hold-at", 3, "--gate", tmp_path / "x"
    )
    step, in_memory = hold(first, 3)
    assert in_memory == step
    first.send(signal.SIGTERM)
    assert first.wait(10) == 143


def test_status_shows_epoch_and_phase(folder, tmp_path, begin):
    first = begin(folder, "--hold-at", 1, "--gate", tmp_path / "never")
    hold(first, 1)
    from holdfast._store.folder.attempts import read_json
    from holdfast._store.folder.layout import RunLayout

    path = RunLayout(folder).heartbeat(1)
    wait_until(lambda: read_json(path).get("phase") == "eval", 10)
    assert (read_json(path)["epoch"], read_json(path)["epochs"]) == (2, 5)
    first.send(signal.SIGTERM)
    assert first.wait(10) == 143
    assert journal_events(folder, "stop")[-1]["status"] == 143
