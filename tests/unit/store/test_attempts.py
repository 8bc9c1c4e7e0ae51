"""Attempts: each number is taken once, whoever else is at it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import holdfast
from holdfast._environment.processes.identity import of_process
from holdfast._store.folder import attempts
from holdfast._store.folder.attempts import claim, find_run, open_folder, read_origins
from holdfast._store.folder.layout import RunLayout

PRELUDE = """
import sys
from pathlib import Path
from holdfast import _errors
from holdfast._store.folder import attempts
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
"""
# Every process takes three numbers, and nobody is refused: only the rename decides.
TAKE_THREE = (
    PRELUDE
    + """
layout, _ = attempts.open_folder(folder)
attempts._refuse_if_live = lambda *_: None
print(*[attempts.claim(layout, folder, print) for _ in range(3)], flush=True)
"""
)
# One process wins and lives on; the others are refused.
TAKE_ONE = (
    PRELUDE
    + """
layout, run_id = attempts.open_folder(folder)
try:
    print("took", attempts.claim(layout, folder, print), flush=True)
except _errors.RunIsLive as error:
    print("refused", error.pid, flush=True)
sys.stdin.readline()
"""
)
OPEN = (
    PRELUDE
    + """
print(attempts.open_folder(folder)[1], flush=True)
"""
)


def silent(message):
    raise AssertionError(message)


def race(program, folder, count):
    """Start `count` processes, let them go at once, and read a line from each."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        return [racer.stdout.readline().split() for racer in racers], [r.pid for r in racers]
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=30)


def test_processes_that_claim_at_once_take_every_number_exactly_once(tmp_path):
    open_folder(tmp_path)
    lines, _ = race(TAKE_THREE, tmp_path, 6)
    taken = sorted(int(number) for line in lines for number in line)
    assert taken == list(range(1, 19))
    layout, _ = find_run(tmp_path)
    assert layout.attempt_numbers() == taken
    assert all(attempts.lease_holder(layout, number) is not None for number in taken)
    assert not list(layout.attempts.glob(".claim-*"))


def test_of_processes_that_start_at_once_one_trains_and_the_others_are_told_who(tmp_path):
    open_folder(tmp_path)
    lines, pids = race(TAKE_ONE, tmp_path, 5)
    winners = [pid for line, pid in zip(lines, pids, strict=True) if line[0] == "took"]
    assert len(winners) == 1
    assert sorted(lines) == [["refused", str(winners[0])]] * 4 + [["took", "1"]]


def test_processes_that_make_the_folder_at_once_agree_on_the_runs_id(tmp_path):
    lines, _ = race(OPEN, tmp_path / "run", 6)
    assert len({line[0] for line in lines}) == 1
    assert lines[0][0] == find_run(tmp_path / "run")[1]


def test_a_dead_process_holds_nothing(tmp_path):
    open_folder(tmp_path)
    race(TAKE_ONE, tmp_path, 1)
    layout, _ = find_run(tmp_path)
    assert claim(layout, tmp_path, silent) == 2


def test_a_living_process_keeps_the_folder_until_it_notes_its_exit(tmp_path):
    layout, _ = open_folder(tmp_path)
    assert claim(layout, tmp_path, silent) == 1
    with pytest.raises(holdfast.RunIsLive) as refused:
        claim(layout, tmp_path, silent)
    assert refused.value.pid == os.getpid()
    assert f"holdfast stop {tmp_path}" in str(refused.value)
    attempts.write_json(layout.exit(1), {"status": 0})
    assert claim(layout, tmp_path, silent) == 2


def test_a_run_that_this_process_has_ended_is_free_though_no_exit_was_noted(tmp_path):
    layout, _ = open_folder(tmp_path)
    assert claim(layout, tmp_path, silent) == 1
    attempts.release(layout, 1)  # on a full disk that is all
    assert claim(layout, tmp_path, silent) == 2


def test_a_moved_folder_is_held_until_its_run_has_ended(tmp_path):
    layout, _ = open_folder(tmp_path / "before")
    assert claim(layout, tmp_path / "before", silent) == 1
    moved = (tmp_path / "before").rename(tmp_path / "moved")
    with pytest.raises(holdfast.RunIsLive, match="this process trains here already"):
        claim(RunLayout(moved), moved, silent)
    attempts.release(layout, 1)
    assert claim(RunLayout(moved), moved, silent) == 2


