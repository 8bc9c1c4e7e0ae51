"""Loggers beside real trainings: killed and resumed, a curve has every step once."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.crash.small_disk import mount_small_disk
from tests.support import SCRIPTS, environment, wait_for_keeper_gone, wait_until, words_of

TRAINING = SCRIPTS / "logged_training.py"
# On disk every 100 steps, and in memory hardly ever: what is killed has logged more than it saved.
SELDOM = '{"checkpoint_every": 100, "max_overhead": 1e-9}'
EAGER = '{"max_overhead": 1.0}'
_OF_A_PERSON = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI", "NETRC")


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    extras = ",".join(missing)
    return pytest.mark.skipif(bool(missing), reason=f"pip install 'holdfast[{extras}]'")


@pytest.fixture
def train(start, folder):
    """Start the training; an earlier one's loggers may still write."""

    def begin(*arguments, **options):
        # Whoever runs the tests may be known to W&B: nothing of them is to go there.
        env = environment(HOME=str(folder.parent), WANDB_SILENT="true")
        env = {name: value for name, value in env.items() if name not in _OF_A_PERSON}
        return start(folder, *arguments, script=TRAINING, **{"env": env, **options})

    return begin


def logged_by(kind: str, folder: Path) -> dict[str, list[list[float]]]:
    place = folder / "loggers" if kind == "wandb" else Path(f"{folder}-{kind}")
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / "read_logged.py"), kind, str(place)]
    return json.loads(subprocess.check_output(command, text=True, env=environment()))


def steps_of(rows):
    return [row[0] for row in rows]


