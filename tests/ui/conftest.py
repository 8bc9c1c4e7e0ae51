"""Servers that never outlive their test."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ui.made_runs import make_run
from tests.ui.server import INSTALL, Ui

pytest.importorskip("starlette", reason=INSTALL)
pytest.importorskip("uvicorn", reason=INSTALL)


@pytest.fixture
def serve() -> Iterator[Callable[..., Ui]]:
    started: list[Ui] = []

    def begin(folder: Path, *arguments: str, host: str = "127.0.0.1") -> Ui:
        started.append(Ui(folder, *arguments, host=host))
        return started[-1]

    yield begin
    for each in started:
        each.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    """One server over two runs, for tests that change nothing; a secret stands beside the runs."""
    base = tmp_path_factory.mktemp("served")
    (base / "secret.txt").write_text("TOP SECRET")
    for name in ("a", "group/b"):
        make_run(base / "runs" / name)
    server = Ui(base / "runs")
    yield server
    server.end(signal.SIGKILL)
