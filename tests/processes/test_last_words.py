"""What a dying trainer leaves: the stack of a crash, and what it saw of its exception."""

from __future__ import annotations

import json
import signal
import time

import pytest

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.gather import gather_run
from holdfast._diagnose.verdict import Cause, Sure
from holdfast._store.folder.layout import RunLayout
from tests.crash.small_disk import mount_small_disk
from tests.support import environment, journal_events, wait_for_keeper_gone

CRASHES = {
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", "Segmentation fault"),
    "SIGABRT": ("os.abort()", "Aborted"),
    "SIGBUS": ("os.kill(os.getpid(), signal.SIGBUS)", "Bus error"),
}
TRAINING = """
    weights = make_weights()
    def break_down():
        {deed}
    with holdfast.Run(folder, weights=weights) as run:
        for step in run.steps(50):
            train_one(weights)
            if step == 20:
                break_down()
"""


def error_of(folder, attempt=1):
    return json.loads(RunLayout(folder).error(attempt).read_text())


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_leaves_its_stack(folder, script, name):
    deed, said = CRASHES[name]
    trainer = script(folder, TRAINING.format(deed=deed))
    assert trainer.wait() == -getattr(signal, name)
    stacks = RunLayout(folder).stacks(1).read_text()
    assert stacks.startswith(f"Fatal Python error: {said}")
    assert "in break_down" in stacks
    assert not RunLayout(folder).error(1).exists()
    wait_for_keeper_gone(folder)


def test_stacks_that_the_user_has_asked_for_stay_where_they_were(folder, tmp_path, start):
    path = tmp_path / "script.py"
    path.write_text(
        "import ctypes, sys, holdfast\n"
        "with holdfast.Run(sys.argv[1], count=0) as run:\n"
        "    for step in run.steps(3):\n"
        "        ctypes.string_at(0)\n"
    )
    trainer = start(folder, script=path, env=environment(PYTHONFAULTHANDLER="1"))
    assert trainer.wait() == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in trainer.output
    assert RunLayout(folder).stacks(1).read_text() == ""


def test_the_stacks_are_put_back_and_left_alone_if_somebody_took_them(folder, script):
    trainer = script(
        folder,
        """
        import faulthandler

        with holdfast.Run(folder, count=0):
            print("inside", faulthandler.is_enabled())
        print("after", faulthandler.is_enabled())
        with holdfast.Run(folder, count=0):
            faulthandler.enable()
        print("taken", faulthandler.is_enabled())
        """,
    )
    assert trainer.wait() == 0
    for line in ("inside True", "after False", "taken True"):
        assert line in trainer.output


def test_the_crash_of_a_forked_child_is_not_the_trainers(folder, script):
    trainer = script(
        folder,
        """
        import ctypes, faulthandler

        with holdfast.Run(folder, count=0) as run:
            for step in run.steps(3):
                child = os.fork()
                if child == 0:
                    ctypes.string_at(0)
                _, status = os.waitpid(child, 0)
                print("child", os.WTERMSIG(status), faulthandler.is_enabled(), flush=True)
        """,
    )
    assert trainer.wait() == 0
    assert f"child {int(signal.SIGSEGV)} True" in trainer.output
    assert not RunLayout(folder).stacks(1).exists()  # empty, so it is gone


@pytest.mark.parametrize(("code", "status"), [("256", 0), ("-1", 255), ("'no data'", 1), ("3", 3)])
def test_what_was_given_to_exit_is_recorded(folder, script, code, status):
    trainer = script(folder, TRAINING.format(deed=f"sys.exit({code})"))
    assert trainer.wait() == status
    found = error_of(folder)
    assert (found["type"], found["exit_code"]) == ("SystemExit", code)
    assert found["frames"][-1][2] == "break_down"
    is_a_lie = status == 0
    assert (f"holdfast: More: holdfast why {folder}\n" in trainer.output) == is_a_lie


@pytest.mark.parametrize("deed", ["sys.exit(0)", "raise KeyboardInterrupt"])
def test_an_end_that_was_wanted_is_no_error(folder, script, deed):
    script(folder, TRAINING.format(deed=deed)).wait()
    assert not RunLayout(folder).error(1).exists()


def test_an_exception_in_a_phase_is_told_with_it(folder, script):
    trainer = script(
        folder,
        """
        with holdfast.Run(folder, count=0) as run:
            for step in run.steps(3):
                if step == 1:
                    with run.phase("eval"):
                        raise ValueError("out of luck")
        """,
    )
    assert trainer.wait() == 1
    found = error_of(folder)
    assert (found["phase"], found["where"], found["step"]) == ("eval", "loop", 1)
    assert (found["type"], found["is_configuration"]) == ("ValueError", False)


def test_an_exception_outside_the_loop_is_told_from_one_inside(folder, script):
    body = """
        with holdfast.Run(folder, count=0) as run:
            if len(sys.argv) > 2:
                raise ValueError("before")
            for step in run.steps(3):
                pass
            raise ValueError("after")
        """
    assert script(folder, body, "early").wait() == 1
    early = error_of(folder, 1)
    assert (early["where"], early["is_configuration"]) == ("outside", True)
    assert script(folder, body).wait() == 1
    late = error_of(folder, 2)
    assert (late["where"], late["step"], late["is_configuration"]) == ("outside", 3, False)


