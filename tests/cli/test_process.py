"""The program as a process: what only a start of it shows.

All other tests of this folder call `main` in their own process, unless a command dies, leads other
processes, or waits for a signal.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import holdfast as package
from tests.cli.command import (
    PROGRAM,
    environment,
    holdfast,
    holdfast_process,
    output_of,
    succeed,
)
from tests.cli.test_lint import BAD, CORRECTED, STEP
from tests.rank_folders import capture_of, make_run


@pytest.fixture
def run(tmp_path):
    """A run folder with one checkpoint, and nothing that trains."""
    return make_run(tmp_path / "run", [capture_of({"own": 1})])


def test_the_program_and_the_module_say_the_version():
    expected = f"holdfast {package.__version__}\n"
    assert output_of(holdfast_process("--version")) == expected
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "--version"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert (done.stdout, done.stderr) == (expected, "")


def test_the_help_is_the_same_as_in_this_process():
    assert output_of(holdfast_process("--help")) == succeed("--help")


def test_a_wrong_command_is_told_on_stderr_without_a_traceback():
    done, same = holdfast_process("nonsense"), holdfast("nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == same.stderr
    assert done.stderr.startswith("Usage: holdfast")
    assert "Traceback" not in done.stderr


def test_a_shell_sees_the_statuses(run):
    data = next(run.glob("checkpoints/*/*.safetensors"))
    script = f'"$0" verify {run}; echo $?; truncate -s 3 {data}; "$0" verify {run}; echo $?'
    done = subprocess.run(
        ["sh", "-c", f'{script}; "$0" verify {run}/none; echo $?', PROGRAM],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    whole, first, damaged, second, third = done.stdout.splitlines()
    assert ": whole" in whole
    assert "DAMAGED" in damaged
    assert (first, second, third) == ("0", "1", "2")
    assert done.stderr == holdfast("verify", run / "none").stderr


def test_a_reader_that_has_gone_ends_it_in_silence(run):
    ours, theirs = os.pipe()
    os.close(ours)
    done = holdfast_process("status", run, stdout=theirs)
    os.close(theirs)
    # The interpreter flushes once more at its end, and would complain there.
    assert (done.returncode, done.stderr) == (141, "")


def test_it_runs_with_its_output_closed(run):
    done = subprocess.run(
        ["sh", "-c", '"$0" ls "$1" >&-', PROGRAM, run],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_standard_input_is_read_from_a_pipe(tmp_path):
    done = holdfast_process("lint", "-", "--fix", input=BAD, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, CORRECTED)
    assert f"+ {STEP}" in done.stderr


def test_a_pipe_gets_whole_lines_unless_columns_are_given(run):
    wide, narrow = (output_of(holdfast_process("status", run, env=environment(**extra)))
                    for extra in ({}, {"COLUMNS": "30"}))  # fmt: skip
    assert max(map(len, wide.splitlines())) > 30 >= max(map(len, narrow.splitlines()))
    assert "\x1b" not in wide + narrow
