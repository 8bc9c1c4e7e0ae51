"""Who is below a process, and how each of them ended: real ones."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast._environment.processes import tree
from holdfast._environment.processes.ended import Descendants, exit_code, how_it_died
from holdfast._environment.processes.memory_sample import Sampler
from holdfast._environment.processes.tree import Tree, children, descendants, rss
from holdfast._supervise.children import catches
from tests.support import wait_until

pytestmark = pytest.mark.skipif(not tree.is_known(), reason="needs a /proc")

# Starts what it is told, says the pid, and asks for nobody's status until its input ends.
_PARENT = """
import os, sys
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        exec(line)
        os._exit(0)
    print(pid, flush=True)
"""
_WAIT = "import signal; signal.pause()"


class Parent:
    """A process that has children."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.pid = self.process.pid
        self.pids: list[int] = []

    def start(self, work: str = _WAIT) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(work + "\n")
        self.process.stdin.flush()
        self.pids.append(int(self.process.stdout.readline()))
        return self.pids[-1]

    def end(self) -> None:
        for pid in self.pids:
            # Nobody has asked for their status, so no number has passed on to another.
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent(RANK="3")
    yield made
    made.end()


@pytest.fixture(params=["lists", "all of /proc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "all of /proc":
        monkeypatch.setattr(tree, "_has_lists", lambda: False)
    elif not tree._has_lists():
        pytest.skip("this kernel has no /proc/PID/task/*/children (CONFIG_PROC_CHILDREN)")


def test_children_and_theirs_are_found(parent: Parent, way: None) -> None:
    first = parent.start()
    second = parent.start(f"import os; os.fork(); {_WAIT}")
    third = wait_until(lambda: children(second))[0]
    try:
        assert sorted(children(parent.pid)) == sorted([first, second])
        assert descendants(parent.pid)[-1] == third
        assert sorted(descendants(parent.pid)) == sorted([first, second, third])
        assert Tree(parent.pid).look() == descendants(parent.pid)
        assert descendants(first) == []
    finally:
        os.kill(third, signal.SIGKILL)


def test_a_later_look_finds_the_new_and_not_the_gone(parent: Parent, way: None) -> None:
    looked = Tree(parent.pid)
    assert looked.look() == []
    pids = [parent.start() for _ in range(3)]
    assert looked.look() == pids
    more = parent.start()
    assert looked.look() == [*pids, more]
    parent.process.kill()
    parent.process.wait()
    wait_until(lambda: looked.look() == [])


def test_who_looks_is_not_among_them() -> None:
    """A keeper is a child of the trainer that it looks at."""
    program = (
        "import os; from holdfast._environment.processes.tree import Tree, descendants\n"
        "p = os.getppid(); "
        "assert os.getpid() in descendants(p); print(os.getpid() in Tree(p).look())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


def test_resident_memory_is_that_of_the_system(parent: Parent) -> None:
    pid = parent.start(f"import mmap; kept = b'x' * 50_000_000; {_WAIT}")
    wait_until(lambda: (rss(pid) or 0) > 50_000_000)
    assert rss(pid) < 80_000_000
    sample = Sampler(parent.pid).take()
    assert sample["worker_count"] == 1
    assert sample["workers"] > 50_000_000
    assert 0 < sample["rss"] < 50_000_000
    assert rss(2**22 + 1) is None


def test_how_each_ended_is_told_in_the_order_of_their_ends(parent: Parent) -> None:
    watched = Descendants(parent.pid)
    killed, stopped, failed = parent.start(), parent.start(), parent.start()
    watched.look()
    assert watched.ended() == []
    for pid, number in ((failed, signal.SIGSEGV), (killed, signal.SIGKILL)):
        os.kill(pid, number)
        wait_until(lambda pid=pid: exit_code(None, pid) is not None)
    os.kill(stopped, signal.SIGTERM)
    ended = wait_until(lambda: watched.ended() if len(watched.ended()) == 3 else [])
    assert [(each["pid"], each["status"]) for each in ended] == [
        *((failed, -11), (killed, -9), (stopped, -15)),
    ]
    assert {each["ppid"] for each in ended} == {parent.pid}
    assert {each["rank"] for each in ended} == {3}
    assert all(each["comm"].startswith("python") for each in ended)
    assert watched.look() == parent.pids  # who has ended is not met again
    assert len(watched.ended()) == 3
    watched.close()


def test_a_status_is_told_even_after_the_parent_has_asked_for_it() -> None:
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input(); raise SystemExit(3)"], stdin=subprocess.PIPE
    )
    watched = Descendants(os.getppid())
    watched.look([child.pid])
    pidfd = os.pidfd_open(child.pid)
    child.communicate(b"\n")
    status = exit_code(pidfd, child.pid)
    if status is None:
        pytest.skip("this kernel does not tell it (Linux 6.15 does)")
    assert status == 3
    assert how_it_died(pidfd, child.pid) == "ended with status 3"
    os.close(pidfd)
    assert [each["status"] for each in watched.ended()] == [3]


def test_a_selector_hears_of_an_end(parent: Parent) -> None:
    watched = Descendants(parent.pid)
    pid = parent.start()
    watched.look()
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    assert poll.poll(0) == []
    os.kill(pid, signal.SIGKILL)
    assert poll.poll(10_000)
    watched.note()
    assert [each["status"] for each in watched.ended()] == [-9]
    assert poll.poll(0) == []


def test_a_name_that_is_taken_later_is_the_one_that_is_told(parent: Parent) -> None:
    watched = Descendants(parent.pid)
    rename = "lambda *_: open('/proc/self/comm', 'w').write('pt_data_worker')"
    pid = parent.start(
        f"import signal; signal.signal(signal.SIGUSR1, {rename}); " + 2 * f"{_WAIT}; "
    )
    watched.look()
    wait_until(lambda: catches(pid, signal.SIGUSR1))
    os.kill(pid, signal.SIGUSR1)
    wait_until(
        lambda: watched.look() and tree.read_bytes(f"/proc/{pid}/comm") == b"pt_data_worker\n"
    )
    watched.look()
    os.kill(pid, signal.SIGKILL)
    assert wait_until(watched.ended)[0]["comm"] == "pt_data_worker"


def test_of_many_the_ones_that_did_not_end_well_are_kept(parent: Parent) -> None:
    watched = Descendants(parent.pid, most=4)
    bad = [_end(watched, parent.start("import os; os.read(0, 1)"), signal.SIGKILL)]
    leave = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(0)); "
    for _ in range(6):
        pid = parent.start(leave + _WAIT)
        wait_until(lambda pid=pid: catches(pid, signal.SIGUSR1))
        _end(watched, pid, signal.SIGUSR1)
    bad.append(_end(watched, parent.start(), signal.SIGTERM))
    ended = watched.ended()
    assert [each["pid"] for each in ended if each["status"] != 0] == bad
    assert [each["status"] for each in ended] == [-9, 0, 0, -15]


def _end(watched: Descendants, pid: int, number: int) -> int:
    watched.look()

    def is_over() -> bool:
        # Again and again: one that comes just before Python waits is heard only after it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return any(each["pid"] == pid for each in watched.ended())

    wait_until(is_over)
    return pid


@pytest.mark.parametrize("has_lists", [True, False])
def test_a_keeper_is_no_part_of_the_training(monkeypatch, has_lists):
    if has_lists and not tree._has_lists():
        pytest.skip("this kernel has no /proc/PID/task/*/children (CONFIG_PROC_CHILDREN)")
    monkeypatch.setattr(tree, "_has_lists", lambda: has_lists)
    program = "import time\nif True:  # as in holdfast._keeper\n    time.sleep(60)"
    keeper = subprocess.Popen([sys.executable, "-c", program])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert {keeper.pid, other.pid} <= set(descendants(os.getpid()))
        wait_until(lambda: tree.is_keeper(keeper.pid))  # within exec it has no command line
        found = Tree(os.getpid()).look()
        assert other.pid in found
        assert keeper.pid not in found
    finally:
        for each in (keeper, other):
            each.kill()
            each.wait()


def test_a_keeper_is_known_though_it_had_no_command_line_at_first(monkeypatch, parent, way):
    pid, lines = parent.start(), [b"", b"", b"", b"", b"", b"python\0-m\0holdfast._keeper\0"]
    read = tree.read_bytes

    def read_late(path):
        return (lines.pop(0) if len(lines) > 1 else lines[0]) if "cmdline" in path else read(path)

    monkeypatch.setattr(tree, "read_bytes", read_late)
    looked = Tree(parent.pid)
    assert looked.look() == [pid]
    wait_until(lambda: looked.look() == [])
