"""A run that an older version has left goes on to the same bits.

`old_runs` was written by version 0.1.0 with `tests/scripts/exact.py`: stopped at step 13 of 30, and
two ranks a little later. Never write it again: a new format gets a folder of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import SCRIPTS, checkpoint_steps, environment

OLD_RUNS = Path(__file__).with_name("old_runs")


def _train(fork_server, folder, kind, tmp_path):
    """Train to the end; the steps at which the ranks began, and their hashes."""
    outputs = [tmp_path / f"{folder.name}.{rank}" for rank in range(2 if kind == "ranks" else 1)]
    lives = []
    for rank, output in enumerate(outputs):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2"} if kind == "ranks" else {}
        lives.append(
            fork_server.start(
                *(SCRIPTS / "exact.py", str(folder), kind),
                output=output,
                env=environment(**variables),
                framework="torch" if kind == "torch" else "numpy",
            )
        )
    statuses = [life.wait(60) for life in lives]
    texts = [output.read_text() for output in outputs]
    assert set(statuses) == {0}, texts
    words = [text.split() for text in texts]
    began = [int(each[each.index("ready") + 1]) for each in words]
    return began, [each[each.index("hash") + 1] for each in words]


@pytest.mark.parametrize("kind", ["numpy", "torch", "ranks"])
def test_it_goes_on_to_the_same_bits(fork_server, kind, tmp_path):
    folder = shutil.copytree(OLD_RUNS / kind, tmp_path / "run")
    if kind == "ranks":
        (folder / "run.key").chmod(0o600)  # as it was; git does not keep that
    (step,) = checkpoint_steps(folder)
    began, hashes = _train(fork_server, folder, kind, tmp_path)
    assert set(began) == {step}
    _, undisturbed = _train(fork_server, tmp_path / "undisturbed", kind, tmp_path)
    assert hashes == undisturbed
