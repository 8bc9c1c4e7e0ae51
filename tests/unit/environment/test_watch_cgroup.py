"""The memory cgroup of a process: found in both versions and in containers, and read aright.

The trees are made up, since a machine has one version; the last tests read the real one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast._environment.processes.cgroup import MemoryCgroup, Usage, cpu_quota, read_counters

GB = 1 << 30
PID = 77
NONE = 9223372036854771712
V1 = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "32 23 0:28 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = (
    "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
)


class Machine:
    """A /proc and a /sys of our own making."""

    def __init__(self, root: Path, told: str, mounts: str) -> None:
        self.root = root
        self._write("proc/77/cgroup", told)
        self._write("proc/self/mountinfo", OTHERS + mounts)

    def v2(self, path: str, used: int, limit: int | str = "max", stat: str = "", events: str = ""):
        folder = f"sys/fs/cgroup{path}"
        self._write(f"{folder}/memory.current", f"{used}\n")
        self._write(f"{folder}/memory.max", f"{limit}\n")
        self._write(f"{folder}/memory.stat", stat)
        self._write(f"{folder}/memory.events", events)

    def v1(self, path: str, used: int, limit: int = NONE, stat: str = "", killed: int = 0):
        folder = f"sys/fs/cgroup/memory{path}"
        self._write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self._write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"{folder}/memory.stat", stat)
        self._write(f"{folder}/memory.failcnt", "12\n")
        control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}\n"
        self._write(f"{folder}/memory.oom_control", control)

    def find(self) -> MemoryCgroup:
        found = MemoryCgroup.find(PID, str(self.root))
        assert found is not None
        return found

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_v2_leaves_out_what_the_kernel_takes_back_before_it_kills(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job\n", V2.format(mounted="/"))
    stat = (
        "anon 900\nfile 5000\nkernel 10\nshmem 600\ninactive_anon 1\nactive_anon 2\n"
        "inactive_file 3000\nactive_file 1400\nslab_reclaimable 100\n"
    )
    machine.v2("/job", 6100, 10000, stat)
    assert machine.find().usage() == Usage(used=1600, cache=4400, limit=10000)


def test_v1_leaves_out_what_the_kernel_takes_back_before_it_kills(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "9:name=systemd:/\n4:memory:/job\n0::/\n", V1.format(mounted="/"))
    stat = (
        "cache 1\nshmem 1\ninactive_file 1\nhierarchical_memory_limit 10000\ntotal_cache 5000\n"
        "total_rss 900\ntotal_shmem 600\ntotal_inactive_file 3000\ntotal_active_file 1400\n"
    )
    machine.v1("/job", 6000, 10000, stat)
    found = machine.find()
    assert (found.version, found.path) == (1, "/job")
    assert found.usage() == Usage(used=1600, cache=4400, limit=10000)


def test_the_limit_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a/b/c\n", V2.format(mounted="/"))
    machine.v2("/a", 5 * GB, 64 * GB)
    machine.v2("/a/b", 3 * GB, 4 * GB)
    machine.v2("/a/b/c", 1 * GB, "max")
    found = machine.find()
    assert found.limit() == 4 * GB
    # Whose room it is: the tasks of a job share what the job may use.
    assert found.usage() == Usage(used=3 * GB, cache=0, limit=4 * GB)


def test_where_a_higher_limit_leaves_less_room_it_is_that_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a/b\n", V2.format(mounted="/"))
    machine.v2("/a", 63 * GB, 64 * GB)
    machine.v2("/a/b", 1 * GB, 4 * GB)
    assert machine.find().usage() == Usage(used=63 * GB, cache=0, limit=64 * GB)


@pytest.mark.parametrize("none", [NONE, 9223372036854710272, (1 << 63) - 1])
def test_v1_spells_no_limit_as_a_large_number(tmp_path: Path, none: int) -> None:
    machine = Machine(tmp_path, "4:memory:/job\n", V1.format(mounted="/"))
    machine.v1("/job", 5, none, f"hierarchical_memory_limit {none}\n")
    machine.v1("", 9, none, f"hierarchical_memory_limit {none}\n")
    found = machine.find()
    assert found.limit() is None
    assert found.usage() == Usage(used=5, cache=0, limit=None)


def test_v1_of_a_container_knows_of_a_limit_further_up(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/docker/abc\n", V1.format(mounted="/docker/abc"))
    machine.v1("", 5, NONE, f"hierarchical_memory_limit {2 * GB}\n")
    found = machine.find()
    assert (found.path, found.limit()) == ("/docker/abc", 2 * GB)


@pytest.mark.parametrize(
    ("told", "mounted", "folder"),
    [
        ("/", "/", ""),  # with a namespace of its own: the container's is the top
        ("/docker/abc", "/docker/abc", ""),  # without one, and only its own is mounted
        ("/docker/abc/step", "/docker/abc", "/step"),
        ("/docker/abc", "/docker/other", ""),
        ("/../../system.slice/x", "/", ""),  # outside of what is seen from here
        ("/a b", "/", "/a b"),
        ("/in/c", "/in\\040x", ""),
    ],
)
def test_it_is_found_in_a_container(tmp_path: Path, told: str, mounted: str, folder: str) -> None:
    machine = Machine(tmp_path, f"0::{told}\n", V2.format(mounted=mounted))
    machine.v2(folder, 7, 10)
    assert machine.find().usage() == Usage(used=7, cache=0, limit=10)


def test_a_folder_that_does_not_tell_of_memory_is_passed_over(tmp_path: Path) -> None:
    """The controller may not be on so far down."""
    machine = Machine(tmp_path, "0::/user/session\n", V2.format(mounted="/"))
    machine.v2("/user", 7, 10)
    (tmp_path / "sys/fs/cgroup/user/session").mkdir()
    assert machine.find().usage() == Usage(used=7, cache=0, limit=10)


def test_with_both_versions_it_is_the_one_that_has_memory(tmp_path: Path) -> None:
    first = V1.format(mounted="/") + V2.format(mounted="/").replace(
        "cgroup rw,n", "cgroup/unified rw,n"
    )
    machine = Machine(tmp_path, "4:memory:/job\n0::/job\n", first)
    machine.v1("/job", 5)
    assert machine.find().version == 1
    machine = Machine(tmp_path / "b", "4:cpu:/job\n0::/job\n", first.replace("/unified", ""))
    machine.v2("/job", 5)
    assert machine.find().version == 2


def test_v2_counters_tell_the_killed_of_its_own_and_hits_of_the_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job/task\n", V2.format(mounted="/"))
    above = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 5\noom_group_kill 0\n"
    machine.v2("/job", 5, 10, events=above)
    (tmp_path / "sys/fs/cgroup/job/memory.peak").write_text("9\n")
    machine.v2("/job/task", 5, events="low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\n")
    assert machine.find().counters() == {
        **{"version": 2, "path": "/job/task", "limit": 10, "peak": 9},
        **{"oom": 2, "oom_kill": 1, "max": 31},
    }


def test_v1_counters(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/job\n", V1.format(mounted="/"))
    machine.v1("/job", 5, 10, killed=3)
    (tmp_path / "sys/fs/cgroup/memory/job/memory.memsw.failcnt").write_text("30\n")
    assert machine.find().counters() == {
        **{"version": 1, "path": "/job", "limit": 10, "peak": None},
        **{"oom": None, "oom_kill": 3, "max": 42},
    }


def test_a_cgroup_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job\n", V2.format(mounted="/"))
    machine.v2("/job", 5, 10)
    found = machine.find()
    for name in ("current", "max", "stat", "events"):
        (tmp_path / f"sys/fs/cgroup/job/memory.{name}").unlink()
    assert found.usage() is None
    counters = found.counters()
    assert (counters["oom"], counters["oom_kill"], counters["max"]) == (None, None, None)


@pytest.mark.parametrize("told", ["", "nonsense\n", "0::/job\n", "4:memory:/job\n", "4:cpu:/job\n"])
def test_without_any_there_is_none(tmp_path: Path, told: str) -> None:
    Machine(tmp_path, told, "")
    assert MemoryCgroup.find(PID, str(tmp_path)) is None
    assert MemoryCgroup.find(PID, str(tmp_path / "nothing")) is None


def test_counters_without_a_cgroup_are_those_of_the_machine() -> None:
    counters = read_counters(None)
    assert counters["cgroup"] is None
    assert counters["vmstat_oom_kill"] is None or counters["vmstat_oom_kill"] >= 0


def test_the_real_one_of_this_process_is_read() -> None:
    found = MemoryCgroup.find(os.getpid())
    if found is None:
        pytest.skip("this system has no memory cgroups")
    usage = found.usage()
    assert usage is not None
    assert usage.used > 0
    assert usage.cache >= 0
    assert usage.limit is None or usage.limit >= usage.used
    counters = read_counters(found)
    assert counters["cgroup"]["path"].startswith("/")
    assert counters["cgroup"]["oom_kill"] >= 0


@pytest.mark.parametrize(
    ("stat", "is_found"),
    [
        ("7 (a) b) S 1 7 7 0 -1 4194304 1 2\n", True),
        ("7 (a) b) R 1 7 7 0 -1 4194308 1 2\n", False),  # on its way out, and no zombie yet
        ("7 (a) b) Z 1 7 7 0 -1 4227084 1 2\n", False),
        ("7 (a) b) X 1 7\n", False),
    ],
)
def test_one_that_is_leaving_is_not_believed_to_have_moved(
    tmp_path: Path, stat: str, is_found: bool
) -> None:
    """The kernel shows it at the top of the tree from then on."""
    machine = Machine(tmp_path, "4:memory:/\n", V1.format(mounted="/"))
    machine.v1("", 9, NONE, "")
    machine._write(f"proc/{PID}/stat", stat)
    assert (MemoryCgroup.find(PID, str(machine.root)) is not None) == is_found


def test_a_quota_of_processors_is_found_with_how_often_it_was_used_up(tmp_path):
    folder = tmp_path / "sys/fs/cgroup/job/step"
    folder.mkdir(parents=True)
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/7/cgroup").write_text("0::/job/step\n")
    mount = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    (folder / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(7, str(tmp_path)) is None
    (folder.parent / "cpu.max").write_text("50000 100000\n")
    (folder.parent / "cpu.stat").write_text("usage_usec 9\nnr_periods 200\nnr_throttled 150\n")
    assert cpu_quota(7, str(tmp_path)) == {"cores": 0.5, "throttled": 0.75}
