"""A look from outside tells what a process does, and the line it stands on."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from holdfast._environment.processes import inspect as looks
from holdfast._environment.processes.activity import Activity, activity_of, debugger_of
from holdfast._environment.processes.inspect import Looker
from holdfast._environment.processes.threads import name_of
from tests.cgroups import freezer, why_no_freezer
from tests.processes.looking import LOCKED, below, innermost, line_of, main_thread, wait_for_state
from tests.support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

_HELD_IN_C = """
    import ctypes, threading, time
    threading.Thread(target=lambda: [time.sleep(0.05) for _ in iter(int, 1)], daemon=True).start()
    print("ready")
    ctypes.PyDLL(None).sleep(60)
"""
_LET_GO_IN_C = """
    import ctypes
    print("ready")
    ctypes.CDLL(None).sleep(60)
"""
_SPINS_IN_C = """
    import re
    print("ready")
    re.match(r"(a+)+$", "a" * 60 + "b")
"""


@pytest.mark.parametrize(
    ("body", "line", "owns_gil", "activity"),
    [
        (LOCKED, 6, False, Activity.IDLE),
        (_HELD_IN_C, 5, True, Activity.IDLE),
        (_LET_GO_IN_C, 4, False, Activity.IDLE),
        (_SPINS_IN_C, 4, True, Activity.BUSY),
    ],
    ids=["lock", "C call with the GIL", "C call without it", "computing with the GIL"],
)
def test_what_stands_is_named_with_itsline_of(child, body, line, owns_gil, activity):
    process = child(body)
    states = "R" if activity is Activity.BUSY else "S"
    wait_for_state(process.pid, states)
    record = wait_until(
        lambda: _standing(process.pid, line, activity), 10, f"a look at line {line}, {activity}"
    )
    assert (record["by"], record["stacks_error"]) == ("py-spy", None)
    main = main_thread(record)
    assert (main["owns_gil"], main["moved"], main["state"]) == (owns_gil, False, states)


def _standing(pid: int, line: int, activity: Activity) -> dict[str, Any] | None:
    """A look at it once it stands: the first one may still see the work before that line."""
    record = Looker(pid).look()
    frame = innermost(main_thread(record)["frames"])
    is_there = frame is not None and frame["line"] == line and activity_of(record) is activity
    return record if is_there else None


def test_code_that_goes_on_is_seen_to_move(child):
    process = child("""
        import time
        print("ready")
        def work(depth):
            time.sleep(0.01)
            if depth:
                work(depth - 1)
        while True:
            work(40)
    """)
    wait_until(lambda: activity_of(Looker(process.pid).look()) is Activity.MOVING, 10, "MOVING")


def test_a_stopped_process_is_no_idle_one(child):
    process = child(LOCKED)
    process.send_signal(signal.SIGSTOP)
    wait_for_state(process.pid, "T")
    record = Looker(process.pid).look()
    assert activity_of(record) is Activity.STOPPED
    assert main_thread(record)["frames"]


@pytest.mark.skipif(why_no_freezer() is not None, reason=why_no_freezer() or "")
def test_a_frozen_process_is_no_waiting_one(child):
    process = child(LOCKED)
    with freezer() as group:
        group.freeze(process.pid)
        record = Looker(process.pid).look()
        assert activity_of(record) is Activity.FROZEN
        assert main_thread(record)["frames"]
    wait_until(lambda: activity_of(Looker(process.pid).look()) is Activity.IDLE, 10, "IDLE")


@pytest.mark.layer("interactive")
@pytest.mark.skipif(shutil.which("strace") is None, reason="apt install strace")
def test_a_traced_process_names_who_traces_it(child, tmp_path):
    process = child(LOCKED)
    command = ["strace", "-qq", "-o", str(tmp_path / "trace"), "-p", str(process.pid)]
    with subprocess.Popen(command) as tracer:
        try:
            wait_until(lambda: Looker(process.pid).look(0)["processes"][0]["tracer"], 10, "strace")
            record = Looker(process.pid).look()
            assert activity_of(record) is Activity.TRACED
            assert record["processes"][0]["tracer_name"] == "strace"
        finally:
            tracer.terminate()


def test_whoever_waits_for_a_person_is_paused(child):
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = child('input("name? ")', stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        assert screen.read(5) == b"name?"
        record = wait_until(lambda: _paused(process.pid), 10, "a prompt")
        assert debugger_of(record) == "a prompt"


def _paused(pid: int) -> dict[str, Any] | None:
    record = Looker(pid).look()
    return record if activity_of(record) is Activity.PAUSED else None


def test_a_breakpoint_is_known_by_its_stack(child):
    ours, theirs = os.pipe()  # a keyboard from which nothing comes
    process = child(
        """
        import multiprocessing as mp, os, pdb
        def work():
            keys, screen = os.fdopen(int(os.environ["KEYS"])), open(os.devnull, "w")
            pdb.Pdb(stdin=keys, stdout=screen).set_trace()
            print("on")
        worker = mp.get_context("fork").Process(target=work)
        worker.start()
        print("ready")
        worker.join()
        """,
        env={**os.environ, "KEYS": str(ours)},
        pass_fds=(ours,),
    )
    os.close(ours)
    try:
        record = wait_until(lambda: _paused(process.pid), 10, "the breakpoint of the worker")
        assert debugger_of(record) == "pdb"
    finally:
        os.close(theirs)


_FAMILY = """
    import multiprocessing as mp, os, subprocess, sys, threading
    def fetch(n):
        lock.acquire()
    lock = mp.get_context("fork").Lock()
    lock.acquire()
    workers = [mp.get_context("fork").Process(target=fetch, args=(n,)) for n in range(3)]
    for worker in workers: worker.start()
    other = subprocess.Popen(["sleep", "60"])
    dead = os.fork()
    if dead == 0: os._exit(3)
    print("ready")
    workers[0].join()
