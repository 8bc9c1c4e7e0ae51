"""Fixtures: a stage for a death, and the processes that are on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import cgroups
from tests.crash.small_disk import mount_small_disk
from tests.deaths.stage import LIMIT_BYTES, RANKS_LIMIT_BYTES, TORCH_LIMIT_BYTES, Stage
from tests.deaths.table import Death
from tests.ordinary_user import UID, home_of_user, why_no_user

_LIMITS = {
    "cgroup": LIMIT_BYTES,
    "large cgroup": TORCH_LIMIT_BYTES,
    "ranks cgroup": RANKS_LIMIT_BYTES,
}
Stages = Callable[[Death], Stage]
_disk = contextlib.contextmanager(mount_small_disk)


@contextlib.contextmanager
def _set(stage: Stage, death: Death, owner: int) -> Iterator[Stage]:
    """Make what the death needs; the test is skipped where that cannot be made."""
    with contextlib.ExitStack() as needs:
        if death.needs in _LIMITS:
            reason = cgroups.why_not()
            if reason is not None:
                pytest.skip(reason)
            needs.enter_context(stage.limited(_LIMITS[death.needs]))
        elif death.needs == "small disk":
            stage.place = stage.home / "disk"
            needs.enter_context(
                contextlib.contextmanager(mount_small_disk)(
                    stage.place, f"2m,mode=1777,uid={owner}"
                )
            )
        elif death.needs == "small shm":
            stage.small_shm("3m")
        try:
            yield stage
        finally:
            stage.end()


@pytest.fixture
def on_stage(tmp_path: Path) -> Iterator[Stages]:
    """Set the stage for a death, as whoever runs the tests."""
    with contextlib.ExitStack() as stages:
        yield lambda death: stages.enter_context(_set(Stage(tmp_path), death, 0))


@pytest.fixture
def on_users_stage() -> Iterator[Stages]:
    """Set the stage for a death, as a user that is not root."""
    reason = why_no_user()
    if reason is not None:
        pytest.skip(reason)
    with home_of_user() as home, contextlib.ExitStack() as stages:
        yield lambda death: stages.enter_context(_set(Stage(home, is_user=True), death, UID))
