"""Fixtures: a run folder for jobs, and the undisturbed training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.ranks.jobs import Jobs


@pytest.fixture
def jobs(fork_server: ForkServer, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(fork_server, tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="session")
def undisturbed(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[str]]:
    """The final hashes of a training that nobody interrupts, made once of each kind."""
    known: dict[tuple[Any, ...], list[str]] = {}

    def find(world: int = 2, **plan: Any) -> list[str]:
        key = (world, *sorted(plan.items()))
        if key not in known:
            made = Jobs(fork_server, tmp_path_factory.mktemp("undisturbed"))
            known[key] = made.start(world, pauses=0.0, **plan).hashes()
        return known[key]

    return find
