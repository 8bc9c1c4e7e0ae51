"""The time limit: with its warning, without, in the middle of a step, and again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import TRAIN, Training, holdfast, train_undisturbed
from tests.support import journal_events, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), steps=300)


def test_a_bare_python_script_is_linted_fixed_and_survives_its_real_time_limit(
    cluster: Cluster, tmp_path, undisturbed
):
    """One minute, the shortest that SLURM has; the warning comes as SLURM sends it."""
    run = tmp_path / "run"
    script = tmp_path / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH --job-name=bare\n"
        "#SBATCH --time=1\n"
        "#SBATCH --signal=USR2@25\n"
        f"#SBATCH --output={tmp_path}/%j.out\n"
        "\n"
        f"python {TRAIN} {run} 300 0.2\n"
    )
    said = holdfast(cluster, tmp_path, "lint", str(script), status=1)
    assert f"{script}:7: error:" in said
    holdfast(cluster, tmp_path, "lint", "--fix", str(script))
    holdfast(cluster, tmp_path, "lint", str(script))
    training = Training(cluster, run, cluster.sbatch(script, cwd=tmp_path))
    left = wait_until(lambda: _exit(training), 100, "the end of the first minute")
    assert (left["status"], left["how"]) == (75, "SIGUSR2")
    training.wait_until_trained(90)
    assert training.lives[:2] == [0, left["step"]]  # it needs a second minute, or a third
    assert training.log.count("begins at step") == len(training.lives)  # the log is whole
    training.check_equal(undisturbed)


def test_without_a_warning_the_clock_is_watched(cluster: Cluster, tmp_path, undisturbed):
    """A script without --signal, as it may be lost too: the end of the job is known."""
    run = tmp_path / "run"
    text = f"trap : TERM\nsrun holdfast run -- python {TRAIN} {run} 300 0.02"
    job = cluster.sbatch(text, "--time=1", "--open-mode=append", f"--output={tmp_path}/log")
    training = Training(cluster, run, job)
    training.wait_for_step(1)
    left = wait_until(lambda: _exit(training), 100, "the end of the minute")
    assert (left["status"], left["how"]) == (75, "the job's time limit")
    [noted] = journal_events(run, "job-ends")
    assert 10 < noted["seconds_left"] <= 20
    training.wait_until_trained(60)
    training.check_equal(undisturbed)


def _exit(training: Training) -> dict | None:
    path = training.folder / "attempts" / "0001" / "exit.json"
    return training.wait_for_exit() if path.exists() else None
