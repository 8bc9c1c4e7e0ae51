"""`holdfast run --hang-timeout`: what hangs is ended, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cgroups import freezer, why_no_freezer
from tests.cli.command import PROGRAM
from tests.processes.conftest import EAGER, LIGHT
from tests.support import Trainer, environment, keepers, wait_until, words_of
from tests.terminal import ForegroundJob

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it steps aside"),
]
RUN = (str(PROGRAM), "run")
SECOND = (*RUN, "--hang-timeout", "1", "--")
# Found after the timeout, and two looks that are three seconds apart; on a busy machine.
FOUND_SECONDS = 40
_HANGS = """\
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def wait_for_ever():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the line
print("ready", flush=True)
wait_for_ever()
"""
_LINE = _HANGS.splitlines().index("    lock.acquire()  # the line") + 1


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def led(tmp_path: Path, state: Path, start: Callable[..., Trainer]) -> Callable[..., Trainer]:
    """Start a script that a test spells out, without a run of holdfast."""

    def begin(body: str, *within: str, prefix: tuple[str, ...] = SECOND) -> Trainer:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(body))
        env = environment(HOLDFAST_STATE=str(state))
        return start(script=path, prefix=(*prefix, *within), env=env)

    return begin


def _lives(state: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(state.glob("led/*/life-*/led.json"))]


def _script_of(trainer: Trainer) -> psutil.Process:
    """The command, below its leader and whatever is between."""

    def look() -> psutil.Process | None:
        for process in psutil.Process(trainer.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-1].endswith("script.py"):
                    return process
        return None

    return wait_until(look, 20, "the script")


def _outlives(trainer: Trainer, seconds: float = 9.0) -> bool:
    """Whether it is still there when it would have been ended long ago."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        trainer.process.wait(seconds)
        return False
    return True


# -- a command that opens no run --------------------------------------------------------


@pytest.mark.nightly  # below with a run
def test_a_command_that_hangs_is_named_and_killed_with_all_that_it_has_started(led, state):
    # The shell dies of SIGTERM at once; what it has started ignores it.
    trainer = led(_HANGS, "sh", "-c", '"$@"; true', "sh")
    trainer.wait_for("ready")
    script = _script_of(trainer)
    assert trainer.wait(FOUND_SECONDS) == 77, trainer.output
    assert not script.is_running()
    assert "holdfast: it hangs: " in trainer.output
    assert f"script.py:{_LINE}" in trainer.output
    assert trainer.output.count(f"script.py:{_LINE}") == 1, trainer.output
    assert "not starting it again: no run of holdfast was opened" in trainer.output
    (life,) = _lives(state)
    assert life["hang"]["cause"].startswith("hang-")
    assert life["hang"]["by"] == "leader"
    assert life["hang"]["patience"] == 1.0
    (kept,) = state.glob("led/*/life-0001/hang.json")
    assert json.loads(kept.read_text())["looks"][0]["processes"]
    # Those that looked at it are none of its processes.
    assert {each["comm"] for each in life["processes"]} <= {
        "sh",
        "python",
        Path(sys.executable).name,
    }


@pytest.mark.nightly  # of a run: test_a_run_that_hangs_is_saved_ended_and_goes_on_to_the_same_bits
def test_it_is_started_again_where_that_is_wanted(led, state):
    prefix = (*RUN, "--max-restarts", "1", "--hang-timeout", "1", "--")
    trainer = led(
        """\
        import os, sys, threading
        if os.environ["HOLDFAST_RESTART"] == "0":
            threading.Event().wait()
        print("trained", flush=True)
        """,
        prefix=prefix,
    )
    assert trainer.wait(FOUND_SECONDS) == 0, trainer.output
    assert "restart 1 of 1" in trainer.output
    assert [life["status"] for life in _lives(state)] == [-signal.SIGTERM, 0]


@pytest.mark.nightly  # tests/unit/keeper/test_hang_judge.py
def test_whatever_prints_or_computes_is_no_hang(led, tmp_path):
    trainer = led(
        """\
        import time
        end = time.monotonic() + 4.5
        while time.monotonic() < end:  # a quarter of a core, and not a word
            until = time.process_time() + 0.05
            while time.process_time() < until: pass
            time.sleep(0.15)
        for _ in range(6):  # a word now and then, and no work
            print("still here", flush=True)
            time.sleep(0.75)
        """
    )
    assert trainer.wait(FOUND_SECONDS) == 0, trainer.output
    assert "hang" not in trainer.output


