"""`holdfast stop` and `holdfast save`: asked through files, from another process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.cli.command import (
    FEW,
    TRAIN_NUMPY,
    holdfast,
    holdfast_process,
    output_of,
    status_of,
    succeed,
)
from tests.support import (
    SCRIPTS,
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"


def training(start, folder, *arguments, sleep=0.01):
    trainer = start(folder, "--sleep", sleep, "--settings", FEW, *arguments, script=TRAIN_NUMPY)
    trainer.ready()
    return trainer


def test_stop_asks_and_returns_at_once(folder, start):
    trainer = training(start, folder, sleep=2)
    shown = succeed("stop", folder, "--reason", "the node is needed")
    assert f"asked to stop (attempt 1, pid {trainer.pid} on " in shown
    assert f"To look: holdfast status {folder}" in shown
    assert trainer.process.poll() is None
    assert trainer.wait() == 130
    assert "the node is needed (by " in status_of(folder)["last_exit"]["how"]


def test_stop_wait_returns_when_the_step_is_durable_and_the_process_gone(folder, start):
    trainer = training(start, folder)
    shown = succeed("stop", folder, "--wait")
    assert trainer.process.wait(5) == 130
    (step,) = checkpoint_steps(folder)
    assert shown.endswith(f": stopped; step {step} is durable.\n")
    assert status_of(folder)["step"] == step


def test_stop_now_leaves_in_the_middle_of_a_step(folder, start):
    trainer = training(start, folder, sleep=0.4)
    wait_until(lambda: status_of(folder)["memory_step"])
    shown = succeed("stop", folder, "--now", "--wait", "--reason", "fire")
    assert "leaves at once" in shown
    assert trainer.wait() == 130
    wait_for_keeper_gone(folder)
    found = status_of(folder)
    assert found["state"] == "stopped"
    assert "stop --now: fire (by " in found["last_exit"]["how"]
    assert found["disk_step"] > 0


def test_a_run_that_was_found_stuck_is_durable_and_stop_names_the_way_that_ends_it(
    folder, start, tmp_path
):
    settings = '{"max_overhead": 1.0, "hang_timeout": 1.0}'
    trainer = start(
        *(folder, "--total", 40, "--hold-at", 8, "--sleep", 0.06, "--gate", tmp_path / "gate"),
        *("--settings", settings),
        script=LIGHT,
    )
    in_memory = int(trainer.wait_for("holding").split()[1])
    wait_until(lambda: journal_events(folder, "hang"), 30, "the hang")
    (saved,) = wait_until(lambda: journal_events(folder, "checkpoint"), 30, "the checkpoint")
    assert (saved["step"], saved["reason"]) == (in_memory, "hang")
    wait_until(lambda: status_of(folder)["state"] == "stuck", 30, "the heartbeat")
    assert f"leave now: holdfast stop --now {folder}" in succeed("stop", folder)
    assert trainer.process.poll() is None
    succeed("stop", "--now", folder, "--wait")
    assert trainer.wait() == 130


def test_a_run_that_ends_by_itself_meanwhile_is_told_as_it_is(folder, start, tmp_path):
    gate = tmp_path / "gate"
    trainer = start(folder, "--total", 9, "--hold-at", 8, "--gate", gate, script=LIGHT)
    trainer.wait_for("holding")
    requests = folder / "requests"
    before = requests.stat().st_mtime_ns
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(holdfast_process, "stop", folder, "--wait")
        # The keeper removes a request when it reads it: the folder shows that there was one.
        wait_until(lambda: requests.stat().st_mtime_ns != before, 30, "the request")
        gate.touch()
        assert "finished; step 9 is durable" in output_of(shown.result())
    assert trainer.wait() == 0


def test_save_wait_returns_when_the_checkpoint_is_durable(folder, start):
    trainer = training(start, folder)
    shown = succeed("save", folder, "--wait")
    (step,) = checkpoint_steps(folder)
    assert shown.endswith(f": step {step} is durable.\n")
    assert trainer.process.poll() is None
    assert journal_events(folder, "checkpoint")[-1]["reason"] == "holdfast save"


def test_save_without_wait_says_how_to_look(folder, start):
    training(start, folder)
    assert f"To look: holdfast ls {folder}" in succeed("save", folder)
    wait_until(lambda: checkpoint_steps(folder))


def test_save_wait_ends_with_the_run(folder, start):
    trainer = training(start, folder, sleep=60)
    wait_until(lambda: (folder / "attempts" / "0001" / "heartbeat.json").exists())
    trainer.process.kill()
    done = holdfast("save", folder, "--wait")
    assert done.returncode in (1, 2)  # 2: it was gone before it was asked
    assert "Traceback" not in done.stderr


def test_neither_is_for_a_run_that_has_ended(folder, start):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    for command in ("stop", "save"):
        done = holdfast(command, folder)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == (
            f"{folder}: no process trains here now.\nSee: holdfast status {folder}\n"
        )