"""


def test_workers_are_looked_at_too_and_a_dead_one_is_seen(child):
    process = child(_FAMILY)
    record = wait_until(lambda: _family(process.pid), 10, "all of them standing")
    first, *others = record["processes"]
    assert first["pid"] == process.pid
    assert len(others) == 5
    assert {each["parent"] for each in others} == {process.pid}
    assert [each["state"] for each in others].count("Z") == 1
    workers = [each for each in others if "fetch" in str(each["threads"])]
    assert [line_of(main_thread(record, each["pid"])) for each in workers] == [4, 4, 4]
    assert any(each["command"] == "sleep 60" for each in others)


def _family(pid: int) -> dict[str, Any] | None:
    record = Looker(pid).look()
    told = [each for each in record["processes"] if "fetch" in str(each["threads"])]
    return record if len(told) == 3 and activity_of(record) is Activity.IDLE else None


def test_two_hundred_threads_are_told_in_short_time_and_little_room(child):
    process = child("""
        import threading
        event = threading.Event()
        def deep(n):
            event.wait() if n == 0 else deep(n - 1)
        for n in range(200):
            threading.Thread(target=deep, args=(50,), name=f"pool-{n}", daemon=True).start()
        print("ready")
        event.wait()
    """)
    before = time.monotonic()
    record = Looker(process.pid).look()
    assert time.monotonic() - before < 20
    threads = record["processes"][0]["threads"]
    assert {f"pool-{n}" for n in range(200)} <= {each["name"] for each in threads}
    assert len(json.dumps(record)) < 1 << 20


def test_who_has_ended_is_said_to_have():
    process = subprocess.Popen(["true"])
    wait_for_state(process.pid, "Z")
    record = Looker(process.pid).look()
    assert (record["processes"][0]["state"], record["stacks_error"]) == (
        "Z",
        "the process has ended",
    )
    process.wait()
    record = Looker(process.pid).look()
    assert (record["processes"], record["stacks_error"]) == ([], "the process has ended")


def test_a_reader_that_never_answers_is_not_waited_for(child, tmp_path, monkeypatch):
    process = child(LOCKED)
    reader = tmp_path / "py-spy"
    reader.write_text("#!/bin/sh\nexec sleep 60\n")
    reader.chmod(0o755)
    monkeypatch.setenv("HOLDFAST_PY_SPY", str(reader))
    monkeypatch.setattr(looks, "_DUMP_SECONDS", 0.3)
    record = Looker(process.pid).look()
    assert record["stacks_error"] == "py-spy has not answered within 0.3 s"
    assert record["by"] == "none"
    assert record["seconds"] < 2
    assert not [pid for pid in below(os.getpid()) if name_of(pid) == "sleep"]


def test_a_look_that_stands_itself_tells_what_it_knows(child, monkeypatch):
    process = child(LOCKED)
    gate = threading.Event()
    monkeypatch.setattr(looks, "command_of", lambda pid: gate.wait(60))
    monkeypatch.setattr(looks, "_SILENT_SECONDS", 1.0)
    looker = Looker(process.pid)
    record = looker.look()
    assert line_of(main_thread(record)) == 6
    again = looker.look()
    gate.set()
    assert again["stacks_error"] == "an earlier look still waits for the system"
    assert again["processes"][0]["state"] == "S"
