"""A run of one process as a job: whatever ends the job, the run comes back, or stays cancelled."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    SECONDS,
    STEPS,
    TRAIN,
    Training,
    holdfast,
    submit,
    train_undisturbed,
)
from tests.support import wait_until


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))


def test_the_warning_is_answered_and_the_job_comes_back(cluster: Cluster, tmp_path, undisturbed):
    training = Training.submit(cluster, tmp_path)
    training.wait_for_step(20)
    shown = holdfast(cluster, tmp_path, "status", "run")
    assert f"job {training.job}, 10 min left; SLURM warns 2 min before the end" in shown
    cluster.scancel(training.job, "-s", "USR2")
    left = training.wait_for_exit()
    assert (left["status"], left["how"]) == (75, "SIGUSR2")
    assert training.newest_on_disk == left["step"] >= 20
    shown = holdfast(cluster, tmp_path, "status", "run")
    assert f"job {training.job} is requeued and goes on by itself" in shown
    training.wait_until_trained()
    assert training.lives == [0, left["step"]]
    assert len(training.requeues) == 1
    assert f"job {training.job}, restarted 1 time" in holdfast(cluster, tmp_path, "status", "run")
    training.check_equal(undisturbed)


def test_what_an_operator_requeues_goes_on(cluster: Cluster, tmp_path, undisturbed):
    training = Training.submit(cluster, tmp_path)
    training.wait_for_step(20)
    cluster.requeue(training.job)
    left = training.wait_for_exit()
    assert (left["status"], left["how"]) == (75, "requeued by SLURM")
    training.wait_until_trained()
    assert training.lives == [0, left["step"]]
    assert cluster.show(training.job)["Restarts"] == "1"  # and not once more by us
    training.check_equal(undisturbed)


def test_what_is_cancelled_is_saved_and_stays_cancelled(cluster: Cluster, tmp_path):
    training = Training.submit(cluster, tmp_path)
    training.wait_for_step(20)
    cluster.scancel(training.job)
    left = training.wait_for_exit()
    assert (left["status"], left["how"]) == (143, "scancel")
    assert training.newest_on_disk == left["step"]
    assert cluster.wait(training.job) == "CANCELLED"
    wait_until(lambda: cluster.is_over(training.job))
    assert training.requeues == []
    assert cluster.show(training.job)["Restarts"] == "0"


def test_a_cancel_in_the_middle_of_the_answer_to_a_warning_counts(cluster: Cluster, tmp_path):
    """Else it would be a job that nobody can cancel."""
    # A step outlasts two calls of scancel on a busy machine.
    training = Training.submit(cluster, tmp_path, seconds=6.0)
    training.wait_for_step(1)
    cluster.scancel(training.job, "-s", "USR2")
    cluster.wait_for_log(training.job, "SIGUSR2: step")
    cluster.scancel(training.job)
    left = training.wait_for_exit()
    assert left["status"] == 143
    assert training.newest_on_disk == left["step"]
    assert cluster.wait(training.job) == "CANCELLED"
    assert "is cancelled, and stays so" in training.log


@pytest.mark.parametrize(
    ("partition", "how"),
    [
        ("low", "requeued by SLURM"),
        ("lowgrace", "preempted by SLURM"),
        ("lowcancel", "preempted by SLURM"),
    ],
)
def test_what_is_preempted_comes_back(cluster: Cluster, tmp_path, undisturbed, partition, how):
    """With GraceTime 0 SLURM requeues it by itself; in a grace of 20 s it would end as done."""
    node = cluster.nodes[0]
    training = Training.submit(cluster, tmp_path, f"--partition={partition}", f"-w{node}", "-c8")
    training.wait_for_step(20)
    urgent = cluster.sbatch("sleep 1", "--partition=high", f"-w{node}", "-c8", "--time=1")
    left = training.wait_for_exit()
    assert (left["status"], left["how"]) == (75, how)
    training.wait_until_trained()
    assert cluster.state(urgent) == "COMPLETED"
    assert training.lives == [0, left["step"]]
    training.check_equal(undisturbed)


def test_what_is_preempted_by_cancel_during_its_imports_stays_away(cluster: Cluster, tmp_path):
    """Without a GraceTime nothing of it runs long enough to ask for a requeue: docs/slurm.md."""
    node = cluster.nodes[0]
    imports = "print('imports', flush=True); import time; time.sleep(1000)"
    where = ("--partition=lowcancel", f"-w{node}", "-c8")
    job = submit(cluster, tmp_path, *where, command=["python", "-c", imports])
    cluster.wait_for_log(job, "imports")
    urgent = cluster.sbatch("sleep 1", "--partition=high", f"-w{node}", "-c8", "--time=1")
    assert cluster.wait(job) == "PREEMPTED"
    cluster.wait(urgent, "COMPLETED")
    wait_until(lambda: cluster.is_over(job))
    shown = cluster.show(job)
    found = (shown["JobState"], shown["Restarts"], shown["ExitCode"])
    assert found == ("PREEMPTED", "0", "143:0")


def test_the_tasks_of_an_array_come_back_one_by_one(cluster: Cluster, tmp_path, undisturbed):
    """By the array's own number, all of them would be requeued."""
    train = f"exec python {TRAIN} run-$SLURM_ARRAY_TASK_ID {STEPS} {SECONDS}"
    array = submit(cluster, tmp_path, "--array=0-2", command=["bash", "-c", train])
    tasks = [Training(cluster, tmp_path / f"run-{n}", f"{array}_{n}") for n in range(3)]
    for task in tasks:
        task.wait_for_step(10)
    for task in tasks[1:]:  # one after the other, and one never
        cluster.scancel(task.job, "-s", "USR2")
        task.wait_for_exit()
        assert task.requeues[0]["job"] == task.job
    for task, lives in zip(tasks, (1, 2, 2), strict=True):
        task.wait_until_trained()
        assert len(task.lives) == lives
        assert cluster.show(task.job)["Restarts"] == str(lives - 1)
        task.check_equal(undisturbed)


