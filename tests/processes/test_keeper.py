"""The keeper: small, apart from the trainer, replaced when it dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import open_leftover
from tests.processes.conftest import EAGER
from tests.support import (
    arena_files,
    checkpoint_steps,
    journal_events,
    keepers,
    kill_both,
    wait_for_keeper_gone,
    wait_until,
)

_HELD = ("--total", 40, "--hold-at", 8, "--sleep", 0.06, "--settings", EAGER)


def _memory_mb(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 1024 for name in fields if name.startswith("Rss")}


@pytest.mark.nightly
def test_its_own_memory_stays_under_40_mb_while_it_saves_50_mb(folder, light):
    settings = '{"checkpoint_every": 1}'
    trainer = light(folder, "--size", 6_250_000, "--total", 1000, "--settings", settings)
    trainer.ready()
    keeper = wait_until(lambda: keepers(folder))[0]
    most = dict.fromkeys(("RssAnon", "RssFile", "RssShmem"), 0.0)

    def saved_five() -> bool:
        for name, size in _memory_mb(keeper.pid).items():
            most[name] = max(most[name], size)
        return len(journal_events(folder, "checkpoint")) >= 5

    wait_until(saved_five, 60, "five checkpoints")
    assert most["RssShmem"] > 45  # it is the one that reads the slots
    assert most["RssAnon"] + most["RssFile"] < 40


def test_it_loads_neither_numpy_nor_a_framework(folder, gate, light):
    trainer = light(folder, *_HELD)
    trainer.wait_for("holding")
    maps = Path(f"/proc/{keepers(folder)[0].pid}/maps").read_text()
    assert "python" in maps
    assert "numpy" not in maps
    assert "torch" not in maps
    assert "numpy" in Path(f"/proc/{trainer.pid}/maps").read_text()
    look = "import sys, holdfast._keeper.__main__; print(*{m.split('.')[0] for m in sys.modules})"
    found = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "holdfast" in found
    assert not {"numpy", "torch", "psutil", "rich", "click"} & set(found)


def test_it_has_a_session_and_standard_streams_of_its_own(folder, gate, light):
    trainer = light(folder, *_HELD)
    trainer.wait_for("holding")
    keeper = keepers(folder)[0]
    assert os.getsid(keeper.pid) == keeper.pid != os.getsid(trainer.pid)
    streams = [str(Path(f"/proc/{keeper.pid}/fd/{number}").readlink()) for number in range(3)]
    log = str(folder / "attempts/0001/keeper.log")
    assert streams == ["/dev/null", log, log]


def test_a_reader_of_the_trainers_output_sees_its_end_while_the_keeper_lives(folder, light):
    trainer = light(folder, *_HELD)
    in_memory = int(trainer.wait_for("holding").split()[1])
    keeper = keepers(folder)[0]
    keeper.suspend()
    try:
        trainer.kill()
        trainer.process.wait()
        trainer._reader.join(10)
        assert not trainer._reader.is_alive()
        assert keeper.is_running()
    finally:
        keeper.resume()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [in_memory]


def test_a_killed_keeper_is_replaced_and_the_next_one_saves_as_well(
    folder, gate, light, light_reference
):
    held = ("--hold-at", 8, 60)
    trainer = light(folder, "--total", 100, *held, "--sleep", 0.03, "--settings", EAGER)
    trainer.wait_for("holding")
    (first,) = keepers(folder)
    assert arena_files(folder)
    first.kill()
    gate.touch()
    said = trainer.wait_for("started another (pid ")
    assert f"the keeper (pid {first.pid}) was killed by SIGKILL" in said
    holding = wait_until(lambda: re.findall(r"^holding (\d+)$", trainer.output, re.MULTILINE)[1:])
    in_memory = int(holding[0])
    (second,) = [keeper for keeper in keepers(folder) if keeper.pid != first.pid]
    assert f"(pid {second.pid})" in said
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [in_memory]
    assert arena_files(folder) == []
    again = light(folder, "--total", 100)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(100)


def test_an_order_that_a_killed_keeper_had_is_carried_out_by_the_next(folder, gate, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(1000):
                train_one(weights)
                time.sleep(0.02)
                if step == 8:
                    show_holding(run)
                    wait_for(gate)
                    handle = run.save()
                if step > 8 and handle.done:
                    print("saved", handle.wait(), flush=True)
                    run.stop()
        """,
    )
    trainer.wait_for("holding")
    keeper = keepers(folder)[0]
    keeper.suspend()  # it will hear the order and never carry it out
    gate.touch()
    wait_until(lambda: journal_events(folder) and keeper.status() == psutil.STATUS_STOPPED)
    keeper.kill()
    assert trainer.wait() == 130
    assert "saved 9\n" in trainer.lines
    assert 9 in checkpoint_steps(folder)


