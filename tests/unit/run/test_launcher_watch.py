"""Ranks whose launcher dies while they open a run leave, with a sentence."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from tests.support import environment

RANK = """
import sys, time
from pathlib import Path
from holdfast._run.ranks import meeting
from holdfast._run.ranks.meeting import LauncherWatch
meeting._LOOKS_PER_PROBE = 1
watch = LauncherWatch(Path("runs/a"))
if "opened" in sys.argv:
    watch.is_over.set()
print("waiting", flush=True)
time.sleep(5 if "opened" in sys.argv else 60)
print("went on", flush=True)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.fixture
def launched(tmp_path):
    """The output of a rank whose launcher is killed when it waits."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    def launch(*words: str) -> str:
        with subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, script, *words],
            env=environment(TORCHELASTIC_RUN_ID="none", RANK="0", WORLD_SIZE="2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as launcher:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "waiting\n"
            launcher.send_signal(signal.SIGKILL)
            return launcher.stdout.read()  # until the rank is gone

    return launch


# Over 5 s: the error of the call that waits would say more, and is given three.
def test_a_rank_leaves_when_its_launcher_dies_before_the_run_is_open(launched):
    said = launched()
    assert "torchrun (pid " in said
    assert "is gone, and the ranks had not opened the run yet" in said
    assert "went on" not in said


def test_once_the_run_is_open_the_keepers_watch_it(launched):
    assert launched("opened") == "went on\n"


def test_a_rank_leaves_when_the_store_of_a_launcher_on_another_host_dies(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = str(store.getsockname()[1])
        rank = subprocess.Popen(
            [sys.executable, script],
            env=environment(
                **{"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0"},
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waiting\n"
    with rank:
        said = rank.stdout.read()
    assert f"torchrun (its store at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}) is gone" in said
    assert rank.returncode == 1
