"""At a prompt, as in a notebook, the interpreter outlives the run: Ctrl-C ends the loop only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import LIGHT
from tests.processes.terminal import Terminal
from tests.support import SCRIPTS, checkpoint_steps, keepers, wait_for_keeper_gone
from tests.terminal import CTRL_C

_BETWEEN_PRESSES_SECONDS = 0.25
_IPYTHON = ("-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor")
_INTERPRETERS = [
    pytest.param(("-i", "-q"), id="python"),
    pytest.param(
        _IPYTHON,
        id="ipython",
        marks=[
            pytest.mark.layer("interactive"),
            pytest.mark.skipif(find_spec("IPython") is None, reason="pip install ipykernel"),
        ],
    ),
]


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Open a terminal with an interpreter in it; it is closed at the end of the test."""
    opened: list[Terminal] = []
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS), prepend=":")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("PYTHONSTARTUP", raising=False)

    def begin(*arguments: Any) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield begin
    for one in opened:
        one.end()


def type_in(terminal: Terminal, *lines: str) -> None:
    terminal.press("".join(f"{line}\n" for line in lines))


def train(folder: Path) -> str:
    """A training in one line, so that no prompt of a block comes in between."""
    command = [str(folder), "--gate", f"{folder}.gate", "--total", "40", "--hold-at", "8"]
    return f"import sys, light; sys.argv[1:] = {command}; light.main()"


def interrupt(terminal):
    """Press Ctrl-C in the middle of step 9."""
    terminal.wait_for("holding")
    terminal.press(CTRL_C)
    terminal.wait_for("interrupted: step 9 is being finished and saved.")


def answers(terminal):
    """The prompt is there, and takes a line."""
    type_in(terminal, "print('still', 'there')")
    terminal.wait_for("still there")


@pytest.mark.parametrize("interpreter", _INTERPRETERS)
def test_ctrl_c_ends_the_loop_and_the_prompt_comes_back(folder, gate, prompt, interpreter):
    terminal = prompt(*interpreter)
    type_in(terminal, train(folder))
    interrupt(terminal)
    gate.touch()
    terminal.wait_for("holdfast: interrupted: step 9 is durable. Run it again to go on.")
    answers(terminal)
    for word in ("Traceback", "SystemExit", "use %tb", "replaced"):
        assert word not in terminal.output
    assert checkpoint_steps(folder) == [9]
    wait_for_keeper_gone(folder)
    type_in(terminal, train(folder))
    terminal.wait_for("resumed at step 9")
    terminal.wait_for("hash ")
    assert terminal.process.poll() is None


@pytest.mark.parametrize("interpreter", _INTERPRETERS)
def test_a_second_ctrl_c_does_not_wait_for_the_step_and_the_prompt_comes_back(
    folder, prompt, interpreter
):
    terminal = prompt(*interpreter)
    type_in(terminal, train(folder))
    interrupt(terminal)
    time.sleep(_BETWEEN_PRESSES_SECONDS)
    terminal.press(CTRL_C)
    terminal.wait_for("holdfast: interrupted: step 9 was not finished; ", 20)
    answers(terminal)
    assert "Traceback" not in terminal.output
    wait_for_keeper_gone(folder)


def test_a_script_under_python_i_comes_to_its_prompt(folder, gate, prompt):
    terminal = prompt("-i", LIGHT, folder, "--gate", gate, "--total", 40, "--hold-at", 8)
    interrupt(terminal)
    gate.touch()
    terminal.wait_for("holdfast: interrupted: step 9 is durable. Run it again to go on.")
    answers(terminal)
    assert "Traceback" not in terminal.output
    assert keepers(folder) == []
