"""A terminal that is closed, or a reader of the output that is gone, fails no step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.leading import LEAD
from tests.support import (
    SCRIPTS,
    checkpoint_steps,
    environment,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)
from tests.terminal import ForegroundJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for its keepers")

SCRIPT = """\
import sys
from pathlib import Path

from light import make_weights, show_hash, train_one, wait_for
from tqdm import tqdm

import holdfast

folder = Path(sys.argv[1])
weights = make_weights()
with holdfast.Run(folder, weights=weights) as run:
    for step in tqdm(run.steps(40), mininterval=0):
        train_one(weights)
        if step == 8 and run.attempt == 1:
            Path(f"{folder}.holding").touch()
            wait_for(Path(f"{folder}.gate"))
        print("step", step, flush="flush" in sys.argv)
        print("loss", step, file=sys.stderr)
show_hash(weights)
"""


@pytest.fixture
def command(tmp_path: Path, folder: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path), str(folder)]


def in_terminal(*command: str) -> ForegroundJob:
    return ForegroundJob(list(command), env=environment(PYTHONPATH=str(SCRIPTS)))


def wait_for_hold(folder: Path) -> None:
    wait_until(lambda: Path(f"{folder}.holding").exists(), what="the held step")


def check_that_step_9_is_durable(
    folder: Path, command: list[str], status: int, reference: str
) -> None:
    assert checkpoint_steps(folder) == [9]
    record = json.loads((folder / "attempts/0001/exit.json").read_text())
    assert (record["status"], record["durable_step"]) == (status, 9)
    wait_for_keeper_gone(folder)
    again = subprocess.run(
        command, env=environment(PYTHONPATH=str(SCRIPTS)), capture_output=True, text=True
    )
    assert f"hash {reference}\n" in again.stdout, again.stderr


@pytest.mark.parametrize("lead", [(), LEAD], ids=["alone", "led"])
def test_a_closed_terminal_ends_the_step_and_the_run_leaves_with_129(
    folder, gate, command, light_reference, lead
):
    job = in_terminal(*lead, *command, "flush")
    try:
        wait_for_hold(folder)
        job.hang_up()
        wait_until(lambda: journal_events(folder, "signal"), what="SIGHUP")
        gate.touch()
        assert job.wait() == 129
    finally:
        job.end()
    check_that_step_9_is_durable(folder, command, 129, light_reference(40))


def test_a_training_that_is_not_told_of_its_closed_terminal_goes_on(folder, gate, command):
    """So it is in the time before a shell passes the signal on, and for a disowned job."""
    shell = 'trap : HUP; "$@" & wait $!; wait $!'  # the kernel tells only the shell
    job = in_terminal("bash", "-c", shell, "bash", *command, "flush")
    try:
        wait_for_hold(folder)
        job.hang_up()
        gate.touch()
        assert job.wait() == 0
    finally:
        job.end()
    assert checkpoint_steps(folder) == [40]


@pytest.mark.parametrize(
    ("number", "status", "flush"),
    [(signal.SIGINT, 130, "flush"), (signal.SIGHUP, 129, "buffered until the end")],
    ids=["SIGINT", "SIGHUP"],
)
def test_a_stop_that_ends_the_reader_of_the_output_too_fails_no_step(
    folder, gate, command, light_reference, number, status, flush
):
    """As Ctrl-C ends `tee` in `python train.py | tee log`."""
    with subprocess.Popen(
        [*command, flush],
        env=environment(PYTHONPATH=str(SCRIPTS)),
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as trainer:
        assert trainer.stdout is not None
        wait_for_hold(folder)
        trainer.stdout.close()
        trainer.send_signal(number)
        wait_until(lambda: journal_events(folder, "signal"), what="the signal")
        gate.touch()
        assert trainer.wait(60) == status
    check_that_step_9_is_durable(folder, command, status, light_reference(40))


def test_a_reader_that_leaves_by_itself_still_ends_the_command(folder, gate, command):
    with subprocess.Popen(
        [*command, "flush"],
        env=environment(PYTHONPATH=str(SCRIPTS)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stderr is not None
        wait_for_hold(folder)
        trainer.stdout.close()
        gate.touch()
        assert "BrokenPipeError" in trainer.stderr.read()
        assert trainer.wait(60) != 0
