"""A proof that is given up leaves nothing: no process, no folder, no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.command import PROGRAM
from tests.support import SHM, run_id, wait_until

SCRIPT = """
import time
import numpy as np
import holdfast

weights = np.zeros(1000)
with holdfast.Run("runs/here", weights=weights) as run:
    for step in run.steps(2000):
        weights += 1.0
        time.sleep(0.002)
"""


def processes_below(folder: Path) -> list[int]:
    """Whatever was started for this proof: its folder is in the words or is the place."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join([*process.cmdline(), process.cwd()]):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.nightly  # test_terminal.py has the sentence
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_given_up(tmp_path, name, status):  # a short name: a socket's path has 107 characters
    project, temporary = tmp_path / "project", tmp_path / "t"
    project.mkdir()
    temporary.mkdir()
    (project / "train.py").write_text(SCRIPT)
    with subprocess.Popen(
        [PROGRAM, "prove", "--kills", "2", "--", sys.executable, "train.py"],
        cwd=project,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as prover:
        runs = "holdfast-prove-*/reference/*/runs/here/journal.jsonl"
        [journal] = wait_until(lambda: list(temporary.glob(runs)), 60, "the first run")
        name_in_memory = f"holdfast-*-{run_id(journal.parent)}-*"
        wait_until(lambda: list(SHM.glob(name_in_memory)), 60, "its first snapshot")
        prover.send_signal(signal.Signals[name])
        said = prover.communicate(timeout=60)[1]
    assert prover.returncode == status, said
    assert "Traceback" not in said
    assert list(temporary.iterdir()) == []
    wait_until(lambda: not processes_below(temporary), 20, "the end of its processes")
    assert list(SHM.glob(name_in_memory)) == []
