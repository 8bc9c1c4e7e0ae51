"""What a look means, by its record alone; and the texts and files that it is made of."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._environment.processes import tree
from holdfast._environment.processes.activity import (
    CLIENT,
    Activity,
    activity_of,
    debugger_of,
    is_frozen,
    is_same_function,
    is_users,
    loop_of,
    state_between,
)
from holdfast._environment.processes.stacks import _reason, find_pyspy, parse_stacks
from holdfast._environment.processes.threads import STDIN_PIPE, find_call
from holdfast._run.signals import handlers
from tests.processes.looking import innermost
from tests.support import wait_until


def _thread(*names: str, **more: Any) -> dict[str, Any]:
    frames = [
        {"file": file, "line": 1, "name": name}
        for file, _, name in (each.partition(" ") for each in names)
    ]
    return {"is_main": True, "state": "S", "frames": frames, "moved": False, "cpu": 0.0, **more}


def _process(pid: int = 1, *threads: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"pid": pid, "state": "S", "threads": list(threads or [_thread()]), **more}


def _look(*processes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"seconds": 0.5, "processes": list(processes or [_process()]), **more}


@pytest.mark.parametrize(
    ("look", "activity"),
    [
        (_look(), Activity.IDLE),
        ({}, Activity.IDLE),
        (_look(paused="pdb"), Activity.PAUSED),
        (_look(_process(state="T")), Activity.STOPPED),
        (_look(_process(state="D", frozen=True)), Activity.FROZEN),
        (_look(_process(state="D")), Activity.DISK),
        (_look(_process(tracer=77)), Activity.TRACED),
        (_look(_process(cpu=0.9)), Activity.BUSY),
        (_look(_process(1, _thread(state="R"), cpu=0.05)), Activity.BUSY),  # others have the rest
        (_look(_process(1, _thread(state="R"), cpu=0.001)), Activity.IDLE),
        # It was ready to run for all of the window, and others had the processors.
        (_look(_process(1, _thread(state="R", waits=0.95), cpu=0.001)), Activity.BUSY),
        (_look(_process(1, _thread(waits=0.7), cpu=0.01)), Activity.BUSY),
        (_look(_process(1, _thread(state="S", waits=0.2), cpu=0.001)), Activity.IDLE),
        (_look(_process(), _process(2, _thread(waits=0.9))), Activity.BUSY),
        (_look(_process(1, _thread(), _thread(name="holdfast-pulse", waits=1.0))), Activity.IDLE),
        (_look(_process(1, _thread(moved=True))), Activity.MOVING),
        (_look(_process(io=10_000_000)), Activity.MOVING),
        (_look(_process(state="D", major_faults=500)), Activity.MOVING),
        # What a descendant does counts as the trainer's work; what holds it, if nobody works.
        (_look(_process(), _process(2, cpu=1.0)), Activity.BUSY),
        (_look(_process(), _process(2, _thread(moved=True))), Activity.MOVING),
        (_look(_process(), _process(2, state="T")), Activity.STOPPED),
        (_look(_process(cpu=1.0), _process(2, state="T")), Activity.BUSY),
        (_look(_process(), _process(2, state="D")), Activity.DISK),
        (_look(_process(), _process(2, tracer=77)), Activity.TRACED),
        # A sandbox that traces its own child is at work.
        (_look(_process(), _process(2, tracer=1)), Activity.IDLE),
        (_look(_process(tracer=2), _process(2)), Activity.TRACED),  # a gdb that it has started
        # Nobody reads what it prints: no hang, unless it works on meanwhile.
        (_look(_process(1, _thread(call="write", unread=[1]))), Activity.UNREAD),
        (_look(_process(1, _thread(wakes=10.0, unread=[1, 2]))), Activity.UNREAD),
        (_look(_process(1, _thread(moved=True, unread=[1]))), Activity.MOVING),
        # One that waits for good does not wake up.
        (_look(_process(1, _thread(wakes=10.0, call="futex"))), Activity.POLLS),
        (_look(_process(), _process(2, _thread(wakes=10.0))), Activity.POLLS),
        (_look(_process(state="D"), _process(2, _thread(wakes=10.0))), Activity.DISK),
        # Batches of 50 ms, of which 3 ms are its own.
        (_look(_process(1, _thread(wakes=20.0, cpu=0.06))), Activity.MOVING),
        # A slow download: of its own, or of a program that it waits for.
        (_look(_process(1, _thread(wakes=10.0, call="recvfrom"))), Activity.MOVING),
        (_look(_process(), _process(2, _thread(wakes=10.0, call="read"))), Activity.MOVING),
        (
            _look(_process(1, _thread("/usr/lib/python3.11/socket.py S.readinto", wakes=9.0))),
            Activity.MOVING,
        ),
    ],
)
def test_the_activity_is_the_word_that_tells_most(look, activity):
    assert activity_of(look) is activity


def test_a_thread_beside_the_main_one_must_also_compute_to_count_as_work():
    polls = _thread(is_main=False, moved=True, cpu=0.001)
    assert activity_of(_look(_process(1, _thread(), polls))) is Activity.IDLE
    works = _thread(is_main=False, moved=True, cpu=0.1)
    assert activity_of(_look(_process(1, _thread(), works))) is Activity.MOVING
    ours = _thread(is_main=False, moved=True, cpu=0.1, name="holdfast-pulse")
    assert activity_of(_look(_process(1, _thread(), ours))) is Activity.IDLE


def test_a_main_thread_that_wakes_often_gets_something_unless_it_only_asks_for_the_interpreter():
    main = _thread(wakes=180.0, owns_gil=False)
    assert activity_of(_look(_process(1, main))) is Activity.BUSY
    holds = _thread(is_main=False, owns_gil=True)
    assert activity_of(_look(_process(1, main, holds))) is Activity.IDLE


def test_a_pool_of_threads_that_wakes_up_gets_more_time_and_threads_of_libraries_do_not():
    pool = _thread("/u/train.py fetch", is_main=False, wakes=20.0)
    assert activity_of(_look(_process(1, _thread(), pool))) is Activity.POLLS
    library = _thread(is_main=False, wakes=20.0)
    assert activity_of(_look(_process(1, _thread(), library))) is Activity.IDLE
    ours = _thread("/u/holdfast/x.py go", is_main=False, wakes=20.0, name="holdfast-pulse")
    assert activity_of(_look(_process(1, _thread(), ours))) is Activity.IDLE


_LIB = "/usr/lib/python3.11"


@pytest.mark.parametrize(
    ("frames", "word"),
    [
        ([f"{_LIB}/cmd.py Cmd.cmdloop", f"{_LIB}/pdb.py Pdb.interaction"], "pdb"),
        ([f"{_LIB}/pdb.py interaction"], "pdb"),
        (["/v/site-packages/debugpy/_vendored/pydevd/pydevd.py PyDB._do_wait_suspend"], "debugpy"),
        (["/v/site-packages/debugpy/_vendored/pydevd/pydevd.py _wait_for_attach"], CLIENT),
        (["/opt/pycharm/helpers/pydev/pydevd.py _wait_for_attach"], "a debugger"),
        (["/opt/pycharm/helpers/pydev/pydevd.py PyDB.do_wait_suspend"], "a debugger"),
        (["/v/site-packages/IPython/core/debugger.py Pdb.interaction"], "pdb"),
        ([f"{_LIB}/code.py InteractiveConsole.interact"], "a prompt"),
        # There, and not holding: a step is traced, or a thread of the debugger's own waits.
        (["/u/train.py step", f"{_LIB}/bdb.py Bdb.trace_dispatch"], None),
        (["/v/site-packages/debugpy/_vendored/pydevd/pydevd.py PyDB.run"], None),
        (["/u/code.py interact"], None),
        # Around the user's code, which runs: a prompt has started it.
        (["/u/train.py step", f"{_LIB}/code.py InteractiveConsole.interact"], None),
        (["<ipython-input-3> step", "/v/site-packages/IPython/terminal/x.py A.mainloop"], None),
    ],
)
def test_a_debugger_is_known_by_the_function_it_waits_in(frames, word):
    look = _look(_process(1, _thread(*frames)))
    assert debugger_of(look) == word
    assert (activity_of(look) is Activity.PAUSED) == (word is not None)


@pytest.mark.parametrize(
    ("call", "path", "word"),
    [
        ("read", "/dev/pts/3", "a prompt"),
        ("pselect6", "/dev/tty1", "a prompt"),
        ("read", "pipe:[1]", None),
        ("write", "/dev/pts/3", None),  # a terminal that does not take what is printed
        (None, None, None),
    ],
)
def test_whoever_reads_from_a_terminal_waits_for_a_person(call, path, word):
    assert debugger_of(_look(_process(1, _thread(call=call, call_path=path)))) == word


def test_the_innermost_frame_is_the_users_own():
    frames = _thread(
        "<frozen importlib._bootstrap> load",
        "/usr/lib/python3.11/threading.py Lock.wait",
        "/v/lib/python3.11/site-packages/torch/nn/module.py call",
        "/home/u/src/holdfast/_run/boundary.py pass",
        "/home/u/holdfast/data.py fetch",
        "/home/u/train.py <module>",
    )["frames"]
    found = innermost(frames)
    assert found is not None
    assert found["name"] == "fetch"
    assert innermost(frames[:4]) is None
    assert all(is_users(each) for each in ("<stdin>", "<string>", "/tmp/ipykernel_1/2.py"))


_TEXT = """\
Thread 0x00007f5b7f7fe6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  ...

