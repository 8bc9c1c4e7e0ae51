"""`holdfast doctor`: the machine as it is, and as a test has made it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest

import holdfast as library
from holdfast._tools.doctor import check
from tests.cli.command import PROGRAM, environment, holdfast
from tests.cli.screen import Picture
from tests.crash.small_disk import mount_small_disk
from tests.hangs.dead_disk import dead_disk, why_not
from tests.ordinary_user import as_user, home_of_user, why_no_user
from tests.support import wait_until, words_of

KEYS = [
    *("state", "folder", "run_id", "state_bytes", "command", "quick", "counts", "checks"),
]
ALWAYS = {
    *("run folder", "shared memory", "memory", "disk room", "open files", "processes"),
    *("locked memory", "cores", "environment"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a checkpoint of 8 MB."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    with library.Run(folder, weights=np.zeros(1_000_000)) as training:
        for _ in training.steps(2):
            pass
    return folder


@pytest.fixture
def disk(tmp_path):
    yield from mount_small_disk(tmp_path / "disk", "64m")


def examine(*arguments, **options):
    """What is found, by the name of the check."""
    return {each["name"]: each for each in examine_whole(*arguments, **options)["checks"]}


def examine_whole(*arguments, status=0, prefix=(), **extra):
    """What --json says; by a process of its own where signals are sent or a prefix changes it."""
    words = ["doctor", "--json", *map(str, arguments)]
    if "--quick" in words and not prefix:
        done = holdfast(*words, env=environment(**extra))
    else:
        done = subprocess.run(
            [*prefix, PROGRAM, *words],
            stdin=subprocess.DEVNULL,  # beside a terminal more is tried
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(**extra),
        )
    assert "Traceback" not in done.stderr
    assert done.returncode == status, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def left_in(folder):
    return [path.name for path in folder.rglob("*") if "doctor" in path.name]


def test_a_run_is_held_against_the_machine_within_seconds(run):
    began = time.monotonic()
    found = examine_whole(run)
    assert time.monotonic() - began < 10  # alone it takes one
    assert list(found) == KEYS
    checks = {each["name"]: each for each in found["checks"]}
    assert checks.keys() >= ALWAYS | {"write speed", "stacks"}
    for each in found["checks"]:
        assert list(each) == ["name", "state", "found", "remedy", "data"]
        assert bool(each["remedy"]) == (each["state"] != "ok")
    assert found["run_id"]
    assert 8_000_000 < found["state_bytes"] < 8_100_000
    assert checks["shared memory"]["data"]["state"] == found["state_bytes"]
    speed = checks["write speed"]["data"]
    assert speed["bytes"] >= 32 << 20
    assert speed["bytes_per_second"] > 1_000_000
    assert speed["grace_seconds"] == 10
    assert left_in(run) == []


def test_a_pipe_gets_plain_lines_the_worst_last(tmp_path):
    done = holdfast("doctor", "--quick", "--size", "900TB", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    states = [line.split()[0] for line in lines[:-1] if line[:1] != " "]
    assert states == sorted(states, key=["ok", "warn", "fail"].index)
    assert lines[-1].startswith("2 things will fail")
    assert any(line.startswith("fail  memory ") for line in lines)
    # What is said of each begins in one column, and below it what to do.
    column = lines[0].index(str(tmp_path))
    assert all(line[column - 1] == " " != line[column] for line in lines[:-1])
    assert lines[-2][column] == "→"
    assert str(tmp_path) in lines[0]
    assert "write speed" not in done.stdout


def test_a_terminal_gets_colours(tmp_path):
    picture = Picture("doctor", "--quick", "--size", "900TB", columns=100)
    assert picture.returncode == 1
    assert b"\x1b[1;31mfail" in picture.raw


def test_a_folder_that_is_not_there_yet_is_looked_at_where_it_will_be(tmp_path):
    found = examine(tmp_path / "runs" / "new")
    assert found["run folder"]["state"] == "ok"
    assert "not there yet" in found["run folder"]["found"]
    assert "write speed" in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["file"], "file: is a file"),
        (["file/below"], "file/below: is a file, or below one"),
        (["--"], "There is no command after the dashes."),
        (["--size", "much", "."], "is not a size"),
        (["--grace", "-1", "."], "-1.0 is not a number of seconds"),
        (["python", "train.py"], "unexpected extra argument"),
    ],
)
def test_wrong_words_are_answered_by_a_sentence(tmp_path, arguments, says):
    (tmp_path / "file").touch()
    done = holdfast("doctor", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_with_quick_the_command_is_not_run(tmp_path):
    done = holdfast("doctor", "--quick", "--", "touch", "ran", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_small_disk_does_not_take_what_the_run_needs(disk):
    found = examine(disk.place, "--size", "80MB", "--grace", "0.0001", status=1)
    assert found["file system"]["data"]["type"] == "tmpfs"
    assert found["file system"]["state"] == "warn"
    assert found["disk room"]["state"] == "fail"
    assert found["write speed"]["state"] == "fail"
    assert "a save does not fit" in found["write speed"]["found"]
    assert found["write speed"]["data"]["bytes"] <= 16 << 20  # never to the brim
    assert list(disk.place.iterdir()) == []
    disk.fill()
    found = examine(disk.place, status=1)
    assert "No space left on device" in found["run folder"]["found"]
    assert "write speed" not in found
    assert left_in(disk.place) == []


def test_a_read_only_disk_is_named(disk):
    disk.make_read_only()
    found = examine(disk.place / "run", "--quick", status=1)
    assert found["run folder"]["state"] == "fail"
    assert "read-only" in found["run folder"]["found"]


def test_a_dead_file_system_delays_no_command(tmp_path, monkeypatch):
    if reason := why_not():
        pytest.skip(reason)
    # As on an idle machine: on a busy one it is called slow (unit/tools/test_doctor_busy.py).
    patient = functools.partial(check.FairDeadline, waits=lambda _: {})
    monkeypatch.setattr(check, "FairDeadline", patient)
    with dead_disk(tmp_path / "dead") as folder:
        (server,) = (
            child
            for child in psutil.Process().children()
            # A zombie has no words: some other test's, which nobody has asked for yet.
            if "dead_disk" in words_of(child)
        )
        server.suspend()
        began = time.monotonic()
        found = examine(folder / "run", "--quick", status=1)
        assert time.monotonic() - began < 10
        assert found["run folder"]["state"] == "fail"
        assert "does not answer" in found["run folder"]["found"]
        assert "memory" in found


def test_an_ordinary_user_is_told_what_is_closed():
    if reason := why_no_user():
        pytest.skip(reason)
    with home_of_user() as home:
        (home / "closed").mkdir(mode=0o700)
        (home / "not-mine").mkdir(mode=0o755)
        own = {"HOME": str(home), "prefix": as_user()}
        assert examine(home / "run", **own)["stacks"]["data"]["ptrace_scope"] in (None, 0, 1, 2, 3)
        found = examine(home / "not-mine", "--quick", status=1, **own)
        assert "cannot be written (Permission denied)" in found["run folder"]["found"]
        found = examine(home / "closed" / "run", "--quick", status=1, **own)
        assert "cannot be entered (Permission denied)" in found["run folder"]["found"]


def test_lowered_limits_are_seen_and_raised_by_their_remedies(run):
    states = {"open files": "fail", "file size": "fail", "cpu time": "warn"}
    lowered = "ulimit -S -n 100; ulimit -S -f 1000; ulimit -S -t 600"
    found = examine(
        run, "--quick", prefix=("bash", "-c", f'{lowered}; exec "$@"', "bash"), status=1
    )
    assert {name: found[name]["state"] for name in states} == states
    remedies = [found[name]["remedy"].partition("   (")[0] for name in states]
    assert all(remedy.startswith("ulimit ") for remedy in remedies)
    raised = "; ".join([lowered, *remedies])
    found = examine(run, "--quick", prefix=("bash", "-c", f'{raised}; exec "$@"', "bash"))
    for name in states:
        assert found.get(name, {"state": "ok"})["state"] == "ok"


def test_variables_and_programs_that_are_missing_are_told(tmp_path):
    found = examine(
        tmp_path,
        HOLDFAST_PY_SPY="off",
        CUDA_LAUNCH_BLOCKING="1",
        OMP_NUM_THREADS="9999",
    )
    assert found["stacks"]["state"] == "warn"
    assert found["environment"]["data"]["variable"] == "CUDA_LAUNCH_BLOCKING"
    assert found["environment"]["remedy"] == "unset CUDA_LAUNCH_BLOCKING"
    assert found["cores"]["state"] == "warn"
    assert "9999 threads" in found["cores"]["found"]


def test_ctrl_c_leaves_nothing(tmp_path):
    started = subprocess.Popen(
        [PROGRAM, "doctor", tmp_path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
    )

    def is_writing():
        for child in psutil.Process(started.pid).children():
            with contextlib.suppress(psutil.Error):  # one that has answered is gone
                if "speed" in child.cmdline():
                    return True
        return False

    try:
        wait_until(is_writing, what="the file that is written")
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    finally:
        out, err = started.communicate(timeout=30)
    assert started.returncode == 130, out + err
    assert (out, err.strip()) == ("", "")
    assert list(tmp_path.iterdir()) == []
