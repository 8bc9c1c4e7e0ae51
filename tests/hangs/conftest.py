"""Fixtures: a stage for a hang, the processes that are on it, and torch imported once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.lives import Zygote
from tests.hangs.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    found = Stage(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks hangs of torch, and of ranks."""
    found = Zygote("tests.hangs.zygote")
    yield found
    found.end()