def test_a_killed_trainer_goes_on_in_its_job_from_its_last_snapshot(
    cluster: Cluster, tmp_path, undisturbed
):
    """Without the leader SLURM would kill the keeper too, and the job would have failed."""
    training = Training.submit(cluster, tmp_path)
    seen = training.wait_for_memory(15)
    lease = (training.folder / "attempts/0001/lease.json").read_text()
    pid = int(lease.partition('"pid": ')[2].partition(",")[0])
    os.kill(pid, signal.SIGKILL)
    left = training.wait_for_exit()
    assert left["how"] in ("was killed by SIGKILL", "died")  # an older kernel does not say
    training.wait_until_trained()
    first, again = training.lives
    assert first == 0
    assert again >= seen
    assert cluster.show(training.job)["Restarts"] == "0"
    assert training.requeues == []
    training.check_equal(undisturbed)


def test_the_leader_waits_for_the_keeper_where_it_must_not_start_again(cluster: Cluster, tmp_path):
    run = tmp_path / "run"
    text = f"srun holdfast run --max-restarts 0 -- python {TRAIN} {run} {STEPS} {SECONDS}"
    job = cluster.sbatch(text, "--time=10", f"--output={tmp_path}/log", cwd=tmp_path)
    training = Training(cluster, run, job)
    training.wait_for_step(20)
    lease = (training.folder / "attempts/0001/lease.json").read_text()
    os.kill(int(lease.partition('"pid": ')[2].partition(",")[0]), signal.SIGKILL)
    left = training.wait_for_exit()
    assert training.newest_on_disk >= max(15, left["step"] - 25)
    assert cluster.wait(training.job) == "FAILED"
    assert cluster.show(training.job)["ExitCode"] == "137:0"


def test_a_warning_that_comes_while_the_script_imports_is_not_lost(cluster, tmp_path):
    """Nor does it kill the process, as it would without the leader."""
    training = _submit_slow_one(cluster, tmp_path)
    cluster.scancel(training.job, "-s", "USR2")
    left = training.wait_for_exit()
    assert (left["status"], left["how"]) == (75, "SIGUSR2")
    assert training.requeues[0]["said"] == f"job {training.job} is requeued and goes on by itself."


def test_what_is_preempted_while_the_script_imports_comes_back(
    cluster: Cluster, tmp_path, undisturbed
):
    """SIGTERM kills python before there is a run, and nobody but the batch script can requeue."""
    node = cluster.nodes[0]
    training = _submit_slow_one(cluster, tmp_path, "--partition=lowgrace", f"-w{node}", "-c8")
    cluster.sbatch("sleep 1", "--partition=high", f"-w{node}", "-c8", "--time=1")
    training.wait_until_trained()
    assert training.lives == [0]
    assert cluster.show(training.job)["Restarts"] == "1"
    training.check_equal(undisturbed)


def test_what_is_cancelled_while_the_script_imports_stays_cancelled(cluster: Cluster, tmp_path):
    training = _submit_slow_one(cluster, tmp_path)
    cluster.scancel(training.job)
    assert cluster.wait(training.job) == "CANCELLED"
    wait_until(lambda: cluster.is_over(training.job))
    assert cluster.show(training.job)["Restarts"] == "0"


def _submit_slow_one(cluster: Cluster, place: Path, *options: str) -> Training:
    """A script that imports for three seconds, and has begun with it."""
    script, here = place / "slow.py", place / "here"
    slowly = f"import pathlib, time\npathlib.Path({str(here)!r}).touch()\ntime.sleep(3)\n"
    text = TRAIN.read_text()
    script.write_text(text.replace("import sys\n", f"import sys\n{slowly}", 1))
    training = Training.submit(cluster, place, *options, script=script)
    wait_until(here.exists, 30)
    return training


def test_where_there_is_no_scontrol_the_script_requeues_the_job(
    cluster: Cluster, tmp_path, undisturbed
):
    """As in a container, which has none: there the run leaves a file, and the script does it."""
    python = ["env", f"PATH={tmp_path}", sys.executable, str(TRAIN)]
    command = [*python, "run", str(STEPS), str(SECONDS)]
    training = Training(cluster, tmp_path / "run", submit(cluster, tmp_path, command=command))
    training.wait_for_step(20)
    cluster.scancel(training.job, "-s", "USR2")
    left = training.wait_for_exit()
    assert left["status"] == 75
    assert "the batch script's last lines requeue" in training.requeues[0]["said"]
    training.wait_until_trained()
    assert training.lives == [0, left["step"]]
    training.check_equal(undisturbed)
    assert list(tmp_path.glob(".holdfast-requeue*")) == []
