"""The cluster itself: it is a real one, it starts quickly, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm import sweep
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings, cgroup_folders
from tests.support import wait_until

APPEND = ("--open-mode=append",)


def test_a_second_cluster_starts_in_seconds_and_leaves_nothing(cluster: Cluster) -> None:
    """Also with a job that runs, and with another cluster beside it that goes on."""
    second = Cluster(Settings(nodes=2))
    began = time.monotonic()
    second.start()
    print(f"started in {time.monotonic() - began:.1f} s")
    try:
        assert time.monotonic() - began < 30
        job = second.sbatch("setsid sleep 1000 & sleep 1000")
        second.wait(job, "RUNNING")
        wait_until(lambda: len(second.pids(job)) == 3)
        assert sweep.members(second.folder)
    finally:
        second.stop()
    assert sweep.members(second.folder) == []
    assert cgroup_folders(second.prefix) == []
    assert not second.folder.exists()
    cluster.wait(cluster.sbatch("true"), "COMPLETED")


def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    """The sweeper sees that nobody holds its pipe any more."""
    lines = "import time; from tests.slurm.cluster import *; c = Cluster(Settings(nodes=1))"
    then = "c.start(); c.sbatch('sleep 1000'); print(c.prefix, c.folder, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{lines}; {then}; time.sleep(1000)"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        prefix, folder = process.stdout.readline().split()
        assert sweep.members(Path(folder))
        process.kill()
        process.wait(10)
    wait_until(lambda: not Path(folder).exists(), 20, "the sweeper")
    assert sweep.members(Path(folder)) == []
    assert cgroup_folders(prefix) == []


def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    broken = Cluster(Settings(nodes=1, kill_wait=-1))
    with pytest.raises(AssertionError, match=r"\w+ has ended(.|\n)*KillWait"):
        broken.start()
    assert sweep.members(broken.folder) == []
    assert not broken.folder.exists()


def test_a_job_runs_with_our_python(cluster: Cluster, tmp_path: Path) -> None:
    script = "python -c 'import sys; print(sys.executable)'; holdfast --version; exit 7"
    job = cluster.sbatch(script, cwd=tmp_path)
    assert cluster.wait(job) == "FAILED"
    assert cluster.show(job)["ExitCode"] == "7:0"
    python, version = cluster.log(job).splitlines()
    assert Path(python).parent == Path(sys.executable).parent
    assert "holdfast" in version


def test_two_tasks_on_two_nodes_are_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    script = (
        "srun bash -c 'touch /dev/shm/$SLURM_PROCID; cd /dev/shm; echo $(hostname) $(ls -d [0-9])'"
    )
    job = cluster.sbatch(script, "-N2", "-n2", cwd=tmp_path)
    cluster.wait(job, "COMPLETED")
    first, second = sorted(line.split() for line in cluster.log(job).splitlines())
    assert {first[0], second[0]} < set(cluster.nodes)
    assert first[0] != second[0]
    assert [first[1:], second[1:]] == [["0"], ["1"]]


def test_pids_are_the_processes_of_one_rank(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("srun sleep 1000", "-N2", "-n4", cwd=tmp_path)
    for rank in range(4):
        (pid,) = wait_until(lambda rank=rank: cluster.pids(job, rank))
        assert Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    # Besides the four: the batch script, srun and the child that srun has.
    assert len(cluster.pids(job)) == 7
    os.kill(cluster.pids(job, rank=3)[0], signal.SIGKILL)
    wait_until(lambda: not cluster.pids(job, rank=3))
    assert cluster.state(job) == "RUNNING"


def test_a_requeued_job_counts_its_restarts_and_truncates_its_log(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = "echo attempt ${SLURM_RESTART_COUNT:-0}; [ $SLURM_RESTART_COUNT ] || sleep 1000"
    jobs = {mode: cluster.sbatch(script, *mode, cwd=tmp_path) for mode in ((), APPEND)}
    for job in jobs.values():
        cluster.wait_for_log(job, "attempt 0")
        cluster.requeue(job)
    for job in jobs.values():
        cluster.wait(job, "COMPLETED")
        assert cluster.show(job)["Restarts"] == "1"
    assert cluster.log(jobs[()]) == "attempt 1\n"
    assert cluster.log(jobs[APPEND]).splitlines()[0] == "attempt 0"
    assert cluster.log(jobs[APPEND]).splitlines()[-1] == "attempt 1"


def test_a_lost_node_runs_on_while_its_job_starts_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = "echo attempt ${SLURM_RESTART_COUNT:-0} $(hostname); sleep 1000"
    job = cluster.sbatch(script, *APPEND, cwd=tmp_path)
    cluster.wait_for_log(job, "attempt 0")
    lost, first = cluster.show(job)["NodeList"], cluster.pids(job)
    cluster.kill_slurmd(lost)
    cluster.declare_down(lost)
    log = cluster.wait_for_log(job, "attempt 1")
    assert lost not in log.splitlines()[-1]
    assert set(first) < set(cluster.pids(job)), "the old attempt was to run on"
    cluster.clear()
    assert cluster.pids(job) == []
    cluster.wait(cluster.sbatch("hostname", "-w", lost), "COMPLETED")


def test_more_memory_than_asked_for_is_fatal(cluster: Cluster, tmp_path: Path) -> None:
    if not cluster.limits_memory:
        pytest.skip("SLURM limits memory by cgroup: needs a /sys/fs/cgroup/memory to write to")
    job = cluster.sbatch("python -c 'bytearray(200 << 20)'", "--mem=60", cwd=tmp_path)
    assert cluster.wait(job) == "OUT_OF_MEMORY"
