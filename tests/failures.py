"""A plugin that notes which tests have failed when a session ends: see tools/once-more."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures-to", type=Path, help="a file for the names of tests that failed")


def pytest_configure(config: pytest.Config) -> None:
    # With xdist its controller hears of all tests; a worker would note its own alone.
    if config.getoption("--failures-to") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config.getoption("--failures-to")))


class _Failures:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, None] = {}
        path.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._names[report.nodeid] = None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # An interrupt, or tests that could not be collected, are no failure of tests.
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._path.write_text("".join(f"{name}\n" for name in self._names))
