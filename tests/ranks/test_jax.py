"""Two processes of jax.distributed are two ranks of one run, and hold parts of its arrays."""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.ports import free_port
from tests.ranks.jobs import common_step
from tests.support import Trainer, environment, wait_for_keeper_gone, wait_until

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs JAX: pip install 'holdfast[jax]'", allow_module_level=True)

_TRAIN = Path(__file__).parent / "jax_train.py"
_TOTAL = 60


class Jobs:
    """Starts lives of a job, and ends what is left of them."""

    def __init__(self) -> None:
        self._started: list[Trainer] = []

    def start(self, folder: Path, total: int = _TOTAL, size: int = 2) -> list[Trainer]:
        devices = 4 // size
        told = environment(
            JAX_PLATFORMS="cpu",
            XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
        )
        port = free_port()
        ranks = [
            Trainer(folder, total, port, rank, size, script=_TRAIN, env=told)
            for rank in range(size)
        ]
        self._started += ranks
        return ranks

    def end(self) -> None:
        for trainer in self._started:
            trainer.end()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    yield started
    started.end()


def _left_at(trainer: Trainer) -> int:
    return int(next(line for line in trainer.lines if line.startswith("left ")).split()[1])


@pytest.mark.timeout(300)  # nine processes that import JAX, one after the other
def test_stopped_and_killed_it_ends_with_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    expected = [rank.state_hash() for rank in jobs.start(tmp_path / "whole")]
    folder = tmp_path / "cut"

    ranks = jobs.start(folder)
    ranks[1].wait_for("step 5\n")
    ranks[1].send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [143, 143], ranks[0].output
    assert _left_at(ranks[0]) == _left_at(ranks[1]) < _TOTAL

    ranks = jobs.start(folder)
    step = ranks[0].ready()
    assert step == _left_at_of(folder)
    wait_until(lambda: (common_step(folder, 2) or 0) > step, 30, "a snapshot that both hold")
    ranks[1].kill()
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait(110) != 0, ranks[0].output
    wait_for_keeper_gone(folder)

    ranks = jobs.start(folder)
    assert ranks[0].ready() > step
    assert [rank.state_hash() for rank in ranks] == expected

    _check_export(folder, tmp_path / "out.safetensors", jobs.start(folder, size=1)[0])


def _left_at_of(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))


def _check_export(folder: Path, out: Path, alone: Trainer) -> None:
    """Outside of the job, and for a single process, the parts are one array."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="pip install safetensors")
    subprocess.run(
        [sys.executable, "-m", "holdfast", "export", str(folder), str(out)],
        check=True,
        capture_output=True,
    )
    arrays = safetensors.load_file(out)
    assert arrays["params.rows"].shape == (8, 4)
    assert arrays["keys"].shape == (4, 8)
    assert np.array_equal(arrays["params.bias"].shape, (4,))
    digest = hashlib.sha256()
    for name in ("bias", "both", "columns", "rows"):
        digest.update(arrays[f"params.{name}"].tobytes())
    digest.update(arrays["keys"].tobytes())
    alone.state_hash()
    assert alone.wait_for("whole ").split()[1] == digest.hexdigest()
