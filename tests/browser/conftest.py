"""One browser for all tests of a process, run folders to look at, and servers that end."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.browser import Browser, missing
from tests.browser.serving import Ui
from tests.cli.command import PROGRAM
from tests.report_runs import MAKERS, make_long_journal
from tests.support import environment


@pytest.fixture(scope="session")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if (words := missing()) is not None:
        pytest.skip(words)
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """The browser, with nothing of the test before."""
    yield shared_browser
    shared_browser.driver.get("about:blank")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the run folders of tests.report_runs but the long one."""
    folder = tmp_path_factory.mktemp("runs")
    for name, make in MAKERS.items():
        make(folder / name)
    return folder


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose journal has a million lines."""
    return make_long_journal(tmp_path_factory.mktemp("long") / "run")


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """The address of the report of a run, made once."""
    folder = tmp_path_factory.mktemp("reports")

    @functools.cache
    def make(run: Path) -> str:
        path = folder / f"{len(list(folder.iterdir()))}.html"
        command = [str(PROGRAM), "report", str(run), "-o", str(path)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return path.as_uri()

    return make


@pytest.fixture(scope="session")
def runs_ui(runs: Path) -> Iterator[Ui]:
    """A server of those runs, for tests that only look."""
    ui = Ui(runs)
    yield ui
    ui.end()


@pytest.fixture
def serve() -> Iterator[Callable[..., Ui]]:
    """Start `holdfast ui`; it is ended with the test."""
    started: list[Ui] = []

    def begin(folder: Path, *options: str) -> Ui:
        started.append(Ui(folder, *options))
        return started[-1]

    yield begin
    for each in started:
        each.end()
