"""What somebody else holds is no hang: it is said who does, and nothing is alarmed or ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast._diagnose.verdict import Cause
from tests import cgroups
from tests.cli.command import succeed
from tests.dap import Editor
from tests.hangs.stage import Stage
from tests.hangs.table import SCRIPTS, place_of
from tests.support import environment, wait_until
from tests.terminal import ForegroundJob

_TIMEOUT = ("--timeout", "1")


def _check_no_alarm(stage: Stage, verdict: dict[str, Any], cause: Cause, *says: str) -> None:
    text = "\n".join([verdict["sentence"], *verdict["evidence"], *verdict["advice"]])
    assert verdict["cause"] == cause.value, text
    for each in says:
        assert each in text
    assert not stage.layout.hang(1).exists()


def _check_goes_on(stage: Stage) -> None:
    """Whoever held it has let go: steps are made, and nothing is said of it any more."""
    step = stage.beat["step"]
    wait_until(lambda: stage.beat["step"] > step, 20, "another step")
    wait_until(lambda: stage.beat.get("paused") is None, 20, "a heartbeat without it")
    assert not stage.layout.hang(1).exists()
    # Beside other tests a step may well be slow.
    assert stage.why()["cause"] in (Cause.RUNNING.value, Cause.SLOW.value)


def test_stopped_by_a_signal(stage):
    trainer = stage.start("waits", *_TIMEOUT)
    trainer.wait_for("hanging")
    (stage.home / "gate").touch()
    trainer.send(signal.SIGSTOP)
    wait_until(lambda: stage.beat.get("paused"), 20, "a heartbeat that says so")
    _check_no_alarm(stage, stage.why(), Cause.STOPPED, "SIGSTOP", f"kill -CONT {trainer.pid}")
    shown = succeed("status", stage.folder)
    assert "run: paused, step" in shown
    assert re.search(r"\n  paused +since .* s: held by SIGSTOP", shown)
    trainer.send(signal.SIGCONT)
    _check_goes_on(stage)


# The look is in tests/processes/test_look.py, the verdict in tests/unit/diagnose/test_why_live.py.
@pytest.mark.nightly
def test_frozen_with_its_cgroup(stage):
    reason = cgroups.why_no_freezer()
    if reason is not None:
        pytest.skip(reason)
    trainer = stage.start("waits", *_TIMEOUT)
    trainer.wait_for("hanging")
    (stage.home / "gate").touch()
    with cgroups.freezer() as group:
        group.freeze(trainer.pid)
        wait_until(lambda: stage.beat.get("paused"), 20, "a heartbeat that says so")
        _check_no_alarm(stage, stage.why(), Cause.FROZEN, "cgroup")
    _check_goes_on(stage)


def test_in_pdb_on_a_terminal(stage):
    words = ("pdb", "--run", stage.folder, *_TIMEOUT)
    command = [sys.executable, str(SCRIPTS / "hanging.py"), *map(str, words)]
    job = ForegroundJob(command, env=environment(), cwd=stage.home)
    try:
        wait_until(lambda: b"(Pdb)" in job.raw, 30, "the prompt")
        wait_until(lambda: stage.beat.get("paused"), 20, "a heartbeat that says so")
        _check_no_alarm(stage, stage.why(), Cause.DEBUGGER, "pdb", place_of("hanging.py", "pdb"))
        job.press("continue\n")
        wait_until(lambda: b"went on" in job.raw, 20, "the next line")
        _check_goes_on(stage)
    finally:
        job.end()


# What debugpy does to a run is in tests/processes/test_debuggers.py, the verdict on any debugger
# in test_in_pdb_on_a_terminal.
@pytest.mark.nightly
def test_at_a_breakpoint_of_debugpy(stage):
    pytest.importorskip("debugpy")
    trainer = stage.start("debugpy", *_TIMEOUT)
    port = int(trainer.wait_for("debugpy ").split()[1])
    place = place_of("hanging.py", "debugpy")
    wait_until(lambda: stage.beat.get("paused"), 20, "a heartbeat that says so")
    _check_no_alarm(stage, stage.why(), Cause.DEBUGGER, "debugpy, which waits for a client")
    editor = Editor(port, {SCRIPTS / "hanging.py": [int(place.partition(":")[2])]})
    try:
        thread, _ = editor.wait_until_stopped()
        wait_until(lambda: stage.beat.get("paused"), 20, "a heartbeat that says so")
        _check_no_alarm(stage, stage.why(), Cause.DEBUGGER, "debugpy", place)
        editor.go_on(thread)
        trainer.wait_for("went on")
        editor.leave()
        _check_goes_on(stage)
    finally:
        editor.close()


@contextmanager
def _attached(*command: str) -> Iterator[None]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    tracer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        # As a person leaves it, so that what it has attached to goes on: gdb by the end of its
        # input, strace by a signal.
        assert tracer.stdin is not None
        tracer.stdin.close()
        if command[0] != "gdb":
            tracer.terminate()
        tracer.wait(20)


def _is_traced(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)


@pytest.mark.nightly  # who traces is told below, of strace
def test_held_by_gdb(stage):
    trainer = stage.start("waits", *_TIMEOUT)
    trainer.wait_for("hanging")
    (stage.home / "gate").touch()
    # Without reading symbols of every library it is there at once.
    quick = ("-nx", "-iex", "set auto-solib-add off", "-iex", "set confirm off")
    with _attached("gdb", *quick, "-p", str(trainer.pid)):
        wait_until(lambda: _is_traced(trainer.pid), 30, "gdb")
        wait_until(lambda: stage.beat.get("paused"), 60, "a heartbeat that says so")
        _check_no_alarm(stage, stage.why(), Cause.DEBUGGER, "gdb")
    _check_goes_on(stage)


def test_hung_while_strace_looks_on(stage):
    """Nobody calls that a hang, since who traces knows; it is one when the tracer has gone."""
    trainer = stage.start("call", *_TIMEOUT)
    trainer.wait_for("hanging")
    with _attached("strace", "-f", "-o", "/dev/null", "-p", str(trainer.pid)):
        wait_until(lambda: _is_traced(trainer.pid), 30, "strace")
        wait_until(lambda: stage.beat["boundary_age_seconds"] > 4, 20, "four times the patience")
        _check_no_alarm(stage, stage.why(), Cause.DEBUGGER, "strace")
    assert stage.found()["cause"] == Cause.HANG_CALL.value
    os.kill(trainer.pid, 0)
