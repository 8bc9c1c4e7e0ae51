"""Whatever goes wrong is a sentence and a status, never a traceback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

import holdfast as package
from tests.cli.command import (
    PROGRAM,
    TRAIN_NUMPY,
    environment,
    holdfast,
    holdfast_process,
    succeed,
)
from tests.support import wait_until

COMMANDS = ("status", "ls", "verify", "stop", "save")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_no_run_is_status_2(command, tmp_path):
    done = holdfast(command, tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"{tmp_path}: there is no run here")
    assert len(done.stderr.splitlines()) == 2


OTHERS = ["export", "clean", "submit", "run", "lint", "demo", "prove", "completion"]


@pytest.mark.parametrize("arguments", [["ls"], ["nonsense"], ["status", "--bad"], []])
def test_wrong_use_is_status_2(arguments):
    done = holdfast(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: holdfast")


@pytest.mark.parametrize("command", [*COMMANDS, *OTHERS])
def test_each_command_explains_itself_with_an_example(command):
    shown = succeed(command, "--help")
    assert re.search(rf"Example:\n +holdfast {command}", shown)


def test_the_version_is_the_packages():
    assert succeed("--version") == f"holdfast {package.__version__}\n"


def test_importing_holdfast_imports_neither_click_nor_rich():
    program = "import sys, holdfast; holdfast.Run; print({'click', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["ls"], ["verify"]])
def test_a_reader_that_has_gone_is_no_error(arguments, folder, start):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    ours, theirs = os.pipe()
    os.close(ours)
    done = holdfast(arguments[0], folder, *arguments[1:], stdout=theirs)
    os.close(theirs)
    assert done.stderr == ""
    assert done.returncode == 141


def test_ctrl_c_while_waiting_is_silent(folder, start):
    trainer = start(folder, "--sleep", 60, script=TRAIN_NUMPY)
    trainer.ready()
    waiting = subprocess.Popen(
        [PROGRAM, "save", str(folder), "--wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED="1"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert waiting.stdout is not None
        assert "asked for a checkpoint" in waiting.stdout.readline()
        waiting.send_signal(signal.SIGINT)
        _, errors = waiting.communicate(timeout=20)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 130
    assert errors.strip() == ""


def test_a_terminal_that_knows_only_ascii_is_served(tmp_path, start):
    folder = tmp_path / "schön"
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    done = holdfast_process("status", folder, env=environment(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0
    assert "sch?n: finished" in done.stdout


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="needs names of any bytes")
def test_a_name_that_is_no_text_is_shown_all_the_same(tmp_path, start):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9\x1b[31m")
    trainer = start(folder, "--total", 2, script=TRAIN_NUMPY)
    wait_until(lambda: trainer.process.poll() is not None)
    done = holdfast("status", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "caf\\udce9\\x1b[31m" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_a_sentence(folder, start):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    (folder / "checkpoints").chmod(0)
    try:
        done = holdfast("ls", folder)
    finally:
        (folder / "checkpoints").chmod(0o755)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
