"""The command that `holdfast resume` starts, by recorded starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast._environment.slurm.controller import digest_of, read_batch
from holdfast._tools.resume import plan_resumption
from tests.unit.report_folder import Book

SCRIPT = "#!/bin/bash\n#SBATCH --array=0-9\npython train.py run-$SLURM_ARRAY_TASK_ID\n"
TASK = (
    "JobId=15 ArrayJobId=12 ArrayTaskId=3 JobName=sweep UserId=me(0) JobState={state} "
    "TimeLimit=08:00:00 Command={place}/job.sh lr WorkDir={place} StdErr={place}/slurm-12_3.out "
    "StdIn=/dev/null StdOut={place}/slurm-12_3.out"
)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose programs are stand-ins in one folder."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    for name in ("python", "accelerate", "accelerate-launch", "sbatch"):
        (place / name).touch(0o755)
    return place


def answer(place: Path, state: str) -> None:
    """What scontrol says of the task, and of its script."""
    line = TASK.format(place=place.parent, state=state)
    (place / "scontrol").write_text(
        f"#!/bin/sh\ncase $1 in write) printf '{SCRIPT}';; *) echo '{line}';; esac\n"
    )
    (place / "scontrol").chmod(0o755)


def killed_run(place: Path, **start: Any) -> Path:
    book = Book(place / "run-3")
    book.begin(1, 0)
    book.end(1, 103, "death", status=None, how="was killed by SIGKILL", step=100, durable_step=80)
    record = {"folder": str(book.folder), "environment": {}, "ranks": 1, **start}
    book.layout.start(1).write_text(json.dumps(record))
    return book.folder


@pytest.mark.parametrize(
    "words",
    [
        ["{bin}/python", "{bin}/accelerate", "launch", "--num_processes", "2", "train.py"],
        ["{bin}/python", "{bin}/accelerate-launch", "--gpu_ids=0,1", "train.py", "--lr", "1"],
        ["{bin}/python", "-m", "accelerate.commands.launch", "train.py"],
    ],
)
def test_accelerate_is_started_again_by_its_own_command(words, programs, tmp_path):
    command = [word.format(bin=programs) for word in words]
    given = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
    folder = killed_run(
        tmp_path,
        launcher="accelerate",
        environment={**given, "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
        ranks=2,
        start={"command": command, "cwd": str(tmp_path), "left_out": []},
    )
    found = plan_resumption(folder)
    assert (found.launcher, found.command, found.cwd) == ("accelerate", command, tmp_path)
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert not {"WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & found.environment.keys()
    assert found.notes == []


def test_accelerate_on_several_nodes_has_to_be_started_on_each(programs, tmp_path):
    command = [f"{programs}/python", f"{programs}/accelerate", "launch", "train.py"]
    folder = killed_run(
        tmp_path,
        launcher="accelerate",
        environment={"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"},
        ranks=4,
        start={"command": command, "cwd": str(tmp_path), "left_out": []},
    )
    assert plan_resumption(folder).notes == [
        "it had several nodes: start it on each of the others too."
    ]


def test_one_task_of_an_array_is_submitted_alone(programs, tmp_path):
    answer(programs, "RUNNING")
    batch = read_batch("12_3")
    assert batch is not None
    assert batch["digest"] == digest_of(SCRIPT)
    (tmp_path / "job.sh").write_text(SCRIPT)
    environment = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "10"}
    folder = killed_run(
        tmp_path,
        launcher="sbatch",
        job="12_3",
        batch=batch,
        environment=environment,
        start={"command": ["python", "train.py", "run-3"], "cwd": str(tmp_path), "left_out": []},
    )
    answer(programs, "FAILED")
    found = plan_resumption(folder)
    options = ["--job-name=sweep", "--time=08:00:00", "--array=3"]
    assert found.command == ["sbatch", "--parsable", *options, f"{tmp_path}/job.sh", "lr"]
    assert (found.launcher, found.cwd) == ("sbatch", tmp_path)
    assert not environment.keys() & found.environment.keys()
    assert found.notes == [
        "it was one of the 10 tasks of an array, and is submitted alone, with the same "
        "SLURM_ARRAY_TASK_ID. SLURM_ARRAY_TASK_COUNT is 1 then."
    ]
