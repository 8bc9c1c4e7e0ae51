"""A kill while slots get or lose their memory: the newest snapshot that was whole stays whole."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import uuid

import numpy as np
import pytest

from holdfast._store.memory.arena import Arena, used_bytes
from holdfast._store.memory.backing import find_leftovers, open_leftover
from tests.often import few
from tests.support import (
    SCRIPTS,
    arena_files,
    environment,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"
BUILDING = [f"slot-{slot}-{how}" for slot in (0, 1, 2) for how in ("half-built", "built", "added")]
STAGES = (*BUILDING, "slot-dropped", "slot-given-back")
# The newest step that is surely whole at each stage, by tests/scripts/slots_to_kill.py.
WHOLE = {"slot-0": 0, "slot-1": 0, "slot-2": 4, "slot-dropped": 6, "slot-given-back": 6}
STATE_BYTES = 8 * 50_000
# A state for which slots are built in the background.
SIZE, TOTAL = 1_600_000, 40


@contextlib.contextmanager
def left_by(run_id: str):
    """The arena that a killed process has left, and its file removed."""
    (path,) = find_leftovers(run_id)
    try:
        with Arena(open_leftover(path)) as arena:
            yield arena
    finally:
        path.unlink()


def value_in(arena: Arena, slot: int) -> float:
    """The one value of a slot; two values would mean that it is torn."""
    plan = arena.plan(slot)
    (at,) = (
        o for s, o in zip(plan.specs, plan.offsets, strict=True) if s.size_bytes == STATE_BYTES
    )
    (value,) = set(np.frombuffer(arena.image(slot)[at : at + STATE_BYTES]).tolist())
    return value


def run_until(
    run_id: str, script: str = "slots_to_kill.py", **variables: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / script), run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_while_slots_come_and_go_leaves_the_newest_whole_one(stage, tmp_path):
    run_id = uuid.uuid4().hex
    killed = run_until(run_id, HOLDFAST_FAULT=f"{stage}@{tmp_path / 'killed'}")
    output, _ = killed.communicate(timeout=60)
    assert killed.returncode == -9, output
    seen = [int(line.split()[1]) for line in output.splitlines()]
    least = WHOLE.get(stage, WHOLE.get(stage[:6]))
    with left_by(run_id) as arena:
        whole = arena.whole()
        assert max((record.step for record in whole), default=0) >= max([least, *seen])
        for record in whole:
            assert value_in(arena, record.slot) == record.step
        assert {record.slot for record in whole} <= set(arena.present())


@pytest.mark.parametrize(
    "stage",
    few(
        [
            "slot-1-half-built",
            "slot-1-added",
            "slots-half-copied",
            "slots-copied",
            "slots-unshared",
        ],
        ["slot-1-added", "slots-half-copied"],
    ),
)
def test_a_kill_while_frozen_tensors_get_memory_of_their_own_leaves_whole_slots(stage, tmp_path):
    pytest.importorskip("torch")
    run_id = uuid.uuid4().hex
    fault = f"{stage}@{tmp_path / 'killed'}"
    killed = run_until(run_id, "shared_slots_to_kill.py", HOLDFAST_FAULT=fault)
    output, _ = killed.communicate(timeout=60)
    assert killed.returncode == -9, output
    steps = [int(line.split()[1]) for line in output.splitlines()]
    assert steps == ([1] if stage.startswith("slot-1") else [1, 2, 3])
    with left_by(run_id) as arena:
        # The oldest slot may be the one that is about to be written.
        assert arena.newest().step == steps[-1]
        for record in arena.whole():
            plan, image = arena.plan(record.slot), arena.image(record.slot)
            for spec, at in zip(plan.specs, plan.offsets, strict=True):
                data = np.frombuffer(image[at : at + spec.size_bytes], np.float32)
                assert set(data.tolist()) == {0.0 if "base" in spec.name else record.step}
            del image, data


def test_slots_take_one_two_three_and_two_times_the_state():
    run_id = uuid.uuid4().hex
    process = run_until(run_id)
    lines = []
    while lines[-1:] != ["done\n"]:
        lines.append(process.stdout.readline())
        assert lines[-1]
    with left_by(run_id) as arena:
        assert used_bytes(arena.descriptor) < 2.1 * STATE_BYTES
        assert [record.step for record in arena.whole()] == [9, 8]
        process.communicate("", timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("stage", few(BUILDING[:6], ("slot-1-half-built",)))
def test_a_training_killed_while_its_slots_are_built_goes_on_to_the_same_bits(
    stage, folder, tmp_path, start
):
    arguments = ("--total", TOTAL, "--size", SIZE)
    overhead = ("--settings", json.dumps({"max_overhead": 1.0}))
    marker = tmp_path / "killed"
    env = environment(HOLDFAST_FAULT=f"{stage}@{marker}")
    killed = start(folder, *arguments, *overhead, script=LIGHT, env=env)
    wait_until(marker.exists, 60, "the fault")
    assert killed.wait() == -9
    wait_for_keeper_gone(folder)
    after = start(folder, *arguments, *overhead, script=LIGHT)
    found = after.state_hash()
    assert found == train_to_the_end(tmp_path / "undisturbed", *arguments, script=LIGHT)
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
