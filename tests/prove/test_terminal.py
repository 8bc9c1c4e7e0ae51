"""A proof on a real terminal: one line that changes, then the report; Ctrl-C leaves it clean."""

from __future__ import annotations

import sys

import pytest

from holdfast._tools.prove.proof import DIFFERS
from tests.cli.screen import TerminalScreen
from tests.prove.made_up import LOST, PROOFS
from tests.terminal import CTRL_C

# The command with a prover that only tells of itself, until its file is there.
PROGRAM = """
import pathlib, sys, time, types
from tests.prove.made_up import PROOFS, interruptions
def prove(wishes, watcher):
    watcher.stage("interrupted run", 1, 5)
    watcher.interruption(interruptions()[1])
    while not pathlib.Path(sys.argv[-1]).exists():
        watcher.step(43, 100)
        time.sleep(0.02)
    return PROOFS["differs"]
sys.modules["holdfast._tools.prove.prove"] = types.SimpleNamespace(prove=prove)
from holdfast._tools.cli import main
main()
"""


@pytest.fixture
def screen(tmp_path):
    command = [sys.executable, "-c", PROGRAM, "prove", "--", "python3", "train.py"]
    shown = TerminalScreen(*command, tmp_path / "go", columns=100, rows=30)
    yield shown
    shown.end()


def test_one_line_has_the_stage_the_step_and_the_interruption(screen, tmp_path):
    line = screen.wait_for("step 43 of 100")
    assert "interrupted run  step 43 of 100  interruption 2 of 5: KILL" in line
    assert len(screen.lines) == 1
    (tmp_path / "go").touch()
    assert screen.wait() == 1
    lines = screen.lines
    assert lines[0].split("  ")[0].strip() == "no."
    assert not [line for line in lines if "interrupted run" in line]
    assert [line for line in lines if "likely cause" in line and LOST.cause in line]
    # One line for us, which the terminal breaks: so it can be pasted.
    assert f"To replay: {PROOFS[DIFFERS].replay}\r\n".encode() in screen.raw
    assert screen.cursor == (0, True)


def test_ctrl_c_is_one_sentence_on_a_clean_terminal(screen):
    screen.wait_for("step 43 of 100")
    screen.press(CTRL_C)
    assert screen.wait() == 130
    said = [line for line in screen.lines if line and line != "^C"]
    assert [line.removeprefix("^C") for line in said] == [
        "Interrupted: the proof is given up, and nothing of it is left."
    ]
    assert screen.cursor[1]
