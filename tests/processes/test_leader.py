"""`holdfast run`: the leader passes signals on, and is the last to leave."""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.crash.stages import has_snapshot
from tests.processes.conftest import EAGER, LIGHT
from tests.processes.leading import HEADER, LEAD, send_and_see_it_taken, start_led
from tests.support import (
    Trainer,
    checkpoint_steps,
    environment,
    is_gone,
    keepers,
    wait_until,
    words_of,
)
from tests.terminal import CTRL_C, ForegroundJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for its keepers")


@pytest.fixture
def led(start: Callable[..., Trainer], tmp_path: Path) -> Callable[[str], Trainer]:
    """Start a script that a test spells out, led by `holdfast run`."""
    return functools.partial(start_led, start, tmp_path)


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize("status", [0, 3, 75])
def test_the_status_of_the_command_is_passed_on(status):
    assert subprocess.run([*LEAD, "sh", "-c", f"exit {status}"]).returncode == status


@pytest.mark.parametrize("name", ["KILL", "SEGV", "TERM"])
def test_a_command_that_a_signal_ends_is_128_and_its_number(name):
    number = getattr(signal, f"SIG{name}")
    done = subprocess.run([*LEAD, "sh", "-c", f"ulimit -c 0; kill -{name} $$"])
    assert done.returncode == 128 + number


def test_it_takes_the_command_without_the_dashes_too():
    assert subprocess.run([*LEAD[:2], "sh", "-c", "exit 4"]).returncode == 4


