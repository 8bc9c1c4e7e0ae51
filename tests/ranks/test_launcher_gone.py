"""Ranks whose torchrun is killed before they have opened the run leave, with a sentence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import Trainer, environment, is_gone, wait_until

SCRIPT = """
import os, sys, time
from pathlib import Path

place, way, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]


def hold():
    (place / f"held-{rank}").touch()
    while not (place / "gate").exists():
        time.sleep(0.005)


if way == "import":
    hold()
import numpy as np
import holdfast

if way != "import":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank == "1":  # it opens the run after the death, rank 0 before
        hold()
(place / f"opens-{rank}").touch()
with holdfast.Run(place / "run", own=np.zeros(4)) as run:
    print("went on", flush=True)
    for step in run.steps(1):
        time.sleep(60)
"""


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """What two ranks say after their torchrun was killed."""
    ranks: list[psutil.Process] = []
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python")

    def kill(way: str) -> str:
        job = Trainer(
            *(tmp_path, way),
            script=script,
            prefix=(sys.executable, *agent),
            env=environment(GLOO_SOCKET_IFNAME="lo"),
        )
        try:
            held = [tmp_path / f"held-{rank}" for rank in ((1,) if way == "opening" else (0, 1))]
            wait_until(lambda: all(map(Path.exists, held)), 60, f"the ranks in {job.output}")
            if way == "opening":
                wait_until((tmp_path / "opens-0").exists, 60, "rank 0")
            ranks.extend(psutil.Process(job.pid).children(recursive=True))
            job.kill()
            job.process.wait()
            (tmp_path / "gate").touch()
            # Far less than a store of torch waits for its server.
            wait_until(lambda: all(map(is_gone, ranks)), 20, "the end of the ranks")
        finally:
            job.end()
        return job.output

    yield kill
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()


# Over 5 s: torchrun imports torch, then its ranks do, and an error of theirs is given three.
@pytest.mark.parametrize("way", ["import", "opening"])
def test_ranks_leave_whose_torchrun_was_killed_before_the_run_was_open(orphans, way):
    said = orphans(way)
    assert "went on" not in said
    assert "is gone, and the ranks had not opened the run yet" in said
    assert "Traceback" not in said