def test_a_copied_folder_is_a_run_of_its_own_and_free(tmp_path):
    layout, run_id = open_folder(tmp_path / "run")
    assert claim(layout, tmp_path / "run", silent) == 1
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    seen = find_run(tmp_path / "copy")[1]
    assert seen != run_id  # also before anything is written there
    copy, copied_id = open_folder(tmp_path / "copy")
    assert copied_id == seen
    assert claim(copy, tmp_path / "copy", silent) == 2  # though the original trains
    with pytest.raises(holdfast.RunIsLive):
        claim(layout, tmp_path / "run", silent)
    assert open_folder(tmp_path / "run")[1] == find_run(tmp_path / "run")[1] == run_id
    shutil.rmtree(tmp_path / "run")
    assert open_folder(tmp_path / "copy")[1] == copied_id


def test_a_moved_folder_and_one_with_two_names_stay_the_same_run(tmp_path):
    _, run_id = open_folder(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert open_folder(tmp_path / "link")[1] == run_id
    (tmp_path / "run").rename(tmp_path / "moved")
    assert find_run(tmp_path / "moved")[1] == run_id
    assert open_folder(tmp_path / "moved")[1] == run_id
    shutil.copytree(tmp_path / "moved", tmp_path / "run")
    assert open_folder(tmp_path / "run")[1] != run_id


def test_a_pid_that_was_given_out_again_is_not_the_holder(tmp_path):
    layout, _ = open_folder(tmp_path)
    claim(layout, tmp_path, silent)
    lease = json.loads(layout.lease(1).read_text())
    lease["process"]["started"] = "1"
    attempts.write_json(layout.lease(1), lease)
    assert claim(layout, tmp_path, silent) == 2


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"process": {"pid": 1}}', b"\xff"])
def test_an_unreadable_lease_does_not_lock_the_folder_for_ever(tmp_path, garbage):
    layout, _ = open_folder(tmp_path)
    claim(layout, tmp_path, silent)
    layout.lease(1).write_bytes(garbage)
    assert claim(layout, tmp_path, silent) == 2


def test_another_machine_is_judged_by_whether_its_heartbeat_moves(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "SILENT_SECONDS", 0.3)
    layout, _ = open_folder(tmp_path)
    claim(layout, tmp_path, silent)
    lease = json.loads(layout.lease(1).read_text())
    lease["process"].update(boot="elsewhere", host="far")
    attempts.write_json(layout.lease(1), lease)
    assert not attempts.is_live(layout, 1, patience_seconds=0.3)
    beats = iter(range(1000))

    def beat(path):
        return {"beat": next(beats)} if path == layout.heartbeat(1) else read(path)

    read = attempts.read_json
    monkeypatch.setattr(attempts, "read_json", beat)
    assert attempts.is_live(layout, 1, patience_seconds=5)


def test_the_run_id_stays_when_the_folder_is_opened_again(tmp_path):
    first, again = open_folder(tmp_path)[1], open_folder(tmp_path)[1]
    assert first == again
    assert len(first) == 32
    assert int(first, 16) >= 0


@pytest.mark.parametrize("garbage", [b"", b"{}", b"\xff"])
def test_an_id_that_was_torn_is_replaced_by_a_whole_one(tmp_path, garbage):
    layout, _ = open_folder(tmp_path)
    layout.identity.write_bytes(garbage)
    run_id = open_folder(tmp_path)[1]
    assert len(run_id) == 32
    assert find_run(tmp_path)[1] == run_id
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["run.json"]


def test_a_folder_that_is_a_file_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(holdfast.FolderError, match="cannot be written"):
        open_folder(tmp_path / "file")


def test_a_folder_without_a_run_is_named_as_such(tmp_path):
    with pytest.raises(holdfast.NotARun, match="there is no run here"):
        find_run(tmp_path)


def test_origins_are_those_of_the_attempts_that_began(tmp_path):
    layout, _ = open_folder(tmp_path)
    for number, origin in ((1, {"attempt": None, "step": None}), (2, {"attempt": 1, "step": 50})):
        layout.attempt(number).mkdir()
        attempts.write_json(layout.origin(number), origin)
    layout.attempt(3).mkdir()
    assert read_origins(layout) == {1: None, 2: (1, 50)}


def test_a_process_is_alive_until_it_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = of_process(child.pid)
    assert identity.is_here()
    assert identity.is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()  # not even as a zombie, which still has its pid
    child.communicate()
    assert not identity.is_alive()


def test_a_keeper_that_has_not_begun_to_beat_is_waited_for(tmp_path):
    layout, _ = open_folder(tmp_path / "run")
    dead = claim(layout, tmp_path / "run", pytest.fail)
    with subprocess.Popen(["sleep", "0.3"]) as keeper:
        attempts.note_keeper(layout, dead, keeper.pid)
        attempts.await_keeper(layout, dead, pytest.fail)
        assert not of_process(keeper.pid).is_alive()
