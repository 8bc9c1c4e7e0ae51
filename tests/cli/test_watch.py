"""`holdfast status --watch`: the same, again and again, at nearly no cost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import psutil
import pytest

from tests.cli.command import PROGRAM, TRAIN_NUMPY, environment, holdfast
from tests.cli.screen import TerminalScreen
from tests.support import wait_until
from tests.terminal import CTRL_C


@pytest.fixture
def watch():
    """Start `status --watch` in a terminal; ended with the test."""
    started = []

    def begin(*arguments, **options):
        started.append(TerminalScreen(PROGRAM, "status", *arguments, **options))
        return started[-1]

    yield begin
    for screen in started:
        screen.end()


@pytest.fixture
def piped():
    """Start `status --watch` into a pipe; returns the process and the lines so far."""
    started = []

    def begin(*arguments, **options):
        process = subprocess.Popen(
            [PROGRAM, "status", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(PYTHONUNBUFFERED="1"),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            **options,
        )
        lines = []
        reader = threading.Thread(target=_collect, args=(process.stdout, lines), daemon=True)
        reader.start()
        started.append((process, reader))
        return process, lines

    yield begin
    for process, reader in started:
        process.kill()
        process.wait()
        reader.join(10)
        process.stdout.close()


def _collect(stream, lines):
    for line in stream:
        lines.append(line)


def shown_step(screen):
    found = re.search(r"step (\d+) of", "\n".join(screen.lines))
    return int(found[1]) if found else 0


def test_a_terminal_is_drawn_over_in_place_and_left_clean(folder, start, watch):
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    screen = watch("--watch", "0.2", folder.name, cwd=folder.parent)
    screen.wait_for("training, step")
    first = wait_until(lambda: shown_step(screen))
    wait_until(lambda: shown_step(screen) > first)
    assert sum("training, step" in line for line in screen.lines) == 1
    trainer.kill()
    trainer.wait()
    screen.wait_for(": died, step")
    again = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    screen.wait_for("training, step")
    screen.wait_for("(attempt 2)")
    screen.press(CTRL_C)
    assert screen.wait() == 0
    assert screen.lines[0].startswith(f"{folder.name}: training, step")
    assert not any("^C" in line for line in screen.lines)
    assert screen.cursor == (0, True)
    assert b"\x1b[?" not in screen.raw  # neither a hidden cursor nor another screen to undo
    assert again.process.poll() is None


def test_a_small_window_shows_what_fits_and_a_folder_may_follow_the_option(tmp_path, start, watch):
    assert start(tmp_path / "a", "--total", 2, script=TRAIN_NUMPY).wait() == 0
    for name in "bcdef":
        shutil.copytree(tmp_path / "a", tmp_path / name)
    screen = watch("--watch", ".", cwd=tmp_path, rows=6, columns=60)
    screen.wait_for("… and ")
    assert len(screen.lines) == 5
    screen.resize(60, 20)
    screen.wait_for("f  ")
    assert sum("finished" in line for line in screen.lines) == 6, screen.lines
    screen.process.terminate()
    assert screen.wait() == -signal.SIGTERM
    assert screen.cursor == (0, True)


def test_a_pipe_gets_a_block_for_each_change_and_none_without(folder, start, piped):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    process, lines = piped(folder, "--watch", "0.1")
    wait_until(lambda: any("goes on" in line or "next" in line for line in lines))
    count = len(lines)
    blocks = [line for line in lines if line.startswith("-- ")]
    assert len(blocks) == 1
    longer = start(folder, "--total", 4, script=TRAIN_NUMPY)
    assert longer.wait() == 0
    wait_until(lambda: any("finished, step 4 of 4" in line for line in lines[count:]))
    assert "\x1b" not in "".join(lines)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert "Traceback" not in "".join(lines)


def test_json_is_a_line_for_each_change(folder, start, piped):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    _, lines = piped(folder, "--watch", "0.1", "--json")
    wait_until(lambda: lines)
    assert start(folder, "--total", 4, script=TRAIN_NUMPY).wait() == 0
    wait_until(lambda: json.loads(lines[-1])[0]["step"] == 4)
    states = [json.loads(line)[0]["step"] for line in lines]
    assert states[0] == 2
    assert len(lines) == len(set(lines))


def test_a_run_that_is_removed_and_one_that_is_new_are_noticed(tmp_path, start, piped):
    assert start(tmp_path / "one", "--total", 2, script=TRAIN_NUMPY).wait() == 0
    _, lines = piped(".", "--watch", "0.1", cwd=tmp_path)
    wait_until(lambda: any("one: finished" in line for line in lines))
    shutil.rmtree(tmp_path / "one")
    wait_until(lambda: any("no run here any more" in line for line in lines))
    assert start(tmp_path / "two", "--total", 2, script=TRAIN_NUMPY).wait() == 0
    wait_until(lambda: any("two: finished" in line for line in lines), 30)


# Over 5 s: the time in which its share of a core is measured.
@pytest.mark.nightly
def test_it_takes_less_than_two_percent_of_a_core_also_for_many_runs(tmp_path, start, watch):
    source = tmp_path / "00"
    assert start(source, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    for number in range(1, 40):
        shutil.copytree(source, tmp_path / f"{number:02}")
    for name in ("live-1", "live-2"):
        start(tmp_path / name, "--sleep", 0.05, script=TRAIN_NUMPY).ready()
    screen = watch("--watch", rows=60, cwd=tmp_path)
    screen.wait_for("live-2")
    process = psutil.Process(screen.process.pid)
    began, before = time.monotonic(), sum(process.cpu_times()[:2])
    time.sleep(5)  # what is measured is a share of time
    spent = sum(process.cpu_times()[:2]) - before
    assert spent / (time.monotonic() - began) < 0.03  # a tick of the system's clock is 10 ms


def test_wrong_seconds_and_a_folder_without_runs_are_refused(tmp_path):
    for seconds in ("0", "-1", "nan", "inf"):
        done = holdfast("status", tmp_path, f"--watch={seconds}")
        assert done.returncode == 2
        assert "between 0.1 and 86400" in done.stderr
    done = holdfast("status", "--watch", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2


def test_a_reader_that_has_gone_ends_it(folder, start):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [PROGRAM, "status", folder, "--watch"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=20,
        check=False,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")
