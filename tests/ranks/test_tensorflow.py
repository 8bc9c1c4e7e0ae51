"""tf.distribute: two replicas in one process, and two workers that TF_CONFIG has made."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.ports import free_port
from tests.ranks.jobs import Job, Jobs
from tests.support import checkpoint_steps, wait_until

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.timeout(300)

_TRAINING = (Path(__file__).with_name("tf_train.py"), "tensorflow")
_EPOCHS = 3  # of 12 steps
_SECONDS = 120.0  # that TensorFlow may take on a busy machine, where nothing else is waited for
_SOON_SECONDS = 10.0


@pytest.fixture
def jobs(fork_server: ForkServer, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(fork_server, tmp_path, *_TRAINING)
    yield made
    made.end()


def begin(jobs: Jobs, kind: str, pauses: float) -> Job:
    """Start one process with two replicas, or two workers with one each."""
    world = 2 if kind == "workers" else 1
    hosts = [f"127.0.0.1:{free_port()}" for _ in range(world)]
    tasks = [{"type": "worker", "index": rank} for rank in range(world)]
    configs = [json.dumps({"cluster": {"worker": hosts}, "task": task}) for task in tasks]
    variables = {rank: {"TF_CONFIG": config} for rank, config in enumerate(configs)}
    return jobs.start(
        world, meets=kind, total=_EPOCHS, pauses=pauses, environment=variables if world > 1 else {}
    )


@pytest.fixture(scope="module")
def undisturbed(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[str]]:
    known: dict[str, list[str]] = {}

    def find(kind: str) -> list[str]:
        if kind not in known:
            made = Jobs(fork_server, tmp_path_factory.mktemp("undisturbed"), *_TRAINING)
            known[kind] = hashes(begin(made, kind, 0.0))
        return known[kind]

    return find


def hashes(job: Job) -> list[str]:
    assert set(job.statuses(_SECONDS)) == {0}, job.outputs
    return job.hashes()


def wait_for_step(job: Job, step: int) -> None:
    for rank in range(len(job.lives)):
        job.wait_for(f"step {step}", rank, _SECONDS)


def check_goes_on(jobs: Jobs, kind: str, step: int, expected: list[str]) -> None:
    jobs.check_nothing_left()
    again = begin(jobs, kind, 0.0)
    assert hashes(again) == expected
    assert set(again.started_at()) == {step}
    jobs.check_nothing_left()


@pytest.mark.parametrize("kind", ["mirrored", "workers"])
def test_a_stop_in_mid_epoch_is_one_step_of_all_and_goes_on_to_the_same_bits(
    jobs, undisturbed, kind
):
    job = begin(jobs, kind, 0.05)
    wait_for_step(job, 15)
    job.send(signal.SIGTERM, len(job.lives) - 1)
    assert set(job.statuses(_SECONDS)) == {143}, job.outputs
    (step,) = set(job.steps_at_the_end())
    assert 15 <= step < 36
    jobs.check_checkpoint(step, len(job.lives))
    check_goes_on(jobs, kind, step, undisturbed(kind))


@pytest.mark.parametrize("kind", [pytest.param("mirrored", marks=pytest.mark.nightly), "workers"])
def test_kill_9_leaves_what_all_hold_and_the_others_leave(jobs, undisturbed, kind):
    job = begin(jobs, kind, 0.05)
    wait_for_step(job, 15)
    wait_until(job.common_step, what="a snapshot that all hold")
    began = time.monotonic()
    job.send(signal.SIGKILL, 0)
    statuses = job.statuses()
    assert time.monotonic() - began < _SOON_SECONDS
    assert statuses == [-9, 75][: len(statuses)], job.outputs
    step = wait_until(lambda: checkpoint_steps(jobs.folder), 10, "the checkpoint")[-1]
    assert 0 < step < 36
    if kind == "workers":
        assert "rank 0 on " in job.said
    check_goes_on(jobs, kind, step, undisturbed(kind))
