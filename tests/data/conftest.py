"""Fixtures: the zygote, and the undisturbed training of each kind of loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.data.lives import Line, Training, Zygote
from tests.support import wait_until


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Forks trainings; at its end nothing that they started is left."""
    found = Zygote()
    yield found
    found.end()
    # A worker looks every few seconds whether its trainer still lives.
    wait_until(lambda: not found.processes(), 30, "the end of all workers")


@pytest.fixture(scope="module")
def undisturbed(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[list[Line], dict[str, str]]]:
    """The lines and the final hashes of a training that nobody interrupts, made once a kind."""
    known: dict[str, tuple[list[Line], dict[str, str]]] = {}

    def find(kind: str) -> tuple[list[Line], dict[str, str]]:
        if kind not in known:
            training = Training(zygote, kind, tmp_path_factory.mktemp(kind), {})
            life = training.begin()
            assert life.wait(90) == 0, life.output
            (lines,) = training.lines_by_life()
            known[kind] = lines, training.result()
        return known[kind]

    return find
