"""`holdfast resume` of a batch job: the same script is submitted again, and goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PROGRAM
from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.jobs import TRAIN, Training, read, train_undisturbed
from tests.support import SLACK, wait_until


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))


def resume(cluster: Cluster, folder: Path, *words: str) -> Any:
    """From another folder and a fresh login, which knows where the cluster is."""
    known = {"HOME": os.sep, "PATH": "/usr/bin:/bin"}
    conf = cluster.environment()["SLURM_CONF"]
    return subprocess.run(
        [PROGRAM, "resume", folder, *words],
        cwd=os.sep,
        env={**known, "SLURM_CONF": conf},
        capture_output=True,
        text=True,
        timeout=60 * SLACK,
        check=False,
    )


def submitted(done: Any) -> str:
    found = re.search(r"submitted as job (\d+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return found[1]


def record_of(training: Training) -> dict[str, Any]:
    """Once the keeper has asked SLURM for the script."""
    path = training.folder / "attempts/0001/start.json"
    wait_until(lambda: "batch" in read(path), 60, "the batch script in the record")
    return read(path)


def kill_all(cluster: Cluster, job: str) -> None:
    for pid in cluster.pids(job):
        with contextlib.suppress(ProcessLookupError):  # its parent was killed before it
            os.kill(pid, signal.SIGKILL)
    cluster.wait(job, ENDED)


def test_a_submitted_job_that_was_killed_is_submitted_again(cluster, tmp_path, undisturbed):
    training = Training.submit(cluster, tmp_path, "--cpus-per-task=1")
    training.wait_for_step(20)
    record = record_of(training)
    assert (record["launcher"], record["job"]) == ("sbatch", training.job)
    queued = resume(cluster, training.folder)
    assert queued.returncode != 0
    assert "is live" in queued.stderr
    kill_all(cluster, training.job)
    wait_until(lambda: cluster.is_over(training.job))
    done = resume(cluster, training.folder)
    again = Training(cluster, training.folder, submitted(done))
    assert again.job != training.job
    again.wait_until_trained()
    again.check_equal(undisturbed)
    shown = cluster.show(again.job)
    for name in ("JobName", "TimeLimit", "WorkDir", "NumTasks", "CPUs/Task"):
        assert shown[name] == cluster.show(training.job)[name]
    assert "changed since" not in again.log


def test_a_plain_batch_job_keeps_the_options_of_its_line(cluster, tmp_path, undisturbed):
    script = tmp_path / "job.sbatch"
    script.write_text(f'#!/bin/bash\npython {TRAIN} "$1" 450 0.02\n')
    options = ("--time=7", "--job-name=plain", f"--output={tmp_path}/out-%j.log")
    job = cluster.run(*("sbatch", "--parsable", *options, str(script), "run"), cwd=tmp_path).strip()
    training = Training(cluster, tmp_path / "run", job)
    training.wait_for_step(20)
    assert record_of(training)["batch"]["path"] == str(script)
    kill_all(cluster, job)
    wait_until(lambda: cluster.is_over(job))
    script.unlink()  # the recorded text is submitted then
    again = Training(cluster, training.folder, submitted(resume(cluster, training.folder)))
    again.wait_until_trained()
    again.check_equal(undisturbed)
    shown = cluster.show(again.job)
    assert (shown["JobName"], shown["TimeLimit"]) == ("plain", "00:07:00")
    assert shown["StdOut"] == f"{tmp_path}/out-{again.job}.log"


def test_a_job_that_starts_by_itself_is_not_submitted_twice(cluster, tmp_path):
    training = Training.submit(cluster, tmp_path)
    training.wait_for_step(20)
    record_of(training)
    cluster.requeue(training.job)
    training.wait_for_exit()
    done = resume(cluster, training.folder)
    assert done.returncode != 0
    # Refused: the old process is on its way out, or SLURM has the job, or it trains again.
    words = ("still runs", f"job {training.job} is ", "is live")
    assert any(word in done.stderr for word in words), done.stderr


def test_a_script_with_a_secret_is_submitted_only_from_its_file(cluster, tmp_path, undisturbed):
    script = tmp_path / "job.sbatch"
    script.write_text(
        f"#!/bin/bash\nexport WANDB_API_KEY=planted-77\npython {TRAIN} run 450 0.02\n"
    )
    job = cluster.run("sbatch", "--parsable", "--time=7", str(script), cwd=tmp_path).strip()
    training = Training(cluster, tmp_path / "run", job)
    training.wait_for_step(20)
    record_of(training)
    kill_all(cluster, job)
    wait_until(lambda: cluster.is_over(job))
    stored = [path for path in training.folder.rglob("*") if path.is_file()]
    assert not any(b"planted-77" in path.read_bytes() for path in stored)
    text = script.read_text()
    script.write_text(text.replace("450", "451"))
    refused = resume(cluster, training.folder)
    assert refused.returncode != 0
    assert "its batch script is not recorded, since there is a secret in it" in refused.stderr
    script.write_text(text)
    again = Training(cluster, training.folder, submitted(resume(cluster, training.folder)))
    again.wait_until_trained()
    again.check_equal(undisturbed)
