"""Twenty deaths in a row under one supervisor: in the end, not a bit is missing."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.cgroups import limited_memory, why_not
from tests.cli.command import PROGRAM
from tests.support import SCRIPTS, environment, journal_events, keepers

pytestmark = [
    # A leader that starts again is in test_supervisor_restarts.py, equal bits after a kill in
    # test_kill.py.
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it steps aside"),
]
_SCRIPT = """\
import ctypes, os, resource, signal, subprocess, sys, threading, time
from pathlib import Path

from light import make_weights, show_hash, train_one

import holdfast

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
me = os.getpid()
deaths = sys.argv[3:]
life = int(os.environ.get("HOLDFAST_RESTART", "0"))


def keeper():
    for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        if b"holdfast._keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)


def die(how):
    if how.startswith("SIG"):
        os.kill(me, getattr(signal, how))
    elif how == "abort":
        os.abort()
    elif how == "raise":
        raise ValueError("planted")
    elif how == "no memory":
        raise MemoryError
    elif how == "exit":
        sys.exit(1)
    elif how == "leave":
        os._exit(3)
    elif how == "with keeper":
        os.kill(keeper(), signal.SIGKILL)
        os.kill(me, signal.SIGKILL)
    elif how == "without keeper":
        os.kill(keeper(), signal.SIGKILL)
        os._exit(1)
    elif how == "null":
        ctypes.string_at(0)
    elif how == "by a child":
        subprocess.run(["sh", "-c", f"kill -9 {me}"])
    elif how == "any moment":
        threading.Timer(0.004, os.kill, (me, signal.SIGKILL)).start()
        return
    elif how.startswith("cgroup "):
        hog = [bytearray(8 << 20) for _ in range(1000)]
    time.sleep(20)


if life < len(deaths) and deaths[life].startswith("cgroup "):
    Path(deaths[life].removeprefix("cgroup "), "cgroup.procs").write_text(str(me))
weights = make_weights()
settings = holdfast.Settings(max_overhead=1.0)
with holdfast.Run(sys.argv[1], settings=settings, weights=weights) as run:
    for step in run.steps(int(sys.argv[2])):
        train_one(weights)
        if life < len(deaths) and step >= 6 * (life + 1):
            die(deaths[life])
        time.sleep(0.005)
show_hash(weights)
"""
_DEATHS = (
    *("SIGKILL", "SIGSEGV", "abort", "raise", "leave", "with keeper", "SIGBUS"),
    *("SIGILL", "null", "any moment", "exit", "no memory", "SIGFPE", "by a child"),
    *("without keeper", "SIGKILL", "leave", "SIGABRT", "raise"),
)


def test_after_twenty_deaths_of_all_kinds_the_state_is_equal_to_the_bit(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    state = tmp_path / "state"
    paths = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    env = environment(PYTHONPATH=paths, HOLDFAST_STATE=str(state), HOLDFAST_PAUSE_SECONDS="0.001")
    undisturbed = start(tmp_path / "undisturbed", 150, script=script, env=env).state_hash()
    supervise = (str(PROGRAM), "run", "--max-restarts", "50", "--")

    def train(*deaths: str) -> None:
        folder = tmp_path / "run"
        trainer = start(folder, 150, *deaths, script=script, env=env, prefix=supervise)
        assert trainer.wait(240) == 0, trainer.output
        led = [json.loads(path.read_text()) for path in sorted(state.glob("led/*/*/led.json"))]
        statuses = [life["status"] for life in led]
        assert len(statuses) == len(deaths) + 1, trainer.output
        assert 0 not in statuses[:-1]
        assert len(journal_events(folder, "start")) == len(deaths) + 1
        assert trainer.state_hash() == undisturbed
        assert not keepers(folder)

    if why_not():  # the twentieth needs a cgroup of its own
        train(*_DEATHS, "SIGSEGV")
        return
    with limited_memory(300 << 20) as group:
        train(*_DEATHS[:9], f"cgroup {group.folder}", *_DEATHS[9:])
