"""Ctrl-C and Ctrl-\\ in a real terminal, where every process of the group gets the signal."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes.conftest import EAGER, LIGHT
from tests.processes.terminal import Terminal
from tests.support import (
    TRAIN,
    arena_files,
    checkpoint_steps,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
    words_of,
)
from tests.terminal import CTRL_BACKSLASH, CTRL_C

# Nobody presses twice within a tenth of a second; what comes that soon is one press, doubled.
_BETWEEN_PRESSES_SECONDS = 0.25


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Open a terminal with a script in it; it is closed at the end of the test."""
    opened: list[Terminal] = []

    def begin(script: Path, *arguments: object) -> Terminal:
        opened.append(Terminal(script, *arguments))
        return opened[-1]

    yield begin
    for one in opened:
        one.end()


def test_one_ctrl_c_says_at_once_what_happens_and_ends_with_the_step(
    folder, gate, terminal, light, light_reference
):
    held = terminal(LIGHT, folder, "--gate", gate, "--total", 40, "--hold-at", 8)
    held.wait_for("holding")
    held.press(CTRL_C)
    said = held.wait_for("Ctrl-C: step 9 is being finished and saved, then the run leaves.")
    assert "Ctrl-C again leaves at once and keeps " in said
    assert held.process.poll() is None
    gate.touch()
    assert held.wait() == 130
    assert "Traceback" not in held.output
    assert checkpoint_steps(folder) == [9]
    assert len(journal_events(folder, "signal")) == 1
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    assert light(folder, "--total", 40).state_hash() == light_reference(40)


def test_a_second_ctrl_c_leaves_at_once_with_the_last_snapshot(
    folder, gate, terminal, light, light_reference
):
    held = terminal(
        LIGHT,
        *(folder, "--gate", gate, "--total", 40, "--hold-at", 8),
        *("--sleep", 0.06, "--settings", EAGER),
    )
    in_memory = int(held.wait_for("holding").split()[1])
    held.press(CTRL_C)
    said = held.wait_for("Ctrl-C: step 9")
    assert f"Ctrl-C again leaves at once and keeps step {in_memory}." in said
    time.sleep(_BETWEEN_PRESSES_SECONDS)
    held.press(CTRL_C)
    assert held.wait(20) == 130  # the step is still held: nobody made the gate
    assert f"leaving at once (second Ctrl-C): step {in_memory} is durable" in held.output
    assert "Traceback" not in held.output
    assert checkpoint_steps(folder) == [in_memory]
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    again = light(folder, "--total", 40)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40)


def test_a_second_ctrl_c_leaves_when_there_is_nothing_new_to_save(folder, gate, terminal):
    held = terminal(
        LIGHT,
        *(folder, "--gate", gate, "--total", 40, "--hold-at", 8),
        *("--sleep", 0.06, "--settings", '{"checkpoint_every": 1, "max_overhead": 0}'),
    )
    in_memory = int(held.wait_for("holding").split()[1])
    wait_until(lambda: in_memory in checkpoint_steps(folder))
    held.press(CTRL_C)
    held.wait_for("Ctrl-C: step 9")
    time.sleep(_BETWEEN_PRESSES_SECONDS)
    held.press(CTRL_C)
    assert held.wait(20) == 130
    assert f"step {in_memory} is durable" in held.output


def test_ctrl_backslash_kills_the_job_but_not_the_keeper(folder, gate, terminal):
    held = terminal(
        LIGHT,
        *(folder, "--gate", gate, "--total", 40, "--hold-at", 8),
        *("--sleep", 0.06, "--settings", EAGER),
    )
    in_memory = int(held.wait_for("holding").split()[1])
    held.press(CTRL_BACKSLASH)
    assert held.wait(20) == -signal.SIGQUIT
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [in_memory]
    stacks = (folder / "attempts/0001/stacks.txt").read_text()
    assert "in show_holding" in stacks or "in wait_for" in stacks


def _is_pending(process: psutil.Process, number: int) -> bool:
    """Whether a signal has reached a process that keeps it blocked."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in text.splitlines())
    return bool((int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)) >> (number - 1) & 1)


def _workers(trainer: Terminal, folder: Path) -> list[psutil.Process]:
    """Its data-loader workers: all children but the keeper and Python's own tracker."""
    known = {keeper.pid for keeper in keepers(folder)}
    children = psutil.Process(trainer.pid).children()
    return [
        child
        for child in children
        if child.pid not in known and "resource_tracker" not in words_of(child)
    ]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_outlive_the_ctrl_c_until_the_step_is_done(folder, gate, terminal, start, context):
    workers = ("--workers", 2, "--context", context)
    held = terminal(TRAIN, folder, "--total", 40, "--hold-at", 8, "--gate", gate, *workers)
    held.wait_for("holding")
    alive = _workers(held, folder)
    assert len(alive) == 2
    held.press(CTRL_C)
    held.wait_for("Ctrl-C: step 9")
    for worker in alive:
        wait_until(lambda worker=worker: _is_pending(worker, signal.SIGINT), what="its Ctrl-C")
        assert worker.status() != psutil.STATUS_ZOMBIE
    gate.touch()
    assert held.wait() == 130
    assert "Traceback" not in held.output
    assert checkpoint_steps(folder) == [9]
    wait_until(lambda: not any(worker.is_running() for worker in alive), what="the workers' end")
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    again = start(folder, "--total", 20, *workers)
    assert again.ready() == 9
    assert again.wait() == 0
    assert "trained to step 20" in again.output


# Over 5 s: a worker asks every few seconds whether its trainer lives.
@pytest.mark.nightly
def test_no_worker_is_left_after_a_second_ctrl_c(folder, gate, terminal):
    held = terminal(TRAIN, folder, "--total", 40, "--hold-at", 8, "--gate", gate, "--workers", 2)
    held.wait_for("holding")
    alive = _workers(held, folder)
    assert len(alive) == 2
    held.press(CTRL_C)
    held.wait_for("Ctrl-C: step 9")
    time.sleep(_BETWEEN_PRESSES_SECONDS)
    held.press(CTRL_C)
    assert held.wait(30) == 130
    assert "Traceback" not in held.output
    wait_until(lambda: not any(worker.is_running() for worker in alive), what="the workers' end")
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) != []


@pytest.mark.layer("interactive")
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is missing: apt install tmux")
def test_ctrl_c_under_a_shell_in_tmux(folder, gate, tmp_path, light, light_reference):
    def tmux(*words: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def screen() -> str:
        return tmux("capture-pane", "-p", "-J", "-t", "test")

    words = [sys.executable, LIGHT, folder, "--gate", gate, "--total", 40, "--hold-at", 8]
    command = shlex.join(map(str, words))
    tmux("new-session", "-d", "-s", "test", "-x", "200", "-y", "50", "sh -i")
    try:
        tmux("send-keys", "-t", "test", f"{command}; echo status=$?", "Enter")
        wait_until(lambda: "\nholding" in screen(), 60, "the step")
        tmux("send-keys", "-t", "test", "C-c")
        wait_until(lambda: "Ctrl-C: step 9 is being finished" in screen(), 30, "the message")
        gate.touch()
        wait_until(lambda: "status=130" in screen(), 30, "the exit status")
        assert "Traceback" not in screen()
    finally:
        tmux("kill-server")
    assert checkpoint_steps(folder) == [9]
    assert light(folder, "--total", 40).state_hash() == light_reference(40)
