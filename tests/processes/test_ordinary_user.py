"""Everything works for a user that is not root, and strangers cannot slip in an arena."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast._store.memory.arena import Arena
from tests.ordinary_user import UID, as_user, home_of_user, why_no_user
from tests.processes.conftest import EAGER
from tests.support import (
    SHM,
    Trainer,
    arena_files,
    checkpoint_steps,
    environment,
    keepers,
    run_id,
    wait_for_keeper_gone,
    wait_until,
)

_ODD = ("symlink", "readable by all")
_HELD = ("--total", 40, "--hold-at", 8, "--sleep", 0.06, "--settings", EAGER)

_reason = why_no_user()
pytestmark = pytest.mark.skipif(_reason is not None, reason=_reason or "")


@pytest.fixture
def home() -> Iterator[Path]:
    with home_of_user() as path:
        yield path


@pytest.fixture
def folder(home: Path) -> Path:
    return home / "run"


@pytest.fixture
def user(home: Path, light: Callable[..., Trainer]) -> Callable[..., Trainer]:
    """Start the light training as the ordinary user."""
    of_user = environment(HOME=str(home), PYTHONDONTWRITEBYTECODE="1")

    def begin(*arguments: object) -> Trainer:
        return light(*arguments, prefix=as_user(), env=of_user, cwd=home)

    return begin


def test_killed_stopped_and_resumed_it_trains_to_the_same_bits(folder, gate, user, light_reference):
    first = user(folder, *_HELD)
    in_memory = int(first.wait_for("holding").split()[1])
    pids = [first.pid, keepers(folder)[0].pid]
    assert [Path(f"/proc/{pid}").stat().st_uid for pid in pids] == [UID, UID]
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [in_memory]
    second = user(folder, "--total", 40, "--hold-at", 12)
    assert second.ready() == in_memory
    second.wait_for("holding")
    second.send(signal.SIGTERM)
    second.wait_for("SIGTERM: step 13")
    gate.touch()
    assert second.wait() == 143
    assert checkpoint_steps(folder)[-1] == 13
    third = user(folder, "--total", 40)
    assert third.ready() == 13
    assert third.state_hash() == light_reference(40)
    assert arena_files(folder) == []


def test_an_arena_is_for_its_user_alone(folder, user):
    trainer = user(folder, *_HELD)
    trainer.wait_for("holding")
    (path,) = arena_files(folder)
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, UID)


def _next_arena(folder: Path, attempt: int) -> Path:
    return SHM / f"holdfast-{UID}-{run_id(folder)}-a{attempt}-g1"


@pytest.mark.parametrize("how", [pytest.param("file", marks=pytest.mark.nightly), "symlink"])
def test_what_a_stranger_has_put_at_the_arenas_path_is_neither_used_nor_followed(
    folder, home, user, light_reference, how
):
    first = user(folder, "--total", 8)
    assert first.wait() == 0
    planted = _next_arena(folder, 2)
    target = home / "target"
    target.write_bytes(b"precious")
    os.chown(target, UID, UID)
    try:
        if how == "file":
            planted.write_bytes(b"planted")
            planted.chmod(0o666)
        else:
            planted.symlink_to(target)
        second = user(folder, "--total", 40, "--hold-at", 16, *_HELD[4:])
        assert second.ready() == 8
        in_memory = int(second.wait_for("holding").split()[1])
        assert in_memory > 8
        second.kill()
        second.wait()
        wait_for_keeper_gone(folder)
        assert checkpoint_steps(folder)[-1] == in_memory
        assert target.read_bytes() == b"precious"
        assert planted.is_symlink() if how == "symlink" else planted.read_bytes() == b"planted"
        third = user(folder, "--total", 40)
        assert third.state_hash() == light_reference(40)
    finally:
        planted.unlink()


def _is_copied(path, copy):
    """With the checksums of its newest slot: without them it is not resumed from."""
    shutil.copyfile(path, copy)
    copy.chmod(0o600)
    with Arena(os.open(copy, os.O_RDWR)) as arena:
        newest = arena.newest()
        return newest is not None and newest.is_hashed


@pytest.mark.parametrize(
    "how",
    [
        "its own",
        "file of a stranger",
        *(pytest.param(how, marks=pytest.mark.nightly) for how in _ODD),
    ],
)
def test_only_a_private_plain_file_of_its_own_is_resumed_from(
    folder, home, user, light_reference, how
):
    """Root plays the stranger: it copies a true arena to where the next start looks."""
    first = user(folder, *_HELD)
    in_memory = int(first.wait_for("holding").split()[1])
    (true,) = arena_files(folder)
    copy = home / "copy"
    wait_until(lambda: _is_copied(true, copy), what="the checksums of the newest slot")
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    shutil.rmtree(folder / "checkpoints")  # else the state on disk is as new
    (folder / "checkpoints").mkdir()
    os.chown(folder / "checkpoints", UID, UID)
    copy.chmod(0o644 if how == "readable by all" else 0o600)
    if how != "file of a stranger":
        os.chown(copy, UID, UID)
    try:
        if how == "symlink":
            true.symlink_to(copy)
        else:
            shutil.copy2(copy, true)
            owner = copy.stat()
            os.chown(true, owner.st_uid, owner.st_gid)
        second = user(folder, "--total", 40)
        assert second.ready() == (in_memory if how == "its own" else 0)
        assert second.state_hash() == light_reference(40)
    finally:
        true.unlink(missing_ok=True)
