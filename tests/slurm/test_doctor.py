"""`holdfast doctor -- srun …`: SLURM's own signal through a real step, and nothing left of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster
from tests.support import wait_until

DOCTOR = """
import json, signal, sys
from holdfast._tools.doctor.signals.path import check_signal_path
signals = (signal.SIGUSR2, signal.SIGTERM)
checks = check_signal_path(sys.argv[1:], signals=signals, arrive_seconds=2)
print(json.dumps([each.as_json() for each in checks]))
"""


def examine(cluster: Cluster, place: Path, *command: str) -> dict[str, dict[str, Any]]:
    said = cluster.run(sys.executable, "-c", DOCTOR, *command, cwd=place)
    return {each["name"]: each for each in json.loads(said.splitlines()[-1])}


def test_the_hop_of_a_step_that_swallows_the_warning_is_named(cluster: Cluster, tmp_path):
    (tmp_path / "train.py").write_text("open('trained', 'w')")
    job = tmp_path / "task.sh"
    job.write_text(f"#!/bin/bash\n'{sys.executable}' train.py\ntouch after\n")
    found = examine(cluster, tmp_path, "srun", "-n2", "bash", "task.sh")
    check = found["signal SIGUSR2"]
    assert (check["state"], check["data"]["sent_to"]) == ("fail", "step"), check
    assert check["data"]["swallowed_by"] == "bash task.sh"
    assert "task.sh:2: exec python train.py" in check["remedy"]
    job.write_text(f"#!/bin/bash\nexec '{sys.executable}' train.py\n")
    found = examine(cluster, tmp_path, "srun", "-n2", "bash", "task.sh")
    for name in ("signal SIGUSR2", "signal SIGTERM"):
        assert found[name]["state"] == "ok", found[name]
        assert found[name]["data"]["arrived"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["task.sh", "train.py"]
    wait_until(lambda: not cluster.run("squeue", "-h").strip(), 10, "the end of all jobs")
