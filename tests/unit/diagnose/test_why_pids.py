"""What is known of a process by its number: real ones, alive, dead and in between."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast._diagnose.evidence import gather
from holdfast._diagnose.evidence.gather import gather_pid, kernel_log
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.tree import descendants, rank_of, ranks_below
from holdfast._report.status.ask import look_at_process
from holdfast._store.folder.supervised import (
    led_folder,
    led_output,
    led_record,
    life_folder,
    write_led,
)
from tests.support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_living_process_is_shown_as_it_is() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        # Between fork and exec a process has no command line for a moment.
        wait_until(Path(f"/proc/{process.pid}/cmdline").read_bytes, what="its command line")
        evidence = gather_pid(process.pid)
        assert evidence.is_live
        assert evidence.process is not None
        assert evidence.process["command"] == ["sleep", "60"]
        assert evidence.process["parent"] == os.getpid()
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "stopped" in gather_pid(process.pid).notes[0])
    finally:
        process.kill()
        process.wait()


def test_a_process_that_its_parent_has_not_fetched_still_has_its_status() -> None:
    process = subprocess.Popen(["sleep", "60"])
    process.kill()

    def is_zombie() -> bool:
        return (gather.look_at(process.pid) or {}).get("state") == "Z"

    try:
        wait_until(is_zombie)
        evidence = gather_pid(process.pid)
        assert not evidence.is_live
        assert "has not awaited it yet" in evidence.notes[-1]
        if os.geteuid() == 0:  # others may not see it in another's process
            assert evidence.led is not None
            assert evidence.led["status"] == -9
    finally:
        process.wait()


def test_of_an_unknown_process_it_is_said_that_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "kernel_log", list)  # an older process had the same number
    evidence = gather_pid(dead_pid())
    assert not evidence.is_live
    assert evidence.led is None
    assert "has a record of one" in evidence.notes[0]
    assert "holdfast run -- COMMAND" in evidence.notes[1]


@pytest.mark.parametrize("who", ["child_pid", "leader_pid", "descendant"])
def test_a_process_is_found_in_the_records_of_holdfast_run(who: str) -> None:
    pid = dead_pid()
    for age in ("older", "newer"):  # the number was given out twice: the newest counts
        supervision = led_folder()
        assert supervision is not None
        life = life_folder(supervision, 1 if age == "older" else 2)
        life.mkdir()
        record = {"host": host_name(), "status": -11, "life": 1 if age == "older" else 2}
        if who == "descendant":
            record["processes"] = [{"pid": pid, "comm": "pt_data_worker", "status": -9}]
        else:
            record[who] = pid
        write_led(led_record(life), record)
        led_output(life).write_text("Segmentation fault (core dumped)\n")
    evidence = gather_pid(pid)
    assert evidence.led is not None
    assert evidence.led["life"] == 2
    assert [sign.kind for sign in evidence.signs] == ["segfault_line"]
    if who == "descendant":
        assert evidence.notes[-1].endswith("led, and died of SIGKILL.")


def test_what_another_host_has_noted_is_of_another_process() -> None:
    pid = dead_pid()
    supervision = led_folder()
    assert supervision is not None
    life = life_folder(supervision, 1)
    life.mkdir()
    write_led(led_record(life), {"host": "another", "child_pid": pid, "status": -11})
    assert gather_pid(pid).led is None


def test_the_kernel_log_tells_whom_the_oom_killer_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = dead_pid()
    lines = [
        "usb 1-1: new device",
        f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid={pid},uid=0",
        f"Memory cgroup out of memory: Killed process {pid} (python) total-vm:9kB, "
        "anon-rss:2097152kB, file-rss:4kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0",
        f"Out of memory: Killed process {pid}7 (other) total-vm:9kB, anon-rss:1kB",
    ]
    monkeypatch.setattr(gather, "kernel_log", lambda: lines)
    evidence = gather_pid(pid)
    (sign,) = evidence.signs
    assert sign.kind == "kernel_oom"
    assert sign.details["of_cgroup"]
    assert "Killed process" in evidence.notes[0]


def test_a_real_segfault_is_found_in_the_kernel_log() -> None:
    if not kernel_log():
        pytest.skip("the kernel's log cannot be read here: run the tests as root")
    if Path("/proc/sys/debug/exception-trace").read_text().strip() == "0":
        pytest.skip("this kernel does not log segfaults: sysctl debug.exception-trace=1")
    line = f"import ctypes; ctypes.string_at({ctypes.sizeof(ctypes.c_void_p)})"
    process = subprocess.Popen([sys.executable, "-S", "-c", line])
    assert process.wait(30) == -signal.SIGSEGV
    # The kernel leaves out messages that come too fast.
    signs = wait_until(lambda: gather_pid(process.pid).signs, 5, "the kernel's line")
    assert signs[0].kind == "kernel_segfault"
    assert signs[0].details["pid"] == process.pid


@pytest.mark.parametrize(("others", "is_launcher"), [("", True), ("sleep 60 & ", False)])
def test_a_single_rank_counts_where_it_is_the_only_child(others: str, is_launcher: bool) -> None:
    launcher = subprocess.Popen(
        ["sh", "-c", f"{others}RANK=0 sleep 60 & wait"], start_new_session=True
    )
    try:
        # Before exec a rank has the variables of its parent.
        ranks = wait_until(
            lambda: [pid for pid in descendants(launcher.pid) if rank_of(pid) == 0], what="its rank"
        )
        if not is_launcher:
            wait_until(lambda: len(descendants(launcher.pid)) == 2, what="the other process")
        assert [*ranks_below(launcher.pid).values()] == (ranks if is_launcher else [])
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def test_of_a_launcher_each_rank_is_looked_at_by_itself() -> None:
    shell = "RANK=0 sleep 60 & RANK=1 sh -c 'sleep 60 & wait' & sleep 60 & wait"
    launcher = subprocess.Popen(["sh", "-c", shell], start_new_session=True)
    try:
        wait_until(lambda: len(descendants(launcher.pid)) == 4, what="its processes")
        # Before exec a rank has the variables of its parent.
        wait_until(lambda: [*ranks_below(launcher.pid)] == [0, 1], what="their variables")
        ranks = ranks_below(launcher.pid)
        looks = look_at_process(launcher.pid)
        assert [(look["rank"], look["pid"]) for look in looks] == [*ranks.items()]
        assert [look["pid"] for look in look_at_process(ranks[1])] == [ranks[1]]
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