Thread 0x00007f5b84d946c0 [loader] (most recent call first):
  <no Python frame>

Current thread 0x00007f5b8559f740 (most recent call first):
  File "/u/a "b", line 3 in x.py", line ??? in f
  File "/u/train.py", line 41 in <module>
"""


def test_the_text_of_faulthandler_gives_threads_and_lines():
    other, named, main = parse_stacks(_TEXT, 99)
    assert (other.tid, named.name, named.frames) == (None, "loader", [])
    assert (main.tid, main.name, main.ident) == (99, "MainThread", 0x7F5B8559F740)
    assert main.frames == [
        {"file": '/u/a "b", line 3 in x.py', "line": 0, "name": "f"},
        {"file": "/u/train.py", "line": 41, "name": "<module>"},
    ]
    # Of more than a hundred threads it leaves out the last, which would be the main one.
    assert all(each.tid is None for each in parse_stacks(f"{_TEXT}...\n", 99))


@given(st.text())
def test_any_text_can_be_read(text):
    assert parse_stacks(text, 1) is not None


def test_waiting_for_a_disk_counts_when_it_lasts():
    assert [state_between(*each) for each in ("DD", "DS", "SD", "RD", "RZ", "ST")] == [*"DSSRZT"]


def _cgroup(root: Path, line: str, mount: str, state: tuple[str, str]) -> str:
    (root / "proc/7").mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/7/cgroup").write_text(line)
    (root / "proc/self/mountinfo").write_text(mount)
    name, content = state
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    (root / "sys/fs/cgroup/job" / name).write_text(content)
    return str(root)


@pytest.mark.parametrize(
    ("line", "kind", "name", "content", "frozen"),
    [
        ("0::/job", "cgroup2 cgroup2 rw", "cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/job", "cgroup2 cgroup2 rw", "cgroup.events", "populated 1\nfrozen 0\n", False),
        ("3:freezer:/job\n0::/", "cgroup c rw,freezer", "freezer.state", "FROZEN\n", True),
        ("3:freezer:/job\n0::/", "cgroup c rw,freezer", "freezer.state", "FREEZING\n", True),
        ("3:freezer:/job\n0::/", "cgroup c rw,freezer", "freezer.state", "THAWED\n", False),
        ("3:freezer:/job", "cgroup c rw,memory", "freezer.state", "FROZEN\n", False),
    ],
)
def test_a_frozen_cgroup_is_known_in_both_versions(tmp_path, line, kind, name, content, frozen):
    mount = f"31 23 0:26 / /sys/fs/cgroup rw - {kind}\n"
    root = _cgroup(tmp_path, line, mount, (name, content))
    assert is_frozen(7, root) is frozen


def test_pyspy_can_be_chosen_and_switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_PY_SPY", "off")
    assert find_pyspy() is None
    own = tmp_path / "py-spy"
    own.write_text("")
    own.chmod(0o755)
    monkeypatch.setenv("HOLDFAST_PY_SPY", str(own))
    assert find_pyspy() == str(own)


def test_what_pyspy_complains_of_is_one_line():
    text = "Error: Failed to find python version\n\nCaused by:\n    0: no libpython\n\nStack x:\n"
    assert _reason(text, 5) == "py-spy cannot read process 5: no libpython"
    traced = (
        "Error: Failed to find python version from target process\n\nStack backtrace:\n 0: x::y\n"
    )
    assert _reason(traced, 5) == "process 5 runs no Python that py-spy knows"
    assert _reason("", 5) == "py-spy cannot read process 5: no reason given"
    gone = "Error: Failed to open process 5\n\nCaused by:\n    No such process (os error 3)\n"
    assert _reason(gone, 5) == "process 5 has ended"


def test_where_only_a_parent_may_read_the_keeper_is_let_and_in_forked_workers_too(
    monkeypatch, tmp_path
):
    allowed: list[int] = []
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(handlers, "_SCOPE", scope)
    monkeypatch.setattr(handlers, "_allow", allowed.append)
    for word, expected in (("0\n", []), ("1\n", [42, 43, 43, 0]), ("3\n", [])):
        scope.write_text(word)
        stacks = handlers.StackDump()
        stacks.admit(42)
        stacks.admit(43)  # a new keeper
        handlers._after_fork()
        stacks.remove()
        stacks.remove()
        assert allowed == expected
        allowed.clear()


@pytest.mark.skipif(not tree.is_known(), reason="needs a /proc")
def test_a_read_of_the_standard_input_is_told_from_other_pipes():
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: find_call(process.pid, process.pid)[0] == "read", what="its read")
        assert find_call(process.pid, process.pid) == ("read", STDIN_PIPE)
    finally:
        process.kill()
        process.communicate()


def _loop(*more: dict[str, Any], lines: object = (9, 10), **process: Any) -> dict[str, Any]:
    main = _thread("/home/a/train.py project", moved=True, lines=lines and list(lines))
    return _look(_process(1, main, **{"cpu": 0.9, **process}), *more)


def test_the_lines_of_a_loop_that_nothing_else_accompanies():
    assert loop_of(_loop()) == [9, 10]
    assert activity_of(_loop()) is Activity.MOVING, "how long it may do so is for others to judge"


@pytest.mark.parametrize(
    "look",
    [
        _loop(lines=None),  # it was elsewhere
        _loop(cpu=0.001),  # it hardly computes
        _loop(io=10**7),
        _loop(_process(2, _thread(moved=True), cpu=0.9)),  # a worker gets on
        {**_loop(), "paused": "pdb"},
        _look(),
        {},
    ],
)
def test_what_gets_on_is_no_loop(look):
    assert loop_of(look) == []


@pytest.mark.parametrize(
    ("later", "is_same"),
    [
        ((("project", 10), ("main", 20)), True),
        ((("project", 9), ("main", 20)), True),
        ((("other", 9), ("main", 20)), False),
        ((("project", 9), ("main", 21)), False),
        ((("main", 20),), False),
        ((), False),
    ],
)
def test_a_stack_in_the_same_function_differs_only_in_its_innermost_line(later, is_same):
    def frames(stack: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
        return [{"file": "train.py", "name": name, "line": line} for name, line in stack]

    assert is_same_function(frames((("project", 9), ("main", 20))), frames(later)) is is_same