@pytest.mark.nightly  # of a run: test_hangs.py
def test_a_reader_that_does_not_read_is_no_hang_of_the_command(state):
    env = environment(HOLDFAST_STATE=str(state))
    process = subprocess.Popen(
        [*SECOND, sys.executable, "-c", "print('x' * (1 << 20)); print('end')"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process:
        assert process.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(9)
        assert process.stdout.read().endswith(b"x\nend\n")
        assert process.wait(20) == 0


@pytest.mark.nightly  # of a run: test_a_run_that_hangs_says_so_and_is_left_alone_without_the_option
def test_without_the_option_nothing_is_ended(led, state):
    trainer = led(_HANGS, prefix=(*RUN, "--"))
    trainer.wait_for("ready")
    assert _outlives(trainer, 7.0)
    assert "holdfast" not in trainer.output
    _script_of(trainer).kill()
    assert trainer.wait() == 137


# -- held by a person -------------------------------------------------------------------


@pytest.mark.nightly  # the leader waits in the same way at a prompt of pdb: below
def test_a_command_that_is_stopped_is_waited_for(led):
    trainer = led(
        """\
        import time
        print("ready", flush=True)
        time.sleep(2)
        """
    )
    trainer.wait_for("ready")
    script = _script_of(trainer)
    script.suspend()
    trainer.wait_for("the command is stopped (SIGSTOP): no hang.", FOUND_SECONDS)
    assert _outlives(trainer, 6.0)
    assert trainer.output.count("no hang") == 1
    script.resume()
    assert trainer.wait() == 0


_PLAIN = "x = 41\nbreakpoint()\nprint('went on with', x + 1)\n"
_IN_A_RUN = """\
import sys, time
import holdfast
state = {"x": 0}
with holdfast.Run(sys.argv[1], state=state) as run:
    for step in run.steps(42):
        if step == 20:
            breakpoint()
        state["x"] += 1
        time.sleep(0.01)
print("went on with", state["x"])
"""


# A run at a prompt of pdb is in tests/hangs/test_held.py; the leader waits for either in one way.
@pytest.mark.nightly  # tests/unit/keeper/test_hang_judge.py
@pytest.mark.parametrize(
    "text",
    [_PLAIN, pytest.param(_IN_A_RUN, marks=pytest.mark.nightly)],
    ids=["plain", "in a run"],
)
def test_a_prompt_of_pdb_is_waited_for_however_long(tmp_path, folder, state, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    env = environment(HOLDFAST_STATE=str(state))
    job = ForegroundJob([*SECOND, sys.executable, str(script), str(folder)], env=env)
    try:
        wait_until(lambda: b"(Pdb)" in job.raw, 20)
        wait_until(lambda: b"no hang" in job.raw, FOUND_SECONDS, "the word of the leader")
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(7)
        assert job.raw.count(b"no hang") == 1
        job.press("c\n")
        assert job.wait() == 0
        assert b"went on with 42" in job.raw
    finally:
        job.end()


@pytest.mark.nightly  # a tracer is seen in test_look.py; what is held is waited for as above
@pytest.mark.layer("interactive")
@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt install gdb")
def test_a_command_that_gdb_holds_is_waited_for_and_judged_afterwards(led):
    trainer = led(_HANGS)
    trainer.wait_for("ready")
    words = ["gdb", "-q", "-nx", "-batch", "-p", str(_script_of(trainer).pid)]
    gdb = subprocess.Popen(
        [*words, "-ex", "shell sleep 60"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        trainer.wait_for("is held by gdb: no hang", FOUND_SECONDS)
        assert _outlives(trainer, 6.0)
        assert trainer.output.count("no hang") == 1
    finally:
        os.killpg(gdb.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            gdb.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(gdb.pid, signal.SIGKILL)
        gdb.wait()
    assert trainer.wait(FOUND_SECONDS) == 77, trainer.output
    assert "it hangs" in trainer.output


# -- a run --------------------------------------------------------------------------------


@pytest.mark.nightly  # tests/hangs/test_one_process.py
def test_a_run_that_hangs_says_so_and_is_left_alone_without_the_option(folder, gate, light, state):
    """Its interpreter is held: it cannot speak, so its keeper does."""
    trainer = light(
        *(folder, "--total", 40, "--hold-at", 20, "--sleep", 0.02, "--stick", "with-gil"),
        *("--once", "--settings", '{"hang_timeout": 4}'),
        prefix=(*RUN, "--"),
        env=environment(HOLDFAST_STATE=str(state)),
    )
    trainer.wait_for("light.py:", FOUND_SECONDS)
    trainer.wait_for(f"holdfast why {folder}")
    assert _outlives(trainer, 4.0)
    assert trainer.output.count("holds the interpreter") == 1
    for process in psutil.Process(trainer.pid).children():
        if str(LIGHT) in words_of(process):
            process.kill()
    assert trainer.wait() == 0, trainer.output  # it was killed, and goes on


# Where the interpreter is free, the run leaves by itself: test_hangs.py.
# Over 5 s: a hang is called one after its time and two looks, and a second life follows.
@pytest.mark.parametrize(
    "stick", ["with-gil", pytest.param("without-gil", marks=pytest.mark.nightly)]
)
def test_a_run_that_hangs_is_saved_ended_and_goes_on_to_the_same_bits(
    folder, gate, light, light_reference, state, stick
):
    arguments = ("--total", 60, "--hold-at", 30, "--sleep", 0.02, "--settings", EAGER)
    env = environment(HOLDFAST_STATE=str(state), HOLDFAST_PAUSE_SECONDS="0.01")
    trainer = light(folder, *arguments, "--once", "--stick", stick, prefix=SECOND, env=env)
    assert trainer.wait(FOUND_SECONDS) == 0, trainer.output
    assert f"hash {light_reference(60)}" in trainer.output
    first, second = _lives(state)
    assert first["decision"]["restart"], trainer.output
    assert "light.py:" in trainer.output
    in_memory = int(trainer.wait_for("holding").split()[1])
    assert f"ready {in_memory} {in_memory} 2" in trainer.output
    assert not keepers(folder)
    assert second["status"] == 0


@pytest.mark.nightly  # only here
def test_a_run_whose_keeper_is_gone_is_watched_by_its_leader(
    folder, gate, light, light_reference, state
):
    """A trainer that hangs cannot replace it."""
    arguments = ("--total", 60, "--hold-at", 30, "--sleep", 0.02, "--settings", EAGER)
    env = environment(HOLDFAST_STATE=str(state), HOLDFAST_PAUSE_SECONDS="0.01")
    trainer = light(folder, *arguments, "--once", "--stick", "with-gil", prefix=SECOND, env=env)
    trainer.wait_for("holding")
    for keeper in keepers(folder):
        keeper.kill()
    assert trainer.wait(FOUND_SECONDS) == 0, trainer.output
    assert f"hash {light_reference(60)}" in trainer.output
    assert _lives(state)[0]["hang"]["by"] == "leader", trainer.output


# -- what cannot be ended ---------------------------------------------------------------------


@pytest.fixture
def frozen() -> Iterator[Any]:
    if reason := why_no_freezer():
        pytest.skip(reason)
    with freezer() as group:
        if group.version == 2:
            pytest.skip("a frozen process of cgroup v2 dies of SIGKILL")
        yield group


@pytest.mark.nightly  # only here: needs the freezer of cgroup v1
def test_a_command_that_survives_sigkill_is_left_where_it_is(led, state, frozen):
    trainer = led(_HANGS)
    trainer.wait_for("ready")
    script = _script_of(trainer)
    trainer.wait_for("ending it (--hang-timeout)", FOUND_SECONDS)
    frozen.freeze(script.pid)  # as a dead file system would hold it
    assert trainer.wait(FOUND_SECONDS) == 77
    assert trainer.output.count(f"pid {script.pid} survives SIGKILL") == 1
    assert script.is_running()
    (life,) = _lives(state)
    assert life["unkillable"] == [script.pid]
    assert life["decision"]["restart"] is False
    frozen.thaw()
    script.wait(10)
