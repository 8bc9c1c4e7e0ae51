"""`holdfast resume` of ranks that torchrun started: the agent is started again, with its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.cli.command import PROGRAM
from tests.support import SLACK, Trainer, environment, keepers, wait_until, words_of

# Three jobs import torch in three processes each, one after another on a machine that is busy.
pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly]

SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
weights = torch.zeros(64)
with holdfast.Run(sys.argv[1], settings=holdfast.Settings(max_overhead=1.0), own=weights) as run:
    for step in run.steps(int(sys.argv[2])):
        drawn = torch.randn(64)
        dist.all_reduce(drawn)
        weights.add_(drawn * torch.rand(())).tanh_()
        if step == 12 and run.attempt == 1 and len(sys.argv) > 3:
            print("holding", flush=True)
            time.sleep(600)
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
Path(f"{sys.argv[1]}.hash{dist.get_rank()}").write_text(digest)
"""


def torchrun(place: Path, *words: str) -> tuple[str, ...]:
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return (sys.executable, *agent, str(place / "train.py"), *words)


def test_a_killed_job_is_resumed_to_the_same_bits(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    variables = environment(GLOO_SOCKET_IFNAME="lo")
    calm = torchrun(tmp_path, "calm", "20")
    subprocess.run(calm, cwd=tmp_path, env=variables, check=True, timeout=120 * SLACK)
    folder = tmp_path / "run"
    job = Trainer(
        *("run", "20", "held"),
        script=tmp_path / "train.py",
        prefix=(*torchrun(tmp_path)[:-1], "--no-python"),
        cwd=tmp_path,
        env=variables,
    )
    try:
        wait_until(lambda: job.output.count("holding") == 2, 120, f"both ranks in {job.output}")
        ranks = psutil.Process(job.pid).children(recursive=True)
        job.kill()
    finally:
        job.end()
    for rank in ranks:
        if rank.is_running() and "holdfast._keeper" not in words_of(rank):
            rank.kill()
    wait_until(lambda: not keepers(folder), 60, "the keepers' end")
    record = json.loads((folder / "attempts/0001/start.json").read_text())
    assert (record["launcher"], record["ranks"]) == ("torchrun", 2)
    done = subprocess.run(
        [PROGRAM, "resume", folder],
        cwd=os.sep,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120 * SLACK,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by torchrun" in done.stderr
    assert "resumed at step" in done.stderr
    for rank in (0, 1):
        ended, undisturbed = (tmp_path / f"{name}.hash{rank}" for name in ("run", "calm"))
        assert ended.read_text() == undisturbed.read_text()
