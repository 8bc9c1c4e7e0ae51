"""What goes wrong around a job besides its end: a controller that is silent, a bad moment."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SECONDS, STEPS, TRAIN, Training, holdfast, submit
from tests.support import wait_until

pytestmark = pytest.mark.timeout(200)


def start(cluster: Cluster, place: Path, *options: str, **more) -> Training:
    """A training whose own scontrol does first what `scontrol` says, as bash."""
    seconds, odd = more.get("seconds", SECONDS), more.get("scontrol")
    command = ["python", str(more.get("script", TRAIN)), "run", str(STEPS), str(seconds)]
    if odd is not None:
        real = shutil.which("scontrol", path=cluster.environment()["PATH"])
        (place / "bin").mkdir()
        stub = place / "bin" / "scontrol"
        stub.write_text(f'#!/bin/bash\n{odd}\nexec {real} "$@"\n')
        stub.chmod(0o755)
        path = f"PATH={place}/bin:{cluster.environment()['PATH']}"
        command = ["env", path, *command]
    return Training(cluster, place / "run", submit(cluster, place, *options, command=command))


def test_several_ranks_save_though_slurm_does_not_say_why_they_end(cluster: Cluster, tmp_path):
    """SIGKILL comes 8 s after SIGTERM here, and a question may take longer."""
    silent = f'if [ -e {tmp_path}/silent ] && [ "$1" = show ]; then sleep 60; fi'
    training = start(cluster, tmp_path, "--ntasks=2", scontrol=silent, seconds=0.05)
    held = training.wait_for_memory(20)
    training.wait_for_memory(held + 1)  # there is a newer one only once all ranks hold that one
    (tmp_path / "silent").touch()
    cluster.scancel(training.job)
    assert cluster.wait(training.job) == "CANCELLED"
    wait_until(lambda: cluster.is_over(training.job), 30)
    assert training.newest_on_disk >= held


def test_a_warning_while_ranks_open_their_run_ends_none_of_them_alone(cluster, tmp_path):
    script = tmp_path / "late.py"
    late = "import os\nif os.environ['RANK'] == '1':\n    time.sleep(4)\n"
    script.write_text(TRAIN.read_text().replace("import holdfast\n", f"import holdfast\n{late}"))
    training = start(cluster, tmp_path, "--ntasks=2", script=script)
    keeper = training.folder / "attempts" / "0001" / "heartbeat.json"
    meeting = training.folder / "attempts"
    wait_until(lambda: keeper.exists() or list(meeting.glob(".meeting-*")), 30)
    cluster.scancel(training.job, "-s", "USR2")
    left = training.wait_for_exit()
    # Whichever rank is heard first.
    assert (left["status"], left["how"].removesuffix(" (rank 1)")) == (75, "SIGUSR2")
    assert training.requeues[0]["said"] == f"job {training.job} is requeued and goes on by itself."


def test_a_job_that_an_array_has_submitted_requeues_itself(cluster: Cluster, tmp_path):
    """It has the variables of the task that submitted it, and they are not its own."""
    other = cluster.sbatch("sleep 300", "--array=3")
    cluster.wait(f"{other}_3", "RUNNING")
    leaked = f"export SLURM_ARRAY_JOB_ID={other} SLURM_ARRAY_TASK_ID=3 SLURM_RESTART_COUNT=2"
    run = tmp_path / "run"
    text = f"{leaked}\ntrap : TERM\nsrun holdfast run -- python {TRAIN} {run} {STEPS} {SECONDS}"
    training = Training(cluster, run, cluster.sbatch(text, f"--output={tmp_path}/log"))
    training.wait_for_step(20)
    cluster.scancel(training.job, "-s", "USR2")
    training.wait_for_exit()
    assert training.requeues[0]["job"] == training.job
    assert cluster.show(training.job)["Restarts"] == "1"
    assert cluster.show(f"{other}_3")["Restarts"] == "0"
    assert cluster.state(f"{other}_3") == "RUNNING"


def test_while_slurm_does_not_answer_nothing_is_requeued_that_may_be_cancelled(cluster, tmp_path):
    deaf = f'if [ -e {tmp_path}/deaf ] && [ "$1" = show ]; then echo no >&2; exit 1; fi'
    training = start(cluster, tmp_path, scontrol=deaf, seconds=2.0)
    training.wait_for_step(1)
    (tmp_path / "deaf").touch()
    cluster.scancel(training.job, "-s", "USR2")
    cluster.wait_for_log(training.job, "SIGUSR2: step")
    cluster.scancel(training.job)
    assert cluster.wait(training.job) == "CANCELLED"
    wait_until(lambda: cluster.is_over(training.job), 30)
    assert training.newest_on_disk == 2  # it still asked when SLURM killed it
    assert cluster.show(training.job)["Restarts"] == "0"


def test_a_controller_that_is_away_for_a_moment_is_asked_again(cluster: Cluster, tmp_path):
    """As when it is restarted."""
    until = f'"$(cat {tmp_path}/away)"'
    away = f'if [ -e {tmp_path}/away ] && [ "$(date +%s)" -lt {until} ]; then exit 1; fi'
    training = start(cluster, tmp_path, scontrol=away)
    training.wait_for_step(20)
    (tmp_path / "away").write_text(str(int(time.time()) + 4))
    cluster.scancel(training.job, "-s", "USR2")
    left = training.wait_for_exit()
    assert left["status"] == 75
    training.wait_until_trained()
    assert training.lives == [0, left["step"]]


def test_a_stop_of_a_person_is_not_undone_by_a_warning_after_it(cluster: Cluster, tmp_path):
    training = start(cluster, tmp_path, seconds=2.0)
    training.wait_for_step(1)
    holdfast(cluster, tmp_path, "stop", "run")
    cluster.wait_for_log(training.job, "asked to stop")
    cluster.scancel(training.job, "-s", "USR2")
    left = training.wait_for_exit()
    assert left["status"] == 130
    assert cluster.wait(training.job) == "FAILED"
    assert cluster.show(training.job)["Restarts"] == "0"


def test_a_keeper_that_is_killed_as_the_job_is_requeued_is_replaced(cluster: Cluster, tmp_path):
    """That of rank 0, which all others wait for."""
    slow = f"if [ -e {tmp_path}/slow ]; then rm {tmp_path}/slow; sleep 60; fi"
    training = start(cluster, tmp_path, "--ntasks=2", scontrol=slow)
    training.wait_for_step(30)
    (tmp_path / "slow").touch()
    cluster.scancel(training.job, "-s", "USR2")
    wait_until(lambda: training.newest_on_disk >= 30, 30, "the checkpoint")
    wait_until(lambda: not (tmp_path / "slow").exists(), 30, "the question to SLURM")
    beat = training.folder / "attempts/0001/heartbeat.json"
    os.kill(int(beat.read_text().partition('"pid": ')[2].partition(",")[0]), signal.SIGKILL)
    training.wait_for_step(training.newest_on_disk, attempt=2)
    assert cluster.show(training.job)["Restarts"] == "1"