def loggers_of(folder):
    """The processes that log for a run folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if len(words) > 4 and "holdfast.loggers._child" in words[3] and str(folder) in words[4]:
            found.append(process)
    return found


def wait_for_loggers_gone(folder):
    wait_until(lambda: not loggers_of(folder), 60, "the loggers' end")


def kill(trainer, folder):
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)


@needs("tensorboard")
def test_tensorboard_shows_every_step_once_after_a_kill(folder, train, light_reference):
    first = train("tensorboard", "--hold-at", 250, "--settings", SELDOM)
    first.wait_for("holding")
    kill(first, folder)
    second = train("tensorboard", "--settings", SELDOM)
    assert second.ready() < 250
    assert second.state_hash() == light_reference(400)
    found = logged_by("tensorboard", folder)
    assert steps_of(found["at"]) == list(range(400))
    assert [row[1] for row in found["at"]] == list(range(400))
    times = [row[2] for row in found["at"]]
    assert times == sorted(times)
    assert steps_of(found["begun"]) == [0]  # what the second life logged before its loop is known
    assert len(list(Path(f"{folder}-tensorboard").iterdir())) == 2


@needs("tensorboard")
def test_what_was_logged_before_a_snapshot_in_memory_is_never_missing(folder, train):
    for _ in range(2):
        trainer = train("tensorboard", "--total", 100_000, "--settings", EAGER)
        begun = trainer.ready()
        # Killed while it logs, amid snapshots.
        wait_until(lambda begun=begun: newest_mark(folder) > 2 * (begun + 200))
        kill(trainer, folder)
    last = train("tensorboard", "--settings", EAGER, "--total", 0)
    resumed = last.ready()
    assert last.wait() == 0
    found = steps_of(logged_by("tensorboard", folder)["at"])
    assert resumed > 400
    assert found == list(range(resumed))


def newest_mark(folder: Path) -> int:
    state = folder / "loggers" / "tensorboard.json"
    if not state.exists():
        return -1
    return max((mark for mark, _ in json.loads(state.read_text())["last"].values()), default=-1)


@needs("tensorboard")
def test_a_validation_stays_when_the_run_resumes_behind_it(folder, train):
    held = ("tensorboard", "--epochs", 4, "--settings", EAGER)
    first = train(*held, "--hold-at", 100, "--sleep", 0.002)
    first.wait_for("holding")
    kill(first, folder)
    second = train(*held)
    assert second.ready() == 100
    assert second.wait() == 0
    found = logged_by("tensorboard", folder)
    assert steps_of(found["at"]) == list(range(200))
    assert steps_of(found["validated"]) == [50, 100, 150, 200]
    assert steps_of(found["epoch"]) == [0, 50, 100, 150]


@needs("tensorboard", "wandb", "mlflow")
def test_no_logger_has_a_step_twice_and_the_bits_are_the_same(folder, train, light_reference):
    kinds = ("tensorboard", "wandb", "mlflow")
    first = train(*kinds, "--hold-at", 250, "--settings", SELDOM)
    first.wait_for("holding", 120)
    kill(first, folder)
    # Begun while the loggers of the first life still finish.
    second = train(*kinds, "--settings", SELDOM)
    assert second.ready() < 250
    assert second.state_hash() == light_reference(400)
    wait_for_loggers_gone(folder)
    for kind in kinds:
        found = logged_by(kind, folder)
        assert sorted(steps_of(found["at"])) == list(range(400)), kind
        assert all(row[0] == row[1] for row in found["at"]), kind
    states = [json.loads((folder / "loggers" / f"{kind}.json").read_text()) for kind in kinds]
    assert all(state["whole"] for state in states)
    runs = list(Path(f"{folder}-mlflow").glob("*/*/meta.yaml"))
    assert len(runs) == 1
    assert "status: 3" in runs[0].read_text()  # finished, whatever the first life's end was
    assert len(list((folder / "loggers" / "wandb").glob("offline-run-*"))) == 2


@needs("wandb")
def test_without_a_key_wandb_keeps_files_and_the_training_goes_on(folder, train, light_reference):
    trainer = train("wandb-online", "--hold-at", 100)
    trainer.wait_for("holding", 120)
    said = trainer.wait_for("W&B: cannot be reached")
    assert "wandb sync" in said
    Path(f"{folder}.gate").touch()
    assert trainer.state_hash() == light_reference(400)
    assert trainer.output.count("W&B:") == 1
    assert steps_of(logged_by("wandb", folder)["at"]) == list(range(400))


@needs("tensorboard")
def test_ctrl_c_at_a_terminal_loses_no_value(folder, train):
    trainer = train("tensorboard", "--hold-at", 100, start_new_session=True)
    trainer.wait_for("holding")
    os.killpg(trainer.pid, signal.SIGINT)
    Path(f"{folder}.gate").touch()
    assert trainer.wait() == 130
    assert not loggers_of(folder)
    assert steps_of(logged_by("tensorboard", folder)["at"]) == list(range(101))


@needs("tensorboard")
def test_a_worker_that_holds_the_pipe_does_not_keep_a_logger_alive(folder, train):
    trainer = train("tensorboard", "--fork", "--hold-at", 100, real=True)
    trainer.wait_for("holding")
    [worker] = [
        each for each in psutil.Process(trainer.pid).children() if str(TRAINING) in words_of(each)
    ]
    try:
        trainer.kill()
        trainer.process.wait()
        wait_for_loggers_gone(folder)
        assert worker.is_running()
    finally:
        worker.kill()
    assert steps_of(logged_by("tensorboard", folder)["at"]) == list(range(101))


@needs("tensorboard")
def test_a_logger_that_is_killed_costs_its_curve_and_nothing_else(folder, train, light_reference):
    trainer = train("tensorboard", "--hold-at", 100)
    trainer.wait_for("holding")
    [logger] = loggers_of(folder)
    logger.kill()
    trainer.wait_for("its process has ended (killed by SIGKILL)")
    Path(f"{folder}.gate").touch()
    assert trainer.state_hash() == light_reference(400)
    assert steps_of(logged_by("tensorboard", folder)["at"]) == list(range(101))


@needs("tensorboard")
def test_a_logger_that_stands_still_holds_nothing_up(folder, train):
    trainer = train("tensorboard", "--hold-at", 10, "--few-rows", "--total", 3000)
    trainer.wait_for("holding")
    [logger] = loggers_of(folder)
    logger.suspend()
    try:
        Path(f"{folder}.gate").touch()
        trainer.wait_for("more slowly than they come: some are lost")
        trainer.state_hash()
        assert f"process {logger.pid} finishes it by itself" in trainer.output
        assert "rows of metrics are lost" in trainer.output
    finally:
        logger.resume()
    wait_for_loggers_gone(folder)
    found = steps_of(logged_by("tensorboard", folder)["at"])
    assert found == sorted(set(found))
    assert found[:11] == list(range(11))


@pytest.fixture
def disk(tmp_path):
    yield from mount_small_disk(tmp_path / "disk", "3m")


@needs("tensorboard")
def test_a_logger_outlives_a_full_disk(start, disk):
    folder = disk.place / "run"
    state = folder / "loggers" / "tensorboard.json"

    def marks():
        return [mark for mark, _ in json.loads(state.read_text())["last"].values()]

    options = ("--total", 10**6, "--sleep", 0.005)
    trainer = start(folder, "tensorboard", *options, script=TRAINING)
    wait_until(lambda: state.exists() and marks(), 60, "the first values")
    disk.fill()
    trainer.wait_for("It is tried again")
    disk.make_room()
    trainer.wait_for("can be written to again")
    trainer.send(signal.SIGTERM)
    trainer.wait()
    wait_for_loggers_gone(folder)
    wait_for_keeper_gone(folder)
    steps = steps_of(logged_by("tensorboard", folder)["at"])
    assert steps == list(range(len(steps)))
    assert "The training goes on without it" not in trainer.output
