"""The time limit: with its warning, without, in the middle of a step, and again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow_disk import slow_disk
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import TRAIN, Training, holdfast, submit, train_undisturbed
from tests.support import journal_events, wait_until

pytestmark = pytest.mark.timeout(240)


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


def _start_near_its_end(cluster: Cluster, tmp_path, before: str = ":") -> Training:
    """A job without --signal that begins to train 28 s before its end."""
    run, begin = tmp_path / "run", tmp_path / "begin"
    text = (
        f"trap : TERM\n{before}\n"
        f"until [ -e {begin} ]; do sleep 0.1; done\n"
        f"srun holdfast run -- python {TRAIN} {run} 300 0.05\n"
    )
    job = cluster.sbatch(text, "--time=1", "--open-mode=append", f"--output={tmp_path}/log")
    cluster.wait(job, "RUNNING")
    cluster.end_in(job, 28)
    begin.touch()
    return Training(cluster, run, job)


def test_without_a_warning_the_clock_is_watched(cluster: Cluster, tmp_path, undisturbed):
    """A script without --signal, as it may be lost too: the end of the job is known."""
    training = _start_near_its_end(cluster, tmp_path)
    left = wait_until(lambda: _exit(training), 60, "the end of the time")
    assert (left["status"], left["how"]) == (75, "the job's time limit")
    [noted] = journal_events(tmp_path / "run", "job-ends")
    assert 10 < noted["seconds_left"] <= 20
    training.wait_until_trained(60)
    training.check_equal(undisturbed)


def test_a_commit_that_is_too_slow_does_not_cost_the_job(cluster: Cluster, tmp_path, undisturbed):
    """On a disk that answers only in the second life; the keeper asks for it before the end."""
    path = slow_disk(tmp_path / "slow", 0)["PYTHONPATH"]
    slow = f"export PYTHONPATH={path} SLOW_DISK_SECONDS=$((${{SLURM_RESTART_COUNT:-0}} ? 0 : 100))"
    training = _start_near_its_end(cluster, tmp_path, slow)
    [requeue] = wait_until(lambda: training.requeues, 60, "the requeue")
    assert requeue["job"] == training.job
    assert training.newest_on_disk == 0
    training.wait_until_trained(90)
    assert cluster.show(training.job)["Restarts"] == "1"
    training.check_equal(undisturbed)


def test_a_step_that_does_not_end_in_time_is_left_and_the_job_comes_back(cluster, tmp_path):
    """The keeper saves the step before it, has the job requeued, and sends the trainer away."""
    run, begin, script = tmp_path / "run", tmp_path / "begin", tmp_path / "long.py"
    long = "        if run.step == 20:\n            time.sleep(500)\n"
    script.write_text(TRAIN.read_text().replace("        weights *=", f"{long}        weights *="))
    text = f"until [ -e {begin} ]; do sleep 0.1; done\nsrun holdfast run -- python {script} {run}"
    job = cluster.sbatch(f"trap : TERM\n{text} 30 0.02", "--time=1", f"--output={tmp_path}/log")
    cluster.wait(job, "RUNNING")
    cluster.end_in(job, 28)
    begin.touch()
    training = Training(cluster, run, job)
    left = wait_until(lambda: _exit(training), 60, "the end of the time")
    step = left["durable_step"]
    assert left["status"] == 75
    assert 15 <= step <= 20  # the newest snapshot
    assert cluster.show(job)["Restarts"] == "1"
    training.wait_for_step(step, attempt=2)
    assert training.lives == [0, step]


def test_a_job_that_makes_no_step_does_not_circle_for_ever(cluster, tmp_path):
    run, script = tmp_path / "run", tmp_path / "stuck.py"
    script.write_text(
        "import sys, time, holdfast\n"
        "settings = holdfast.Settings(requeue_limit=1)\n"
        "with holdfast.Run(sys.argv[1], settings=settings, count=0) as run:\n"
        "    print('attempt', run.attempt, 'is here', flush=True)\n"
        "    time.sleep(500)\n"
        "    for _ in run.steps(3):\n"
        "        pass\n"
    )
    job = submit(cluster, tmp_path, command=["python", str(script), str(run)])
    for attempt in (1, 2):
        cluster.wait_for_log(job, f"attempt {attempt} is here")
        cluster.scancel(job, "-s", "USR2")
    assert cluster.wait(job) == "FAILED"
    assert cluster.show(job)["ExitCode"] == "76:0"
    assert "has come back 1 time without a new step" in cluster.log(job)
    assert [each["idle"] for each in journal_events(run, "requeue")] == [1, 2]


def _exit(training: Training) -> dict | None:
    path = training.folder / "attempts" / "0001" / "exit.json"
    return training.wait_for_exit() if path.exists() else None
