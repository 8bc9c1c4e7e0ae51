"""A crowded machine: forty processes that never stop to compute."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.hangs.stage import Stage

# Forty in all, also where several tests run at once.
SPINNERS = 40 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Each looks now and then whether the tests are still there: they may have been killed.
_SPIN = "while kill -0 $PPID 2>/dev/null; do n=0; while [ $n -lt 50000 ]; do n=$((n+1)); done; done"


@contextlib.contextmanager
def crowded(count: int = SPINNERS) -> Iterator[list[int]]:
    """So many processes that spin, each in a session of its own; by their pids."""
    spinners: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            # Where the kernel shares cores out by session, one session would be one competitor.
            spinners.append(subprocess.Popen(["sh", "-c", _SPIN], start_new_session=True))
        yield [each.pid for each in spinners]
        assert all(each.poll() is None for each in spinners), "the machine was not crowded"
    finally:
        for each in spinners:
            each.kill()
        for each in spinners:
            each.wait()


@pytest.fixture
def crowd() -> Callable[[], AbstractContextManager[list[int]]]:
    """Crowd the machine for a part of a test."""
    return crowded


@pytest.fixture
def load() -> Iterator[list[int]]:
    """Crowd the machine for all of a test."""
    with crowded() as pids:
        yield pids


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Where a hang takes place."""
    found = Stage(tmp_path)
    yield found
    found.end()