def test_when_both_are_killed_the_next_start_goes_on_from_memory(folder, light, light_reference):
    trainer = light(folder, *_HELD)
    in_memory = int(trainer.wait_for("holding").split()[1])
    (path,) = arena_files(folder)
    descriptor = open_leftover(path)
    assert descriptor is not None
    with Arena(descriptor) as arena:
        wait_until(lambda: arena.newest().is_hashed, what="the checksums")
    kill_both(folder, trainer)
    assert checkpoint_steps(folder) == []
    assert arena_files(folder) == [path]
    again = light(folder, "--total", 40)
    assert again.ready() == in_memory
    assert f"resumed at step {in_memory} from memory" in again.output
    assert again.state_hash() == light_reference(40)
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    assert "salvaged" in [event["reason"] for event in journal_events(folder, "checkpoint")]


def test_an_old_snapshot_is_not_saved_after_checkpoints_that_the_trainer_wrote(folder, script):
    trainer = script(
        folder,
        """
        from holdfast._run.driver import session_of

        weights, handle = make_weights(), None
        with holdfast.Run(folder, weights=weights) as run:
            saver = session_of(run).saver
            for step in run.steps(100_000):
                train_one(weights)
                if handle is not None:
                    print("made", handle.step)
                    os.kill(os.getpid(), signal.SIGKILL)
                if saver.newest is not None and saver.newest.step < step:
                    saver.snapshots._builder.impossible = True  # as if memory had run out
                    handle = run.save()  # made at the next boundary
        """,
    )
    written = int(trainer.wait_for("made").split()[1])
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert json.loads((folder / "attempts/0001/exit.json").read_text())["durable_step"] == written
    assert journal_events(folder, "checkpoint")[-1]["step"] == written


def test_children_that_outlive_a_killed_trainer_do_not_delay_its_notice(folder, script):
    """A forked child holds copies of every descriptor, so no pipe would tell of the death."""
    trainer = script(
        folder,
        """
        weights = make_weights()
        settings = holdfast.Settings(max_overhead=1.0)
        with holdfast.Run(folder, settings=settings, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                time.sleep(0.06)
                if step == 8:
                    child = os.fork()
                    if child == 0:
                        os.close(1)
                        os.close(2)
                        time.sleep(120)
                        os._exit(0)
                    print("the helper:", child, flush=True)
                    show_holding(run)
                    wait_for(gate)
        """,
    )
    in_memory = int(trainer.wait_for("holding").split()[1])
    child = psutil.Process(int(trainer.wait_for("the helper:").split()[2]))
    try:
        trainer.kill()
        trainer.wait()
        wait_for_keeper_gone(folder, 15)
        assert child.is_running()
        assert child.status() != psutil.STATUS_ZOMBIE
    finally:
        child.kill()
    assert checkpoint_steps(folder) == [in_memory]
    assert journal_events(folder, "death")[0]["durable_step"] == in_memory


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stray_signal_does_not_end_it(folder, gate, light, number):
    trainer = light(folder, *_HELD)
    trainer.wait_for("holding")
    keeper = keepers(folder)[0]
    keeper.send_signal(number)
    gate.touch()
    assert trainer.wait() == 0
    assert "started another" not in trainer.output
