"""`holdfast why JOBID`: what the controller and the job's own output say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import holdfast

pytestmark = pytest.mark.timeout(120)

_TOO_MUCH = "import time; held = bytearray(200 << 20); time.sleep(60)"
_FAILS = 'rates = {}; rates["lr"]'


def why(cluster: Cluster, place: Path, job: str) -> dict[str, Any]:
    # --job, since the numbers of a new cluster's jobs are those of living processes as well.
    said: dict[str, Any] = json.loads(holdfast(cluster, place, "why", "--job", job, "--json"))
    return said


def test_a_job_that_failed_one_that_was_cancelled_and_one_that_runs(
    cluster: Cluster, tmp_path: Path
) -> None:
    failing = cluster.sbatch(f"echo begins\npython -c '{_FAILS}'", cwd=tmp_path)
    cancelled = cluster.sbatch("echo begins; sleep 1000", cwd=tmp_path)
    running = cluster.sbatch("echo begins; sleep 1000", cwd=tmp_path)
    cluster.wait_for_log(cancelled, "begins")
    cluster.scancel(cancelled)
    cluster.wait(cancelled, "CANCELLED")
    cluster.wait(failing, "FAILED")
    cluster.wait(running, "RUNNING")

    said = why(cluster, tmp_path, failing)
    assert said["cause"] in ("python-exception", "configuration")
    assert "KeyError" in said["sentence"]
    assert cluster.show(failing)["StdOut"] in said["files"]
    assert why(cluster, tmp_path, cancelled)["cause"] == "asked"
    assert why(cluster, tmp_path, running)["cause"] == "running"


def test_a_job_that_was_killed_for_its_memory(cluster: Cluster, tmp_path: Path) -> None:
    if not cluster.limits_memory:
        pytest.skip("SLURM limits memory by cgroup: needs a /sys/fs/cgroup/memory to write to")
    job = cluster.sbatch(f"echo begins\npython -c '{_TOO_MUCH}'", "--mem=60", cwd=tmp_path)
    cluster.wait(job, "OUT_OF_MEMORY")
    said = why(cluster, tmp_path, job)
    assert said["cause"] == "oom-cgroup"
    assert any("oom_kill" in line or "OUT_OF_MEMORY" in line for line in said["evidence"])


def test_a_job_that_had_to_make_room(cluster: Cluster, tmp_path: Path) -> None:
    everything = (f"--nodes={len(cluster.nodes)}", "--exclusive")
    low = cluster.sbatch(
        "echo begins; sleep 1000", "--partition=lowcancel", *everything, cwd=tmp_path
    )
    cluster.wait_for_log(low, "begins")
    cluster.sbatch("true", "--partition=high", *everything, cwd=tmp_path)
    cluster.wait(low, "PREEMPTED")
    assert why(cluster, tmp_path, low)["cause"] == "preempted"


def test_a_task_of_an_array_and_a_job_that_nobody_knows(cluster: Cluster, tmp_path: Path) -> None:
    array = cluster.sbatch('[ "$SLURM_ARRAY_TASK_ID" = 1 ] || exit 5', "--array=1-2", cwd=tmp_path)
    cluster.wait(f"{array}_2", "FAILED")
    cluster.wait(f"{array}_1", "COMPLETED")
    assert why(cluster, tmp_path, f"{array}_1")["cause"] == "finished"
    said = why(cluster, tmp_path, f"{array}_2")
    assert said["cause"] != "finished"
    assert any("5" in line for line in [said["sentence"], *said["evidence"]])
    unknown = why(cluster, tmp_path, "999999")
    assert unknown["cause"] == "unknown"
    assert any("does not know job 999999" in line for line in unknown["evidence"])
