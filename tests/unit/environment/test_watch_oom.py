"""A real process leaks in a real cgroup until the kernel kills it: seen coming, and recorded.

And the same counters are read by an ordinary user, who may not read the kernel's log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast._environment.processes.cgroup import MemoryCgroup, read_counters
from holdfast._environment.processes.ended import Descendants, exit_code
from holdfast._environment.processes.memory_growth import Forecast, Growth, MemoryHistory
from holdfast._environment.processes.memory_sample import Sampler
from tests.cgroups import limited_memory, why_not
from tests.ordinary_user import as_user, why_no_user
from tests.support import wait_until

needs_a_cgroup = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
MB = 1 << 20
LIMIT = 200 * MB

# 100 MB a second, in small pieces; before that a part of the cgroup is filled with a file's pages.
_LEAK = f"""
import sys, time
with open(sys.argv[1], "r+b") as file:
    while file.read({MB}):
        pass
print("ready", flush=True)
sys.stdin.readline()
kept, began = [], time.monotonic()
while True:
    kept.append(bytearray(b"x" * {2 * MB}))
    time.sleep(max(0.0, began + 0.02 * len(kept) - time.monotonic()))
"""


@needs_a_cgroup
def test_a_leak_is_seen_coming_and_the_kill_is_recorded(tmp_path: Path) -> None:
    cached = tmp_path / "cached"
    with cached.open("wb") as file:
        file.write(os.urandom(MB) * 80)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with limited_memory(LIMIT) as group:
        command = [*group.prefix, sys.executable, "-I", "-S", "-c", _LEAK, str(cached)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            pidfd = os.pidfd_open(child.pid)
            family = Descendants(os.getpid())
            family.look([child.pid])
            sampler, history, growth = Sampler(child.pid), MemoryHistory(), Growth()
            assert sampler.cgroup is not None
            start = read_counters(sampler.cgroup)
            assert start["cgroup"]["limit"] == LIMIT
            calm = sampler.take()
            assert calm["cgroup"] < 60 * MB  # the file's pages do not count
            child.stdin.write(b"\n")
            child.stdin.flush()
            forecasts: list[tuple[float, Forecast]] = []
            while child.poll() is None:
                sample = sampler.take(full=False)
                if sample["rss"]:  # a process that is being killed has none
                    history.add(sample)
                    growth.add(sample)
                    told = growth.forecast()
                    if told is not None:
                        forecasts.append((time.monotonic(), told))
                time.sleep(0.05)  # between two looks, as the watch has it
            died = time.monotonic()
        finally:
            child.kill()
            child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert exit_code(pidfd, child.pid) in (-signal.SIGKILL, None)
        os.close(pidfd)
        assert [each["pid"] for each in family.ended()] == [child.pid]

        death = read_counters(sampler.cgroup)
        assert death["cgroup"]["oom_kill"] == start["cgroup"]["oom_kill"] + 1
        assert death["cgroup"]["peak"] > 0.95 * LIMIT > start["cgroup"]["peak"]
        if group.version == 2:  # the other one does not count this on every kernel
            assert death["cgroup"]["max"] > start["cgroup"]["max"]
        assert death["vmstat_oom_kill"] > start["vmstat_oom_kill"]

        used = [each["cgroup"] for each in history.recent()]
        assert used[0] < 60 * MB
        assert max(used) > 0.8 * LIMIT
        assert {each["limit"] for each in history.recent()} == {LIMIT}

        first, told = forecasts[0]
        assert told.what == "cgroup"
        assert told.limit == LIMIT
        assert died - first > 0.4  # at 100 MB a second, of which there are not even two


@needs_a_cgroup
def test_a_kill_by_somebody_moves_no_counter() -> None:
    with limited_memory(LIMIT) as group:
        program = "print(flush=True); input()"
        command = [*group.prefix, sys.executable, "-I", "-S", "-c", program]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            child.stdout.readline()  # its start takes memory, which the peak counts
            wait_until(lambda: group.pids() == [child.pid])
            found = MemoryCgroup.find(child.pid)
            assert found is not None
            before = found.counters()
        finally:
            child.kill()
            child.communicate()
        assert found.counters() == before


_READS = """
import json, os, sys
from holdfast._environment.processes.cgroup import read_counters
from holdfast._environment.processes.memory_sample import Sampler
sampler = Sampler(os.getpid())
of_another = Sampler(int(sys.argv[1])).take()
print(json.dumps([os.getuid(), sampler.take(), read_counters(sampler.cgroup), of_another]))
"""


@needs_a_cgroup
@pytest.mark.skipif(why_no_user() is not None, reason=str(why_no_user()))
def test_an_ordinary_user_reads_all_of_it() -> None:
    with limited_memory(LIMIT) as group:
        command = [*group.prefix, *as_user(), sys.executable, "-c", _READS, str(os.getpid())]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        user, sample, counters, of_root = json.loads(run.stdout)
    assert user != 0
    assert sample.pop("gpu") is None or user
    assert [name for name, value in sample.items() if value is None] == []
    assert sample["limit"] == LIMIT
    assert counters["cgroup"]["limit"] == LIMIT
    assert counters["cgroup"]["oom_kill"] == 0
    assert counters["cgroup"]["max"] is not None
    assert counters["vmstat_oom_kill"] is not None
    # Of a process of root's, too: memory is nobody's secret.
    assert of_root["rss"] > 10 * MB
