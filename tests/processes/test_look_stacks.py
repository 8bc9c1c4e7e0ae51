"""Whose stacks can be seen: without py-spy those that tell them, and those of the own user."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from holdfast._environment.processes import inspect as looks
from holdfast._environment.processes.activity import Activity, activity_of, loop_of
from tests.ordinary_user import as_user, home_of_user, why_no_user
from tests.processes.looking import LOCKED, line_of, main_thread
from tests.support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def test_the_signal_and_its_file_are_there_while_the_run_is_open_and_no_longer(folder, script):
    trainer = script(
        folder,
        """
        from holdfast._environment.processes.threads import catches
        number = signal.SIGRTMIN + 7
        signal.signal(number + 1, lambda *_: None)  # somebody else's
        def tell(word):
            files = [os.readlink(f"/proc/self/fd/{n}") for n in range(3, 64)
                     if os.path.lexists(f"/proc/self/fd/{n}")]
            caught = [n - number for n in range(number, number + 4) if catches(os.getpid(), n)]
            print(word, sum("holdfast-stacks" in each for each in files), caught, flush=True)
        tell("before")
        weights = make_weights(10)
        with holdfast.Run(folder, state={"w": weights}) as run:
            tell("open")
            with holdfast.Run(str(folder) + "-other", state={"w": weights}):
                tell("both")
        tell("after")
        """,
    )
    assert trainer.wait() == 0, trainer.output
    told = [line.strip() for line in trainer.lines if line.split()[0] in _TOLD]
    assert told == ["before 0 [1]", "open 1 [0, 1]", "both 2 [0, 1, 2]", "after 0 [1]"]


_TOLD = ("before", "open", "both", "after")

# As a keeper does it: a process that the watched one has started, and that shares its file.
_LOOKS = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
from holdfast._environment.processes.inspect import Looker
record = Looker(os.getppid(), fault_file=int(sys.argv[1])).look()
print(json.dumps(record), flush=True)
time.sleep(60)
"""
_WATCHED = """
    source = {source!r}
    sys.path.insert(0, source)
    from holdfast._run.signals.handlers import StackDump
    dump = StackDump()
    words = [sys.executable, "-P", "-c", {looks!r}, str(dump.descriptor), source]
    looker = subprocess.Popen(words, pass_fds=[dump.descriptor])
"""


def test_without_a_reader_they_tell_their_stacks_themselves(child, monkeypatch):
    monkeypatch.setenv("HOLDFAST_PY_SPY", "off")
    source = str(Path(looks.__file__).parents[2])
    watched = textwrap.dedent(_WATCHED.format(source=source, looks=_LOOKS))
    body = f"import subprocess, sys\n{watched}" + textwrap.dedent(
        """
        import multiprocessing as mp, threading
        def fetch():
            lock.acquire()
        lock = mp.get_context("fork").Lock()
        lock.acquire()
        worker = mp.get_context("fork").Process(target=fetch)
        worker.start()
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("ready")
        worker.join()
        """
    )
    process = child(body)
    assert process.stdout is not None
    record = json.loads(process.stdout.readline())
    assert record["by"] == "faulthandler"
    assert record["stacks_error"] == "py-spy is switched off by HOLDFAST_PY_SPY"
    lines = body.splitlines()
    assert lines[line_of(main_thread(record)) - 1] == "worker.join()"
    workers = [each for each in record["processes"] if "fetch" in str(each["threads"])]
    assert lines[line_of(main_thread(record, workers[0]["pid"])) - 1] == "    lock.acquire()"
    assert [main_thread(record)["moved"], main_thread(record, workers[0]["pid"])["moved"]] == [
        False,
        False,
    ]
    others = [each for each in record["processes"][0]["threads"] if each["tid"] is None]
    assert "threading.py" in str(others)
    stranger = [each for each in record["processes"] if "time.sleep(60)" in str(each["command"])]
    assert stranger
    assert all(Path(f"/proc/{each['pid']}").exists() for each in record["processes"])
    assert activity_of(record) is Activity.IDLE


def _seen_by_user(pid: int) -> dict[str, Any]:
    source = str(Path(looks.__file__).parents[2])
    program = (
        f"import json, sys; sys.path.insert(0, {source!r})\n"
        "from holdfast._environment.processes.inspect import Looker\n"
        f"print(json.dumps(Looker({pid}).look()))"
    )
    with home_of_user() as home:
        command = [*as_user(), sys.executable, "-c", program]
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=home)
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.skipif(why_no_user() is not None, reason=why_no_user() or "")
def test_an_ordinary_user_sees_his_own_and_of_others_why_not(child, tmp_path):
    process = child(LOCKED)
    record = _seen_by_user(process.pid)
    assert record["by"] == "none"
    assert "belongs to another user" in record["stacks_error"]
    assert record["processes"][0]["state"] == "S"
    assert activity_of(record) is Activity.IDLE
    body = "import time; print('ready', flush=True); time.sleep(60)"
    with home_of_user() as home:
        command = [*as_user(), sys.executable, "-c", body]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=home) as own:
            try:
                assert own.stdout is not None
                assert own.stdout.readline() == "ready\n"
                record = _seen_by_user(own.pid)
            finally:
                own.kill()
    assert (record["by"], record["stacks_error"]) == ("py-spy", None)
    assert main_thread(record)["frames"][0]["file"] == "<string>"


def test_a_loop_over_two_lines_is_seen_in_its_function(child):
    pid = child(
        """
        def project(x):
            while abs(x - 0.5) > 1e-9:
                x = 1.0 - x
        print("ready")
        project(0.25)
        """
    ).pid
    looker = looks.Looker(pid)

    def lines() -> set[int]:
        return set(loop_of(looker.look()))

    wait_until(lambda: lines() == {3, 4}, 60, "both lines of the loop")
