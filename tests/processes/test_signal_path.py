"""`holdfast doctor -- COMMAND` sends real signals through real launchers, and trains nothing."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from holdfast._tools.doctor.check import Check
from holdfast._tools.doctor.signals.path import check_signal_path
from tests.support import environment, wait_until

TERM, INT, USR1, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
# The first second of a real one is imports.
TRAIN = "import time; time.sleep(1); open('trained', 'w'); time.sleep(60)\n"
PYTHON = f"'{sys.executable}'"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux and its /proc")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a training, in which nothing may happen; and a /tmp to look for leftovers."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    return work


def write(place: Path, name: str, *lines: str) -> str:
    (place / name).write_text("\n".join(["#!/bin/bash", *lines, "touch after", ""]))
    return name


def try_out(place: Path, *command: str, signals=(TERM,)) -> dict[str, Check]:
    """The checks by name, and the proof that nothing else has happened."""
    found = check_signal_path(command, folder=place, signals=signals, arrive_seconds=2)
    check_nothing_left(place)
    return {each.name: each for each in found}


def check_nothing_left(place: Path) -> None:
    assert not (place / "trained").exists()
    assert not (place / "after").exists(), "the script went on behind its training"
    assert not list((place.parent / "tmp").iterdir())
    assert not list(place.glob(".holdfast*"))
    assert not processes_of(place)


def processes_of(place: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(place):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_all_signals_reach_a_training_that_is_the_command_itself(place):
    found = try_out(place, sys.executable, "train.py", signals=(USR1, USR2, INT, TERM))
    for number in (USR1, USR2, INT, TERM):
        check = found[f"signal {number.name}"]
        assert (check.state, check.data["times"]) == ("ok", 1), check
    assert "handles no signal" in found["signal handlers"].found


def test_a_shell_that_waits_is_named_with_the_line_to_change(place):
    job = write(place, "job.sh", "cd .", f"{PYTHON} train.py --steps 3")
    check = try_out(place, "bash", job)["signal SIGTERM"]
    assert check.state == "fail"
    assert check.data["swallowed_by"] == "bash job.sh"
    assert check.data["hops"] == ["bash job.sh", "train.py"]
    assert "bash job.sh dies of it, and train.py runs on" in check.found
    assert "job.sh:3: exec python train.py" in check.remedy


def test_exec_puts_it_right(place):
    job = write(place, "job.sh", f"exec {PYTHON} train.py")
    assert try_out(place, "bash", job)["signal SIGTERM"].state == "ok"


def test_holdfast_run_puts_it_right(place):
    job = write(place, "job.sh", f"{PYTHON} train.py")
    command = [sys.executable, "-m", "holdfast", "run", "--", "bash", job]
    found = try_out(place, *command, signals=(USR2, INT, TERM))
    for number in (USR2, INT, TERM):
        check = found[f"signal {number.name}"]
        assert check.state == "ok", check
        assert check.data["hops"] == ["holdfast run", "bash job.sh", "train.py"]


@pytest.mark.nightly  # tests/unit has the remedies, above is the real path
def test_in_a_pipe_and_in_the_background_exec_alone_is_no_remedy(place):
    job = write(place, "job.sh", "S=train.py", f"{PYTHON} train.py 2>&1 | tee log")
    check = try_out(place, "bash", job)["signal SIGTERM"]
    assert check.remedy.startswith("job.sh:3: exec python train.py … > >(tee …) in place of")
    job = write(place, "job.sh", f"exec {PYTHON} train.py > >(tee log) 2>&1")
    assert try_out(place, "bash", job)["signal SIGTERM"].state == "ok"
    job = write(place, "job.sh", f"{PYTHON} train.py > log 2>&1 &", "wait")
    found = try_out(place, "bash", job, signals=(INT, TERM))
    assert "without &" in found["signal SIGTERM"].remedy
    # A shell has Ctrl-C ignored in its background, and holdfast.Run leaves it so.
    check = found["signal SIGINT"]
    assert (check.state, check.data["arrived"]) == ("warn", 0), check
    assert "train.py runs on" in check.found


def test_a_trap_that_has_to_wait_is_told_from_one_that_passes_on(place):
    late = write(place, "late.sh", "trap 'echo' TERM", f"{PYTHON} train.py")
    check = try_out(place, "bash", late)["signal SIGTERM"]
    assert (check.state, check.data["swallowed_by"]) == ("fail", "bash late.sh")
    assert "runs its trap only when" in check.found
    good = write(place, "good.sh", "trap 'kill $p' TERM", f"{PYTHON} train.py & p=$!", "wait; wait")
    assert try_out(place, "bash", good)["signal SIGTERM"].state == "ok"


def test_what_a_trap_asks_of_slurm_is_not_passed_on(place, tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("scontrol", "sbatch"):
        (tools / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/asked-$1\n")
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    trap = "trap 'scontrol requeue 7; kill -USR1 $p; scontrol ping' USR1"
    job = write(place, "job.sh", trap, f"{PYTHON} train.py & p=$!", "wait; wait")
    check = try_out(place, "bash", job, signals=(USR1,))["signal SIGUSR1"]
    assert check.state == "ok"
    wait_until((tmp_path / "asked-ping").exists, 5, "a harmless question")
    assert not (tmp_path / "asked-requeue").exists()
    assert check.data["asked_of_slurm"] == ["scontrol requeue 7"]


@pytest.mark.nightly  # above: each signal by itself
def test_the_signal_of_the_job_is_the_one_that_counts(place):
    lines = ("#SBATCH --signal=B:USR1@90", f"{PYTHON} prepare.py", f"{PYTHON} train.py")
    (place / "prepare.py").write_text("open('prepared', 'w')")
    found = check_signal_path(
        ["bash", write(place, "job.sh", *lines)], folder=place, arrive_seconds=2
    )
    states = {each.name: each.state for each in found if each.name.startswith("signal SIG")}
    assert states == {"signal SIGUSR1": "fail", "signal SIGINT": "ok", "signal SIGTERM": "fail"}
    assert not (place / "prepared").exists()
    check_nothing_left(place)


def test_a_training_that_the_probe_cannot_replace_is_ended_at_once(place):
    for hidden in ("o='-u PYTHON''PATH'", "o=-''i", "read e <<< -I"):
        job = write(place, "job.sh", hidden, f"exec env $o {PYTHON} $e train.py")
        check = try_out(place, "bash", job)["signal path"]
        assert (check.state, "for real, and was ended" in check.found) == ("warn", True), check
    job = write(place, "job.sh", "export PYTHONPATH=$PWD", f"{PYTHON} train.py")
    assert "job.sh:2 keeps PYTHONPATH from" in try_out(place, "bash", job)["signal path"].found


def test_a_command_that_never_trains_is_said(place):
    job = write(place, "job.sh", "echo no module; exit 3", f"{PYTHON} train.py")
    check = try_out(place, "bash", job)["signal path"]
    assert check.state == "fail"
    assert "status 3 before train.py was reached; it said last: no module" in check.found
    assert "no Python script" in try_out(place, "true")["signal path"].found
    for command in (["no.py"], ["-m", "no.train"]):
        check = try_out(place, sys.executable, *command)["signal path"]
        assert (check.state, "there is no" in check.found) == ("fail", True), check
    assert try_out(place, "no-such-program")["signal path"].state == "fail"
    assert "cannot be started" in try_out(place, "./nothing", "train.py")["signal path"].found


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: The server socket has failed to bind to 0.0.0.0:{} "
        "(errno: 98 - Address already in use).",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: {}, useIpv6: false, code: -98, name: EADDRINUSE",
    ],
)
def test_the_owner_of_the_port_that_a_launcher_wants_is_named(place, said):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = write(place, "job.sh", f"echo '{said.format(port)}' >&2", "exit 1", "python train.py")
        check = try_out(place, "bash", job)["signal path"]
    assert check.state == "fail"
    assert f"port {port} is in use by" in check.found
    assert f"pid {os.getpid()}" in check.found
    assert f"--master-port={port + 1}" in check.remedy


@pytest.mark.parametrize("number", [INT, TERM, signal.SIGKILL])
def test_whoever_interrupts_the_doctor_leaves_nothing_behind(place, number):
    inner = write(place, "inner.sh", "trap '' TERM", f"{PYTHON} train.py")
    job = write(place, "job.sh", f"bash {inner}")
    program = (
        "from holdfast._tools.doctor.signals.path import check_signal_path as check\n"
        f"check(['bash', {job!r}], arrive_seconds=60)"
    )
    doctor = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=place,
        env=environment(TMPDIR=str(place.parent / "tmp")),
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(INT, signal.default_int_handler),
    )
    try:
        wait_until(lambda: list(place.parent.glob("tmp/*/told/*")), 30, "the probe")
        doctor.send_signal(number)
        assert doctor.wait(20) in (-number, 128 + number)
    finally:
        doctor.kill()
        doctor.wait()
    wait_until(lambda: not processes_of(place), 5, "the end of all")
    check_nothing_left(place)