def test_a_state_that_does_not_fit_is_told_from_the_opening(folder, script):
    body = """
        size = int(sys.argv[2])
        with holdfast.Run(folder, weights=make_weights(size)) as run:
            for step in run.steps(int(sys.argv[3])):
                pass
        """
    assert script(folder, body, 10, 3).wait() == 0
    assert script(folder, body, 20, 6).wait() == 1
    found = error_of(folder, 2)
    assert (found["type"], found["where"]) == ("StateMismatch", "opening")
    assert found["is_configuration"] is True


def test_a_leader_is_told_which_run_it_leads(folder, tmp_path, start):
    led = tmp_path / "life-0001"
    led.mkdir()
    path = tmp_path / "script.py"
    path.write_text(
        "import sys, holdfast\n"
        "with holdfast.Run(sys.argv[1], count=0) as run:\n"
        "    for step in run.steps(3): pass\n"
    )
    trainer = start(folder, script=path, env=environment(HOLDFAST_LED=str(led)))
    assert trainer.wait() == 0
    assert json.loads((led / "run.json").read_text()) == {
        "folder": str(folder),
        "attempt": 1,
        "rank": 0,
        "pid": trainer.pid,
    }


@pytest.fixture
def disk(tmp_path):
    yield from mount_small_disk(tmp_path / "disk", "1m")


def test_a_disk_that_was_full_when_torch_saved_is_seen(folder, script, disk):
    pytest.importorskip("torch", reason="pip install torch")
    trainer = script(
        folder,
        """
        import torch

        place = sys.argv[2] + "/model.pt"
        with holdfast.Run(folder, count=0) as run:
            for step in run.steps(3):
                torch.save({"w": torch.zeros(1_000_000)}, place)
        """,
        disk.place,
    )
    assert trainer.wait() == 1
    found = error_of(folder)
    target = next(each for each in found["disks"] if each["role"] == "target")
    assert target["path"] == str(disk.place / "model.pt")
    assert target["free"] < 100_000 < target["total"]
    assert "No space" not in found["message"]  # torch never says it
    said, trace = trainer.output.index("disk"), trainer.output.index("Traceback (most recent")
    assert said < trace  # the last line stays Python's own
    assert f"holdfast: More: holdfast why {folder}\n" in trainer.output


def test_a_traceback_that_says_it_all_is_left_alone(folder, script):
    trainer = script(folder, TRAINING.format(deed="raise ValueError('a word')"))
    assert trainer.wait() == 1
    assert "holdfast why" not in trainer.output
    assert trainer.output.count("a word") == 2  # the line of code, and the message


def test_the_next_start_says_what_the_life_before_died_of(folder, script):
    body = """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(100_000):
                train_one(weights)
                if step == 20 and run.attempt == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == 40:
                    print("at 40", flush=True)
                time.sleep(0.01)
        """
    killed = script(folder, body)
    assert killed.wait() == -signal.SIGKILL
    wait_for_keeper_gone(folder)
    second = script(folder, body)
    line = second.wait_for("the previous attempt")
    assert "SIGKILL" in line
    assert line.startswith("holdfast: the previous attempt ended at step 20. ")
    assert line.endswith(f" More: holdfast why {folder} --attempt 1\n")
    second.wait_for("at 40")
    second.send(signal.SIGTERM)
    assert second.wait() == 143
    # That one was asked to leave: there is nothing to tell of it.
    third = script(folder, body)
    third.wait_for("(attempt 3)")
    time.sleep(0.5)  # for a line that is not to come
    third.send(signal.SIGTERM)
    third.wait()
    assert "the previous attempt" not in third.output


def test_the_exception_of_a_thread_is_recorded_and_shown_as_before(folder, script):
    trainer = script(
        folder,
        """
        import queue, threading

        batches = queue.Queue(maxsize=2)

        def produce():
            for number in range(5):
                batches.put(number)
            float("0,5")

        threading.Thread(target=produce, name="producer").start()
        with holdfast.Run(folder, count=0) as run:
            for step in run.steps(50):
                batches.get(timeout=1)
        """,
    )
    assert trainer.wait() == 1
    assert "Exception in thread producer:\nTraceback" in trainer.output
    (noted,) = error_of(folder)["threads"]
    assert (noted["thread"], noted["type"]) == ("producer", "ValueError")
    (event,) = journal_events(folder, "thread-died")
    assert (event["thread"], event["type"]) == ("producer", "ValueError")
    wait_for_keeper_gone(folder)
    verdict = judge(gather_run(folder))
    assert "ValueError: could not convert string to float: '0,5'" in verdict.sentence
    assert "in thread producer" in verdict.sentence
    assert verdict.sure is Sure.LIKELY


def test_sys_exit_in_the_loop_leaves_its_line(folder, script):
    trainer = script(folder, TRAINING.format(deed="sys.exit()"))
    assert trainer.wait() == 0
    wait_for_keeper_gone(folder)
    verdict = judge(gather_run(folder))
    assert verdict.cause is Cause.LYING_STATUS, verdict
    assert "in break_down, with status 0" in verdict.sentence
