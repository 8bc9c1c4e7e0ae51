"""`holdfast why`: one verdict on real runs, wherever their folder is now."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from typing import Any

import pytest

from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from tests.cli.command import TRAIN_NUMPY, environment, holdfast, holdfast_process, succeed
from tests.support import copy_living, keepers, wait_for_keeper_gone, wait_until

KEYS = [
    *("subject", "kind", "attempt", "cause", "sentence", "sure", "evidence", "advice", "rank"),
    *("host", "time", "step", "durable_step", "others", "restart", "files"),
]


def verdict_of(*arguments: Any, **options: Any) -> dict[str, Any]:
    found = json.loads(succeed("why", *arguments, "--json", **options))
    assert isinstance(found, dict)
    assert list(found) == KEYS
    return found


def killed(folder, start):
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    wait_until(lambda: read_json(RunLayout(folder).heartbeat(1)).get("memory_step"))
    trainer.kill()
    trainer.wait()
    return trainer


def test_an_exception_is_told_with_its_place_and_what_is_safe(folder, start):
    assert start(folder, "--raise-at", 3, script=TRAIN_NUMPY).wait() == 1
    found = verdict_of(folder)
    assert (found["cause"], found["sure"]) == ("python-exception", "certain")
    assert "ValueError: planted" in found["sentence"]
    assert any("train_numpy.py:" in line for line in found["evidence"])
    assert found["restart"] == "backoff"
    assert found["attempt"] == 1
    shown = succeed("why", folder)
    assert shown.startswith(f"{folder}, attempt 1: python-exception\n")
    assert "How sure: certain\n" in shown
    assert "  1. " in shown
    assert str(folder / "attempts" / "0001" / "error.json") in shown
    assert "\x1b" not in shown
    status = succeed("status", folder)
    assert f"ValueError: planted (in step 4). More: holdfast why {folder}" in status


def test_a_kill_is_told_by_exclusion_and_at_once(folder, start):
    trainer = killed(folder, start)
    found = verdict_of(folder)  # its keeper may still be writing
    assert (found["cause"], found["sure"]) == ("killed", "by-exclusion")
    assert f"pid {trainer.pid}" in found["sentence"]
    assert found["durable_step"] is not None
    assert found["restart"] == "free"
    assert any("not the OOM killer" in line for line in found["evidence"])
    wait_for_keeper_gone(folder)
    assert verdict_of(folder)["cause"] == "killed"


def test_a_copy_on_another_machine_tells_the_same(folder, tmp_path, start):
    killed(folder, start)
    wait_for_keeper_gone(folder)
    here = verdict_of(folder)
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    for name in ("lease.json", "heartbeat.json"):
        path = copy / "attempts" / "0001" / name
        told = json.loads(path.read_text())
        told["process" if name == "lease.json" else "keeper"] |= {"host": "far", "boot": "other"}
        path.write_text(json.dumps(told))
    began = time.monotonic()
    there = verdict_of(copy)
    assert time.monotonic() - began < 12  # a live one is watched for 15 s
    for key in ("cause", "sure", "sentence", "step", "durable_step", "evidence"):
        assert there[key] == here[key]
    assert all(str(copy) in path for path in there["files"])


def test_a_copy_that_stops_in_the_middle_was_lost_with_its_machine(folder, tmp_path, start):
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    wait_until(lambda: (folder / "attempts" / "0001" / "heartbeat.json").exists())
    copy = tmp_path / "copy"
    copy_living(folder, copy)
    lease, beat = (copy / "attempts" / "0001" / f"{n}.json" for n in ("lease", "heartbeat"))
    process = json.loads(lease.read_text())
    process["process"] |= {"host": "far", "boot": "other"}
    lease.write_text(json.dumps(process))
    told = json.loads(beat.read_text()) | {"time": 1_600_000_000.0, "keeper": process["process"]}
    beat.write_text(json.dumps(told))
    found = verdict_of(copy)
    assert (found["cause"], found["sure"]) == ("machine-lost", "by-exclusion")
    assert (found["host"], found["restart"]) == ("far", "free")
    assert any("last heartbeat is of 2020-09-1" in line for line in found["evidence"])
    assert verdict_of(folder)["cause"] == "running"  # the one that was copied


def test_trainer_and_keeper_that_die_together_are_told_so(folder, start):
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    (keeper,) = wait_until(lambda: keepers(folder))
    wait_until(lambda: (folder / "attempts" / "0001" / "heartbeat.json").exists())
    trainer.send(signal.SIGSTOP)  # else it would start another keeper
    keeper.kill()
    trainer.kill()
    trainer.wait()
    found = verdict_of(folder)
    assert (found["cause"], found["sure"]) == ("killed", "by-exclusion")
    assert "together" in found["sentence"]


def test_a_finished_run_a_stopped_one_and_each_of_its_lives(folder, start):
    first = start(folder, "--sleep", 0.01, "--total", 90_000, script=TRAIN_NUMPY)
    first.ready()
    first.send(signal.SIGTERM)
    assert first.wait() == 143
    found = verdict_of(folder)
    assert (found["cause"], found["restart"]) == ("asked", "done")
    assert "SIGTERM" in found["sentence"]
    assert start(folder, "--total", 3, script=TRAIN_NUMPY).wait() == 0
    assert verdict_of(folder)["cause"] in ("finished", "lying-status")
    assert verdict_of(folder, "--attempt", 1)["cause"] == "asked"
    lives = json.loads(succeed("why", folder, "--all", "--json"))
    assert [life["attempt"] for life in lives] == [1, 2]
    assert verdict_of(folder / "attempts" / "0001")["cause"] == "asked"


def test_a_state_that_does_not_fit_is_a_matter_of_configuration(folder, start):
    assert start(folder, "--total", 5, script=TRAIN_NUMPY).wait() == 0
    script = folder.parent / "other.py"
    script.write_text(
        f"import numpy, holdfast\nwith holdfast.Run({str(folder)!r}, other=numpy.ones(3)): pass\n"
    )
    assert start(script=script).wait() == 1
    found = verdict_of(folder)
    assert (found["cause"], found["restart"]) == ("configuration", "never")


def test_a_log_a_process_and_the_newest_run(folder, tmp_path, start):
    log = tmp_path / "train.log"
    log.write_text('Traceback (most recent call last):\n  File "t.py", line 1\nKeyError: 3\n')
    found = verdict_of(log)
    assert (found["kind"], found["cause"]) == ("log", "python-exception")
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    # An attempt is one of a run: what `holdfast run` has led meanwhile does not count.
    found = verdict_of("--attempt", 1, cwd=folder.parent)
    assert (found["kind"], found["cause"]) == ("run", "finished")
    idle = subprocess.Popen(["sleep", "600"])
    found = verdict_of(idle.pid)
    idle.kill()
    idle.wait()
    assert (found["kind"], found["cause"]) == ("pid", "running")


def test_what_holdfast_run_has_led_is_told_by_its_command(tmp_path):
    state = environment(HOLDFAST_STATE=str(tmp_path / "state"))
    led = ("run", "--max-restarts", "0", "--")
    done = holdfast_process(*led, "sh", "-c", "kill -SEGV $$", env=state)
    assert done.returncode == 139
    (life,) = (tmp_path / "state" / "led").glob("*/life-0001")
    for place in (life, life.parent):
        found = verdict_of(place, env=state)
        assert (found["kind"], found["cause"], found["sure"]) == ("led", "segfault", "likely")
    assert succeed("why", life, env=state).startswith("sh -c kill -SEGV $$: segfault\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no such file or folder"),
        (["."], "no run here"),
        (["file", "--attempt", "1"], "--attempt is for run folders"),
        (["4711", "--attempt", "1"], "--attempt is for run folders"),
        (["--pid", "abc"], "this is not the number of a process"),
        (["--pid"], "There is no number"),
        (["--pid", "--job", "1"], "two things"),
        (["run", "--attempt", "7"], "no attempt 7"),
    ],
)
def test_wrong_input_gets_a_sentence_and_status_2(tmp_path, arguments, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    if arguments[:1] == ["run"]:
        (tmp_path / "run" / "run.json").write_text('{"run_id": "x"}')
    done = holdfast("why", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_a_run_without_an_attempt_and_damaged_records_have_a_verdict(tmp_path):
    (tmp_path / "run.json").write_text('{"run_id": "x"}')
    found = verdict_of(tmp_path)
    assert (found["cause"], found["sure"]) == ("unknown", "unknown")
    attempt = tmp_path / "attempts" / "0001"
    attempt.mkdir(parents=True)
    for name in ("lease", "heartbeat", "exit", "error", "death", "led", "requeue", "origin"):
        (attempt / f"{name}.json").write_bytes(b'{"status": "\xff')
    (attempt / "output.log").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "journal.jsonl").write_bytes(b"\xff\n[1]\n{}\n")
    assert verdict_of(tmp_path)["cause"] == "unknown"
    for name in ("lease", "heartbeat", "exit", "error", "death", "led"):
        (attempt / f"{name}.json").write_text('{"status": [], "process": 3, "memory": {"t": "x"}}')
    assert verdict_of(tmp_path)["cause"] == "unknown"
