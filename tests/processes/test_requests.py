"""Asked from another process or another thread: stop, stop now, save."""

from __future__ import annotations

import subprocess
import sys

import pytest

import holdfast
from tests.processes.conftest import EAGER
from tests.support import (
    checkpoint_steps,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
)

_HELD = ("--total", 40, "--hold-at", 8, "--sleep", 0.06, "--settings", EAGER)


def _requests(folder) -> list[str]:
    return [path.name for path in (folder / "requests").iterdir()]


def test_stop_ends_the_step_and_leaves_with_130(folder, gate, light, light_reference):
    trainer = light(folder, *_HELD)
    trainer.wait_for("holding")
    ask = f"import holdfast; holdfast.stop({str(folder)!r}, 'the room is needed')"
    subprocess.run([sys.executable, "-c", ask], check=True)
    said = trainer.wait_for("asked to stop: the room is needed (by ")
    assert "Finishing step 9." in said
    assert trainer.process.poll() is None
    gate.touch()
    assert trainer.wait() == 130
    assert checkpoint_steps(folder)[-1] == 9
    assert "the room is needed" in journal_events(folder, "stop")[0]["reason"]
    assert _requests(folder) == []
    assert light(folder, "--total", 40).state_hash() == light_reference(40)


def test_stop_now_leaves_in_mid_step_with_the_last_snapshot(folder, light, light_reference):
    trainer = light(folder, *_HELD)
    in_memory = int(trainer.wait_for("holding").split()[1])
    holdfast.stop(folder, now=True)
    assert trainer.wait(20) == 130
    assert f"step {in_memory} is durable. Status 130." in trainer.wait_for("leaving at once")
    assert checkpoint_steps(folder) == [in_memory]
    wait_for_keeper_gone(folder)
    again = light(folder, "--total", 40)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40)


def test_stop_now_to_a_keeper_that_starts_late_leaves_with_the_last_snapshot(folder, light):
    trainer = light(folder, *_HELD)
    (keeper,) = wait_until(lambda: keepers(folder), what="the keeper")
    keeper.suspend()  # as on a machine that gives it no processor
    in_memory = int(trainer.wait_for("holding").split()[1])
    holdfast.stop(folder, now=True)
    keeper.resume()
    assert trainer.wait(20) == 130
    assert f"step {in_memory} is durable. Status 130." in trainer.wait_for("leaving at once")
    assert checkpoint_steps(folder) == [in_memory]


def test_save_makes_a_checkpoint_at_the_next_boundary(folder, gate, light, light_reference):
    trainer = light(folder, *_HELD)
    trainer.wait_for("holding")
    holdfast.save(folder)
    wait_until(lambda: journal_events(folder, "request"), what="the keeper's notice")
    assert checkpoint_steps(folder) == []
    gate.touch()
    assert trainer.state_hash() == light_reference(40)
    made = {event["reason"]: event["step"] for event in journal_events(folder, "checkpoint")}
    # The trainer hears of it a moment after the keeper, so at this boundary or the next.
    assert made["holdfast save"] in (9, 10)
    assert _requests(folder) == []


def test_a_request_for_an_earlier_attempt_does_not_stop_the_next(folder, light, light_reference):
    first = light(folder, *_HELD)
    first.wait_for("holding")
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    (folder / "requests/stop-0001.json").write_text('{"by": "late", "reason": "too late"}')
    assert light(folder, "--total", 40).state_hash() == light_reference(40)


def test_a_run_that_is_not_live_cannot_be_asked(folder, light, tmp_path):
    with pytest.raises(holdfast.NotARun, match=r"there is no run here\.\nA run folder is what"):
        holdfast.stop(tmp_path)
    with pytest.raises(holdfast.NotARun, match="there is no run here"):
        holdfast.save(tmp_path / "missing")
    assert light(folder, "--total", 10).wait() == 0
    with pytest.raises(holdfast.FolderError, match="no process trains here now"):
        holdfast.stop(folder)
    with pytest.raises(holdfast.FolderError, match="no process trains here now"):
        holdfast.save(folder)
    assert _requests(folder) == []


def test_a_killed_run_cannot_be_asked(folder, light):
    trainer = light(folder, *_HELD)
    trainer.wait_for("holding")
    trainer.kill()
    trainer.wait()
    with pytest.raises(holdfast.FolderError, match="no process trains here now"):
        holdfast.stop(folder, now=True)


def test_wait_after_the_boundary_returns_the_step_when_it_is_durable(folder, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 8:
                    handle = run.save()
                    print("done at once:", handle.done)
                if step == 9:
                    print("waited for", handle.wait(30))
                    print("there:", sorted(p.name for p in (folder / "checkpoints").iterdir()))
        """,
    )
    assert trainer.wait() == 0, trainer.output
    assert "done at once: False\n" in trainer.lines
    assert "waited for 9\n" in trainer.lines
    assert "there: ['step-000000000009-a0001']\n" in trainer.lines


def test_wait_before_the_boundary_is_refused_with_a_sentence(folder, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 8:
                    try:
                        run.save().wait()
                    except holdfast.HoldfastError as error:
                        print("refused:", error)
        """,
    )
    assert trainer.wait() == 0, trainer.output
    assert "refused: wait() would wait for ever" in trainer.output
    assert "Call it after the boundary, or from another thread.\n" in trainer.lines
    assert "asked" in [event["reason"] for event in journal_events(folder, "checkpoint")]


def test_another_thread_may_ask_and_wait(folder, script):
    trainer = script(
        folder,
        """
        def ask():
            asked.wait()
            print("waited for", run.save().wait(30), flush=True)
            print("there:", sorted(p.name for p in (folder / "checkpoints").iterdir()))
            run.stop("seen")

        asked = threading.Event()
        thread = threading.Thread(target=ask)
        thread.start()
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(500):
                train_one(weights)
                time.sleep(0.02)
                if step == 8:
                    asked.set()
        """,
    )
    assert trainer.wait() == 130, trainer.output
    step = int(trainer.wait_for("waited for").split()[2])
    assert step > 8
    assert f"there: ['step-{step:012d}-a0001']\n" in trainer.lines


def test_a_handle_of_a_run_that_closed_first_says_so(folder, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 8:
                    handle = run.save()
                    break
        try:
            handle.wait(10)
        except holdfast.SaveFailed as error:
            print("refused:", error)
        """,
    )
    assert trainer.wait() == 0, trainer.output
    assert "refused: the checkpoint was not made: the run was closed" in trainer.output
