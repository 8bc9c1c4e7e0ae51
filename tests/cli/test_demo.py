"""`holdfast demo`: a training dies, comes back, and is the same to the bit."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

from holdfast._tools.cli.demo import show_comparison
from holdfast._tools.cli.show import Screen
from holdfast._tools.demo.story import KILL_AT, STEPS, find_differences
from tests.cli.command import (
    PROGRAM,
    environment,
    holdfast,
    holdfast_process,
    output_of,
    status_of,
)
from tests.support import SHM, wait_until


def assert_told(shown: str) -> None:
    assert "\x1b" not in shown
    assert "undisturbed: 400 steps" in shown
    assert f"kill -9 in the middle of step {KILL_AT + 1}" in shown
    (begin,) = re.findall(r"goes on at step (\d+); lost (\d+) step", shown)
    assert int(begin[0]) + int(begin[1]) == KILL_AT
    hashes = re.findall(r"^ +(?:undisturbed|killed) +([0-9a-f]{32})$", shown, re.MULTILINE)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "Equal to the last bit" in shown


@pytest.fixture
def stage(tmp_path):
    """Where temporary folders are made, to see that nothing is left."""
    return environment(TMPDIR=str(tmp_path))


@pytest.mark.nightly  # the story of NumPy is the same
def test_the_torch_story_ends_equal_and_leaves_nothing(stage, tmp_path):
    pytest.importorskip("torch", reason="pip install torch")
    shown = output_of(holdfast_process("demo", "--framework", "torch", env=stage))
    assert "PyTorch" in shown
    assert_told(shown)
    assert list(tmp_path.glob("holdfast*")) == []  # torch makes a cache of its own there


# Over 5 s: the whole demo, four trainings.
@pytest.mark.nightly
def test_a_sabotaged_resume_is_seen_and_leaves_nothing(stage, tmp_path):
    done = holdfast_process("demo", "--framework", "numpy", "--sabotage", env=stage)
    assert done.returncode == 1
    assert "NOT equal" in done.stdout
    assert "weights.w0" in done.stdout
    assert "Equal to the last bit" not in done.stdout
    assert list(tmp_path.iterdir()) == []


# Over 5 s: the whole demo, four trainings.
def test_the_numpy_story_ends_equal_and_its_runs_can_be_kept_and_looked_at(tmp_path):
    keep = tmp_path / "kept"
    shown = output_of(holdfast_process("demo", "--framework", "numpy", "--keep", keep))
    assert_told(shown)
    assert f"The two runs are in {keep}" in shown
    found = status_of(keep / "killed")
    assert (found["state"], found["step"], found["attempt"]) == ("finished", STEPS, 2)
    again = holdfast("demo", "--keep", keep)
    assert again.returncode == 2
    assert again.stderr.startswith(f"{keep}: exists already")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(number, tmp_path):
    demo = subprocess.Popen(
        [PROGRAM, "demo", "--framework", "numpy"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        wait_until(lambda: list(tmp_path.glob("*/undisturbed/attempts/0001/heartbeat.json")))
        (run,) = tmp_path.glob("*/undisturbed/run.json")
        run_id = run.read_text().split('"')[3]
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=30)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 128 + number
    assert errors.strip() == ""
    assert list(tmp_path.iterdir()) == []
    assert list(SHM.glob(f"holdfast-*-{run_id}-*")) == []


def test_a_difference_in_one_part_is_status_1_and_named(capsys):
    whole = {"model.w": "aa", "order": "bb"}
    assert show_comparison(Screen(), whole, dict(whole)) == 0
    assert show_comparison(Screen(), whole, {**whole, "model.w": "ab"}) == 1
    assert "1 of 2 parts differ: model.w." in " ".join(capsys.readouterr().out.split())


def test_what_is_missing_on_one_side_differs():
    assert find_differences({"a": "1"}, {}) == ["a"]
    assert find_differences({}, {"a": "1"}) == ["a"]
