"""Memory pressure, by files like those of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast._environment.processes import pressure
from holdfast._environment.processes.pressure import MemoryPressure

GB = 1 << 20  # in the kernel's unit of kB
MOUNT = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


class Machine:
    """A forged /proc and /sys."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._now = 1000.0
        monkeypatch.setattr(pressure.time, "monotonic", lambda: self._now)
        self.free(20)
        self.stall(5_000_000)

    def write(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def free(self, gigabytes: int) -> None:
        free = f"MemAvailable: {gigabytes * GB} kB\n"
        self.write("proc/meminfo", f"MemTotal: {64 * GB} kB\n{free}")

    def stall(self, total_us: int, path: str = "proc/pressure/memory") -> None:
        line = "avg10=99.00 avg60=0.00 avg300=0.00"
        self.write(path, f"some {line} total={total_us}\nfull {line} total=0\n")

    def cgroup(self, used: int, limit: int) -> None:
        self.write(f"proc/{os.getpid()}/cgroup", "0::/job\n")
        self.write(f"proc/{os.getpid()}/stat", "1 (x) S 0 0 0 0 0 0\n")
        self.write("proc/self/mountinfo", MOUNT + "\n")
        self.write("sys/fs/cgroup/job/memory.current", f"{used}\n")
        self.write("sys/fs/cgroup/job/memory.max", f"{limit}\n")
        self.write("sys/fs/cgroup/job/memory.stat", "file 0\n")

    def open(self) -> MemoryPressure:
        return MemoryPressure(str(self.root), str(self.root))

    def wait(self, seconds: float = 1.0) -> None:
        self._now += seconds


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_calm_machine_is_not_short(machine):
    watch = machine.open()
    machine.wait()
    assert watch.reason() == ""


def test_a_stall_from_before_the_first_look_does_not_count(machine):
    machine.stall(900_000_000)
    watch = machine.open()
    machine.wait()
    assert watch.reason() == ""


def test_processes_that_wait_for_memory_are_noticed(machine):
    watch = machine.open()
    machine.wait()
    machine.stall(5_000_000 + 90_000)
    assert watch.reason() == ""
    machine.wait()
    machine.stall(5_000_000 + 90_000 + 110_000)
    assert watch.reason() == "processes wait for memory"


def test_processes_that_wait_within_limits_of_their_own_do_not_count(machine):
    machine.free(40)
    watch = machine.open()
    machine.wait()
    machine.stall(5_000_000 + 900_000)
    assert watch.reason() == ""


def test_a_stall_within_the_cgroup_is_noticed(machine):
    machine.free(40)
    machine.cgroup(1 << 30, 8 << 30)
    machine.stall(0, "sys/fs/cgroup/job/memory.pressure")
    watch = machine.open()
    machine.wait()
    machine.stall(500_000, "sys/fs/cgroup/job/memory.pressure")
    assert watch.reason() == "processes wait for memory"


@pytest.mark.parametrize(("used", "is_short"), [(7 << 30, False), (15 << 29, True)])
def test_a_cgroup_with_less_than_a_tenth_left_is_short(machine, used, is_short):
    machine.cgroup(used, 8 << 30)
    watch = machine.open()
    machine.wait()
    assert watch.reason() == ("the cgroup is nearly full" if is_short else "")


def test_a_machine_with_less_than_a_tenth_left_is_short(machine):
    watch = machine.open()
    machine.wait()
    machine.free(3)
    assert watch.reason() == "the machine's memory is nearly full"


def test_a_full_file_system_is_short(machine, monkeypatch):
    watch = machine.open()
    machine.wait()
    real = os.statvfs(machine.root)
    full = os.statvfs_result((*real[:3], 0, 0, *real[5:]))
    monkeypatch.setattr(pressure.os, "statvfs", lambda _: full)
    assert watch.reason() == f"{machine.root} is nearly full"


def test_where_the_kernel_tells_nothing_memory_is_not_short(tmp_path):
    assert MemoryPressure(str(tmp_path / "none"), str(tmp_path)).reason() == ""