def test_a_program_that_is_not_there_is_a_sentence_and_127():
    done = subprocess.run([*LEAD, "no-such-program"], capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr.startswith("holdfast: 'no-such-program': there is no such program.\n")
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_program_is_126(tmp_path):
    (tmp_path / "data").write_text("1 2 3\n")
    done = subprocess.run([*LEAD, tmp_path / "data"], capture_output=True, text=True)
    assert done.returncode == 126
    assert len(done.stderr.splitlines()) == 2


def test_without_a_command_it_explains_itself():
    for words in (LEAD, LEAD[:-1], LEAD[:2], [*LEAD[:2], "--max-restarts", "few", "--", "true"]):
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("Usage: holdfast run")


def test_it_starts_without_click_and_rich():
    look = (
        "import sys; sys.argv = ['holdfast', 'run', '--max-restarts', '2', '--', 'true']\n"
        "from holdfast._tools.cli import main\n"
        "try: main()\n"
        "except SystemExit as leaving: assert leaving.code == 0\n"
        "print({'click', 'rich', 'psutil', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_the_command_knows_its_leader_and_has_a_session_of_its_own(led):
    """So that a signal to the leader's whole group reaches it once."""
    trainer = led("tell('led by', os.environ['HOLDFAST_LEADER'], os.getsid(0) == os.getpid())")
    assert trainer.wait_for("led by").split()[2:] == [str(trainer.pid), "True"]
    assert trainer.wait() == 0


def test_a_task_of_slurm_gets_its_rank_and_torchrun_gets_none(tmp_path):
    step = {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"},
        **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
        **{"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    }
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {k: v for k, v in environment().items() if k not in names}
    show = "echo ${RANK-none} ${WORLD_SIZE-none} ${LOCAL_RANK-none} ${MASTER_ADDR-none}"

    def say(*command: str | Path, **extra: str) -> str:
        env = {**inherited, **step, **extra}
        return subprocess.run([*LEAD, *command], env=env, capture_output=True, text=True).stdout

    assert say("sh", "-c", show) == "3 4 1 n1\n"
    assert say("sh", "-c", show, RANK="9", WORLD_SIZE="10").startswith("9 10 ")
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\n{show}\n")
    (tmp_path / "torchrun").chmod(0o755)
    assert say(tmp_path / "torchrun") == "none none none none\n"


def test_sigterm_is_passed_on_once_though_it_comes_twice(led, tmp_path):
    """Within a second. Here, that second is as long as a busy machine needs to send both."""
    long_second = (
        "from holdfast._supervise import attempt; from holdfast._tools.cli import main\n"
        "attempt._SAME_SECONDS = 600.0; main()"
    )
    trainer = led(
        """\
        hear("TERM")
        tell("ready")
        wait_for(here / "gate")
        sys.exit(143)
        """,
        prefix=(sys.executable, "-c", long_second, *LEAD[1:]),
    )
    trainer.wait_for("ready")
    send_and_see_it_taken(trainer, signal.SIGTERM)
    trainer.wait_for("heard SIGTERM")
    send_and_see_it_taken(trainer, signal.SIGTERM)
    (tmp_path / "gate").touch()
    assert trainer.wait() == 143
    assert trainer.output.count("heard SIGTERM") == 1


def test_two_interrupts_are_two_wishes(led, tmp_path):
    trainer = led("""\
        hear("INT")
        tell("ready")
        wait_for(here / "gate")
        """)
    trainer.wait_for("ready")
    for count in (1, 2):
        send_and_see_it_taken(trainer, signal.SIGINT)
        wait_until(lambda count=count: trainer.output.count("heard SIGINT") == count)
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0


def test_sigterm_ends_a_command_without_handlers_at_once(led):
    trainer = led("tell('ready'); time.sleep(60)")
    trainer.wait_for("ready")
    trainer.send(signal.SIGTERM)
    assert trainer.wait(10) == 143


def test_the_leader_waits_for_the_keeper_of_a_trainer_that_was_killed(folder, gate, light):
    trainer = light(
        *(folder, "--total", 40, "--hold-at", 8, "--sleep", 0.06, "--settings", EAGER),
        prefix=LEAD,
    )
    in_memory = int(trainer.wait_for("holding").split()[1])
    (keeper,) = keepers(folder)
    (command,) = [p for p in _below(trainer.pid) if str(LIGHT) in words_of(p)]
    keeper.suspend()  # so that whoever does not wait for it is found out
    command.kill()
    wait_until(lambda: is_gone(command))
    with pytest.raises(subprocess.TimeoutExpired):
        trainer.process.wait(1.0)
    assert keeper.ppid() == trainer.pid
    keeper.resume()
    assert trainer.wait() == 137
    assert not keeper.is_running()
    assert checkpoint_steps(folder)[-1] == in_memory


def test_a_trainer_behind_a_shell_that_sigterm_kills_saves_and_is_waited_for(folder, gate, start):
    words = f"{sys.executable} {LIGHT} {folder} --gate {gate} --sleep 0.02 --total 10000; true"
    trainer = start(script=LIGHT, prefix=(*LEAD, "sh", "-c", words))
    trainer.ready()
    wait_until(lambda: has_snapshot(folder), what="a step to save")
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 143
    assert not keepers(folder)
    assert checkpoint_steps(folder)


def test_orphans_are_reaped_while_the_command_lives(led, tmp_path):
    trainer = led("""\
        # The grandchild outlives its parent and ends.
        subprocess.run(["sh", "-c", "sleep 0.2 & echo orphan $!"])
        tell("ready")
        wait_for(here / "gate")
        """)
    orphan = int(trainer.wait_for("orphan").split()[1])
    trainer.wait_for("ready")
    wait_until(lambda: not psutil.pid_exists(orphan), 10, "the end of the orphan")
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0


def test_an_orphan_that_is_no_keeper_is_not_waited_for(led):
    trainer = led("""\
        apart = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        tell("orphan", subprocess.Popen(["sleep", "60"], **apart).pid)
        os._exit(0)
        """)
    orphan = int(trainer.wait_for("orphan").split()[1])
    try:
        assert trainer.wait(20) == 0
        assert psutil.pid_exists(orphan)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_an_interrupt_that_was_ignored_from_the_start_stays_ignored(led, tmp_path):
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    path = tmp_path / "script.py"
    path.write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        "print('ignored', signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True)\n"
        "while not Path(sys.argv[1], 'gate').exists(): time.sleep(0.005)\n"
    )
    process = subprocess.Popen(
        [*LEAD, sys.executable, path, tmp_path], stdout=subprocess.PIPE, text=True, **ignored
    )
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "ignored True\n"
        process.send_signal(signal.SIGINT)
        (tmp_path / "gate").touch()
        assert process.wait(20) == 0


def test_ctrl_c_at_a_terminal_is_heard_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEADER + "hear('INT')\ntell('ready')\nwait_for(here / 'gate')\nsys.exit(5)\n")
    job = ForegroundJob([*LEAD, sys.executable, str(script), str(tmp_path)])
    try:
        wait_until(lambda: b"ready" in job.raw, 20)
        job.press(CTRL_C)
        wait_until(lambda: b"heard SIGINT" in job.raw, 20)
        time.sleep(0.3)  # for one that should not come
        (tmp_path / "gate").touch()
        assert job.wait() == 5
        assert job.raw.count(b"heard") == 1
        assert b"Traceback" not in job.raw
    finally:
        job.end()


def test_ctrl_c_at_a_terminal_ends_a_plain_command():
    job = ForegroundJob([*LEAD, "sh", "-c", "echo ready; sleep 60"])
    try:
        # A shell that is just about to start something may keep the signal to itself.
        wait_until(lambda: "sleep" in [process.name() for process in _below(job.pid)], 20)
        job.press(CTRL_C)
        assert job.wait() == 130
        assert b"Traceback" not in job.raw
    finally:
        job.end()


def test_a_terminal_that_is_closed_tells_the_command(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        HEADER
        + "signal.signal(signal.SIGHUP, lambda *_: (here / 'hung up').touch())\n"
        + "(here / 'ready').touch()\nwait_for(here / 'hung up')\n(here / 'done').touch()\n"
    )
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*LEAD, sys.executable, str(script), str(tmp_path)],
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    wait_until(lambda: (tmp_path / "ready").exists(), 20)
    os.close(master)
    assert process.wait(20) == 0
    assert (tmp_path / "done").exists()
