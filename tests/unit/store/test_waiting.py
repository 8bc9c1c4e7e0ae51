"""A waiting arena: one process takes it, and the guard removes it in time, and no other file."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast._environment.processes.cgroup import Usage
from holdfast._store.format.image import TensorSpec, plan_image
from holdfast._store.memory import backing, waiting
from holdfast._store.memory.arena import Arena
from holdfast._store.memory.waiting import claim, guard

GB = 1 << 30
PSI = "/proc/pressure/memory"
SPEC = TensorSpec("w", "numpy", "float32", "F32", (4,), None, 4, 16)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(waiting, "shortage", lambda _: "")
    monkeypatch.setattr(waiting, "stalls", dict)


def file(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    path.write_bytes(b"slots")
    return path


def test_two_attempts_cannot_both_take_it(tmp_path):
    path = file(tmp_path)
    barrier = threading.Barrier(8)
    won: list[int] = []
    prepared: list[int] = []

    def attempt(number: int) -> None:
        with path.open("r+b") as opened:
            barrier.wait()
            taken = tmp_path / f"a{number}"
            if claim(opened.fileno(), path, taken, lambda: prepared.append(number)):
                won.append(number)

    threads = [threading.Thread(target=attempt, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert prepared == won  # nobody else has touched it
    assert [each.name for each in tmp_path.iterdir()] == [f"a{won[0]}"]


def test_it_goes_when_its_time_is_over(tmp_path, quick):
    path = file(tmp_path)
    assert guard(path, 0.01) == "its time is over"
    assert not path.exists()


def test_it_goes_at_once_when_memory_is_short(tmp_path, quick, monkeypatch):
    path = file(tmp_path)
    reasons = ["", "", "the cgroup is nearly full"]
    monkeypatch.setattr(waiting, "shortage", lambda _: reasons.pop(0))
    assert guard(path, 60) == "the cgroup is nearly full"
    assert not path.exists()


def test_it_goes_when_processes_wait_for_memory(tmp_path, quick, monkeypatch):
    path = file(tmp_path)
    # A stall from before the guard does not count, nor does a place that counts later.
    counts = [{"a": 90.0}, {"a": 90.0}, {"a": 90.0, "b": 70.0}, {"a": 90.0, "b": 71.0}]
    monkeypatch.setattr(waiting, "stalls", lambda: counts.pop(0))
    assert guard(path, 60) == "processes wait for memory"
    assert not counts
    assert not path.exists()


@pytest.mark.parametrize(
    ("free", "stalled"),
    [(40, {"/cgroup/memory.pressure": 2.0}), (20, {"/cgroup/memory.pressure": 2.0, PSI: 3.0})],
)
def test_stalls_are_those_of_the_cgroup_and_of_a_machine_with_little_memory(
    monkeypatch, free, stalled
):
    files = {
        "/cgroup/memory.pressure": b"some avg10=0.00 total=2000000\nfull avg10=0.00 total=9\n",
        PSI: b"some avg10=0.00 avg60=0.00 total=3000000\n",
    }
    figures = {"MemAvailable": free * GB, "MemTotal": 64 * GB}
    cgroup = SimpleNamespace(folders=["/cgroup"])
    monkeypatch.setattr(backing, "_machine_bytes", figures.__getitem__)
    monkeypatch.setattr(backing.MemoryCgroup, "find", lambda _: cgroup)
    monkeypatch.setattr(backing, "read_bytes", files.get)
    assert backing.stalls() == stalled


@pytest.mark.parametrize(
    ("machine", "cgroup", "shm", "why"),
    [
        ((20, 64), None, (1, 2), ""),
        ((3, 64), None, (1, 2), "the machine's memory is nearly full"),
        ((20, 64), (1, 8), (1, 2), ""),
        ((20, 64), (0.5, 8), (1, 2), "the cgroup is nearly full"),
        ((20, 64), None, (0.01, 2), "SHM is nearly full"),
    ],
)
def test_memory_is_short_when_little_of_it_is_free(
    tmp_path, monkeypatch, machine, cgroup, shm, why
):
    usage = None
    if cgroup is not None:
        used = int((cgroup[1] - cgroup[0]) * GB)
        usage = SimpleNamespace(usage=lambda: Usage(used, 0, cgroup[1] * GB))
    figures = dict(zip(("MemAvailable", "MemTotal"), (each * GB for each in machine), strict=True))
    room = SimpleNamespace(f_blocks=shm[1] * GB, f_bavail=int(shm[0] * GB), f_frsize=1)
    monkeypatch.setattr(backing, "_machine_bytes", figures.__getitem__)
    monkeypatch.setattr(backing.MemoryCgroup, "find", lambda _: usage)
    monkeypatch.setattr(backing.os, "statvfs", lambda _: room)
    assert backing.shortage(tmp_path) == why.replace("SHM", str(tmp_path))


def test_the_guard_ends_when_it_was_taken_and_removes_nothing(tmp_path, quick):
    path = file(tmp_path)
    taken = tmp_path / "taken"
    threading.Timer(0.02, lambda: path.rename(taken)).start()
    assert guard(path, 60) == "it was taken"
    assert taken.read_bytes() == b"slots"


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_log_says_why_the_guard_removed_it(tmp_path, monkeypatch, is_taken):
    path, log = file(tmp_path), tmp_path / "keeper.log"
    monkeypatch.setattr(waiting.signal, "signal", lambda *_: None)
    if is_taken:
        path.unlink()
    waiting.main(json.dumps({"path": str(path), "seconds": 0, "log": str(log)}))
    assert not path.exists()
    told = log.read_text() if log.exists() else ""
    assert told.endswith(
        "" if is_taken else "the arena that waited was removed: its time is over\n"
    )
    assert bool(told) is not is_taken


def test_an_arena_that_is_taken_over_is_empty_and_of_the_new_attempt(tmp_path):
    path = tmp_path / "arena"
    plan = plan_image([SPEC], 10)
    with path.open("w+b") as opened:
        opened.truncate(1 << 20)
        path.chmod(0o600)
        arena = Arena.create(
            opened.fileno(), run_id="0" * 32, attempt=3, generation=2, slots=3, plan=plan
        )
        slot = arena.begin()
        assert slot is not None
        arena.finish(slot, sequence=7, mark=20)
        arena.set_digests(slot, 7, [b"d" * 16] * arena.ranges)
        assert arena.waits_until is None
        arena.wait_until(1234.5)
        assert arena.waits_until == 1234.5
        arena.take_over(4)
        for each in (arena, Arena(opened.fileno())):
            assert (each.attempt, each.generation, each.waits_until) == (4, 1, None)
            assert each.whole() == []
            assert each.plan(slot).specs == plan.specs
        slot = arena.begin()
        assert slot is not None
        arena.finish(slot, sequence=1, mark=22)
        assert [(r.sequence, r.is_hashed) for r in arena.whole()] == [(1, False)]
