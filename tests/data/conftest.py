"""Fixtures: the undisturbed training of each kind of loader."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.data.lives import Line, Training
from tests.fork_server import ForkServer


@pytest.fixture(scope="module")
def undisturbed(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[list[Line], dict[str, str]]]:
    """The lines and the final hashes of a training that nobody interrupts, made once a kind."""
    known: dict[str, tuple[list[Line], dict[str, str]]] = {}

    def find(kind: str) -> tuple[list[Line], dict[str, str]]:
        if kind not in known:
            training = Training(fork_server, kind, tmp_path_factory.mktemp(kind), {})
            life = training.begin()
            assert life.wait(225) == 0, life.output
            (lines,) = training.lines_by_life()
            known[kind] = lines, training.result()
        return known[kind]

    return find
