"""The commands on a run of several ranks: what each does, which file is damaged, one export."""

from __future__ import annotations

import json
import signal

from holdfast._store.folder.layout import RunLayout
from tests.cli.command import holdfast, status_of, succeed
from tests.cli.test_verify import flip
from tests.support import wait_until


def test_status_has_a_line_for_each_rank_and_names_the_one_that_died(jobs):
    job = jobs.start(2, total=100_000, pauses=0.005)
    job.wait_for("ready")

    def all_ranks_are_heard_of():
        ranks = status_of(jobs.folder)["ranks"]
        return ranks and all(each["step"] for each in ranks)

    wait_until(all_ranks_are_heard_of)
    found = status_of(jobs.folder)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert [each["pid"] for each in found["ranks"]] == [life.pid for life in job.lives]
    shown = succeed("status", jobs.folder)
    assert "training, step" in shown
    assert f"rank 0 is pid {job.lives[0].pid} on" in shown
    assert "ranks      2 on " in shown
    for rank in (0, 1):
        assert f"rank {rank}: step " in shown
    job.send(signal.SIGKILL, 1)
    job.statuses()
    jobs.check_nothing_left()
    found = status_of(jobs.folder)
    assert found["state"] == "died"
    assert [(each["rank"], each["how"]) for each in found["deaths"]] == [
        (1, "was killed by SIGKILL")
    ]
    assert "was killed by SIGKILL at step" in succeed("status", jobs.folder)
    assert succeed("clean", jobs.folder) == "There is nothing to clean.\n"


def test_checkpoints_are_listed_checked_and_exported_as_one(jobs, tmp_path):
    job = jobs.start(2, total=6, pauses=0.0)
    assert job.statuses() == [0, 0], job.outputs
    jobs.check_nothing_left()
    assert succeed("ls", jobs.folder).splitlines()[0].split()[-2:] == ["attempt", "ranks"]
    (listed,) = json.loads(succeed("ls", jobs.folder, "--json"))["checkpoints"]
    assert listed["ranks"] == 2
    assert "whole" in succeed("verify", jobs.folder)
    out = tmp_path / "out.safetensors"
    assert "Put together from 2 ranks" in succeed("export", jobs.folder, out)
    _, _, checkpoint = RunLayout(jobs.folder).checkpoint_folders()[-1]
    damaged = checkpoint / "rank-00001.safetensors"
    flip(damaged, damaged.stat().st_size - 100)
    done = holdfast("verify", jobs.folder)
    assert done.returncode == 1
    assert "DAMAGED: rank-00001.safetensors: tensor " in done.stdout
