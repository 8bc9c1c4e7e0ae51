"""Fixtures: run folders, trainers that never outlive their test, and a reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.everywhere.lives import Frameworks
from tests.fork_server import ForkServer
from tests.support import Trainer, remove_arenas, train_to_the_end

pytest_plugins = ["tests.layers", "tests.recording"]


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `holdfast run` notes of tests is nothing for the person who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_STATE", str(tmp_path_factory.mktemp("state")))
        # A kill leaves nothing; where the waiting arena itself is tested, it is given a time.
        patch.setenv("HOLDFAST_KEEP_MEMORY", "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run whose trainer and keeper are killed leaves its arena for the next start."""
    yield
    remove_arenas(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks scripts; the first one for each framework starts a process."""
    server = support.fork_server = ForkServer()
    yield server
    support.fork_server = None
    server.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder on a disk, for what is about one: tmp_path is memory in `make test`."""
    with tempfile.TemporaryDirectory(
        prefix="holdfast-", dir="/var/tmp", ignore_cleanup_errors=True
    ) as place:
        yield Path(place)
        remove_arenas(Path(place))


@pytest.fixture
def start() -> Iterator[Callable[..., Trainer]]:
    """Start a training script; whatever still runs at the end of the test is ended."""
    started: list[Trainer] = []

    def begin(*arguments: Any, **options: Any) -> Trainer:
        started.append(Trainer(*arguments, **options))
        return started[-1]

    yield begin
    for trainer in started:
        trainer.end()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The final hash of an undisturbed training to a given total, made once each."""
    known: dict[int, str] = {}

    def find(total: int) -> str:
        if total not in known:
            known[total] = train_to_the_end(
                tmp_path_factory.mktemp("reference") / "run", "--total", total
            )
        return known[total]

    return find


@pytest.fixture(scope="session")
def frameworks(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Frameworks]:
    """Starts trainings of every framework, with the environment that all of them need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        # What one life has compiled, the next one need not: it is most of what a life takes.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        patch.setenv("KERAS_BACKEND", "tensorflow")
        yield Frameworks(fork_server)
