"""Fixtures: a SLURM of our own for this folder, and no job that outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, what_is_missing


def pytest_runtest_setup() -> None:
    # Here and not in the fixture, so that the report has one line for the whole folder.
    if missing := what_is_missing():
        pytest.skip(missing)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster, the same for all tests of this process."""
    running = Cluster()
    running.start()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()
