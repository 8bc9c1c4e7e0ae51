"""Fixtures: the zygote, a run folder for jobs, and the undisturbed training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.lives import Zygote
from tests.ranks.jobs import Jobs
from tests.support import wait_until


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks ranks; at its end nothing that they started is left."""
    found = Zygote("tests.ranks.zygote")
    yield found
    found.end()
    wait_until(lambda: not found.processes(), 30, "the end of all ranks")


@pytest.fixture
def jobs(zygote: Zygote, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(zygote, tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="session")
def undisturbed(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[str]]:
    """The final hashes of a training that nobody interrupts, made once of each kind."""
    known: dict[tuple[Any, ...], list[str]] = {}

    def find(world: int = 2, **plan: Any) -> list[str]:
        key = (world, *sorted(plan.items()))
        if key not in known:
            made = Jobs(zygote, tmp_path_factory.mktemp("undisturbed"))
            known[key] = made.start(world, pauses=0.0, **plan).hashes()
        return known[key]

    return find
