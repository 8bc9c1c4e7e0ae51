"""`holdfast run` starts a run again, by the cause of its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast._store.folder.supervised import (
    is_death_recorded,
    tell_leader,
    tell_leader_of_death,
)
from tests.cli.command import PROGRAM
from tests.processes.conftest import EAGER, LIGHT
from tests.processes.leading import beaten_step
from tests.support import (
    Trainer,
    checkpoint_steps,
    environment,
    is_gone,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
    words_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it steps aside")
SUPERVISE = (str(PROGRAM), "run", "--")
# A training that comes to a bad end in some of its lives, as `ends` says: {life: (step, code)}.
_ENDS = """\
import os, signal, sys, time
from pathlib import Path
import numpy
import holdfast

ends = {ends!r}
life = int(os.environ["HOLDFAST_RESTART"]) + 1
weights = numpy.zeros(8)
settings = holdfast.Settings(max_overhead=1.0)
with holdfast.Run(sys.argv[1], settings=settings, weights=weights) as run:
    for step in run.steps({total}):
        weights += numpy.random.standard_normal(8)
        at, code = ends.get(life, (None, ""))
        if at is not None and step >= at:
            exec(code)
        time.sleep(0.01)
print("trained in life", life, flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# Its first life is killed; a later one opens a gate at its start, or when it has read the state.
_GATED = """\
import os, signal, sys, time
from pathlib import Path
import numpy
import holdfast
from holdfast._store.read import find

place, life = Path(__file__).parent, int(os.environ["HOLDFAST_RESTART"]) + 1
read = find.read_candidate

def then_open(*args, **options):
    found = read(*args, **options)
    (place / "gate").touch()
    return found

if life > 1 and sys.argv[2] == "start":
    (place / "gate").touch()
elif life > 1:
    find.read_candidate = then_open
weights = numpy.zeros(8)
settings = holdfast.Settings(max_overhead=1.0, keep_memory=60)
with holdfast.Run(sys.argv[1], settings=settings, weights=weights) as run:
    for step in run.steps(60):
        weights += numpy.random.standard_normal(8)
        if life == 1 and step == 20:
            (place / "dying").touch()
            (place / "launcher").unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
print("trained in life", life, flush=True)
"""
# From the death on, a flush by the keeper waits for the gate.
_GATED_DISK = """\
import os, sys, time

if any("holdfast._keeper" in word for word in sys.orig_argv):
    flush, place = os.fsync, os.environ["GATED"]

    def fsync(descriptor):
        deadline = time.monotonic() + 60
        while os.path.exists(f"{place}/dying") and not os.path.exists(f"{place}/gate"):
            if time.monotonic() > deadline:
                open(f"{place}/in-vain", "w").close()
                break
            time.sleep(0.005)
        flush(descriptor)

    os.fsync = fsync
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def supervised(
    start: Callable[..., Trainer], folder: Path, tmp_path: Path, state: Path
) -> Callable[..., Trainer]:
    """Start a training under supervision; `ends` says which of its lives end where and how."""

    def begin(
        ends: dict[int, tuple[int, str]],
        *options: str,
        total: int = 60,
        within: tuple[str, ...] = (),
        **env: str,
    ) -> Trainer:
        script = tmp_path / "script.py"
        script.write_text(_ENDS.format(ends=ends, total=total))
        prefix = (*SUPERVISE[:2], *options, "--", *within)
        env = {"HOLDFAST_STATE": str(state), "HOLDFAST_PAUSE_SECONDS": "0.01", **env}
        return start(folder, script=script, prefix=prefix, env=environment(**env))

    return begin


def _lives(state: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(state.glob("led/*/life-*/led.json"))]


def test_after_a_kill_it_goes_on_at_once_and_all_of_it_is_noted(supervised, folder, state):
    trainer = supervised({1: (20, KILL), 2: (40, KILL)}, "--max-restarts", "1")
    assert trainer.wait() == 0, trainer.output
    assert "trained in life 3" in trainer.output
    assert [life["status"] for life in _lives(state)] == [-9, -9, 0]
    assert [life["decision"] for life in _lives(state)][-1] is None
    assert all(life["decision"]["pause"] == 0 for life in _lives(state)[:2])
    attempts = [folder / "attempts" / f"{number:04d}" for number in (1, 2, 3)]
    for number, attempt in enumerate(attempts, 1):
        noted = json.loads((attempt / "led.json").read_text())
        assert (noted["life"], noted["run"]["attempt"]) == (number, number)
    assert "a new run (attempt 1)" in (attempts[0] / "output.log").read_text()
    assert len(journal_events(folder, "start")) == 3
    assert "starting it again (the command is not at fault" in trainer.output
    assert f"More: holdfast why {folder}" in trainer.output


@pytest.fixture
def gated(
    start: Callable[..., Trainer], folder: Path, tmp_path: Path, state: Path
) -> Callable[..., Trainer]:
    def begin(opens: str, *prefix: str) -> Trainer:
        script = tmp_path / "script.py"
        script.write_text(_GATED)
        (tmp_path / "sitecustomize.py").write_text(_GATED_DISK)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        env = {"HOLDFAST_STATE": str(state), "GATED": str(tmp_path), "PYTHONPATH": path}
        prefix = (*SUPERVISE, *prefix)
        return start(folder, opens, script=script, prefix=prefix, env=environment(**env))

    return begin


@pytest.mark.parametrize("opens", ["start", "read"])
def test_the_next_life_begins_and_reads_while_the_last_state_is_still_being_written(
    gated, folder, tmp_path, opens
):
    trainer = gated(opens)
    assert trainer.wait() == 0, trainer.output
    assert "trained in life 2" in trainer.output
    assert not (tmp_path / "in-vain").exists()
    (death,) = journal_events(folder, "death")
    resumed = journal_events(folder, "start")[1]
    assert (resumed["source"], resumed["step"]) == ("memory", death["durable_step"])
    steps = [event["step"] for event in journal_events(folder, "checkpoint")]
    assert steps == sorted(steps)
    assert resumed["step"] in steps
    assert "starting it again (the command is not at fault" in trainer.output


def test_if_the_next_life_cannot_be_started_the_last_state_is_waited_for(gated, folder, tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    trainer = gated("nothing", str(launcher))
    trainer.wait_for("there is no such program")
    threading.Timer(1.0, (tmp_path / "gate").touch).start()
    assert trainer.wait() == 127
    assert not keepers(folder)
    (death,) = journal_events(folder, "death")
    assert death["durable_step"] in checkpoint_steps(folder)


def test_a_death_before_in_the_same_life_is_not_taken_for_that_of_the_newest_run(tmp_path):
    tell_leader(tmp_path, tmp_path / "run", 1, 0)
    tell_leader_of_death(tmp_path, os.getpid(), 1)
    assert is_death_recorded(tmp_path)
    tell_leader(tmp_path, tmp_path / "run", 2, 0)
    assert not is_death_recorded(tmp_path)


def test_a_crash_counts(supervised, state):
    crash = "raise ValueError('planted')"
    ends = {life: (10 * life, crash) for life in range(1, 4)}
    trainer = supervised(ends, "--max-restarts", "2", total=80)
    assert trainer.wait() == 1, trainer.output
    assert [life["decision"]["restart"] for life in _lives(state)] == [True, True, False]
    assert "not starting it again: it has been restarted 2 times." in trainer.output


@pytest.mark.nightly
def test_the_pauses_are_kept(supervised, state):
    trainer = supervised({1: (10, "os._exit(3)")}, HOLDFAST_PAUSE_SECONDS="1")
    assert trainer.wait() == 0, trainer.output
    first, second = _lives(state)
    assert 0.75 <= first["decision"]["pause"] <= 1.25
    assert second["began"] - first["ended"] >= first["decision"]["pause"]


def test_a_signal_in_a_pause_ends_it(supervised, state):
    trainer = supervised({1: (10, "os._exit(3)")}, HOLDFAST_PAUSE_SECONDS="50")
    trainer.wait_for("starting it again in")
    trainer.send(signal.SIGINT)
    assert trainer.wait(10) == 3
    assert len(_lives(state)) == 1


def test_a_training_gone_bad_is_never_restarted(supervised, state):
    trainer = supervised({1: (10, "raise SystemExit(65)")})
    assert trainer.wait() == 65, trainer.output
    assert len(_lives(state)) == 1


def test_an_error_before_the_first_step_is_never_restarted(supervised, state):
    trainer = supervised({1: (0, "run.no_such_thing()")})
    assert trainer.wait() == 1, trainer.output
    assert len(_lives(state)) == 1, trainer.output


@pytest.mark.nightly  # tests/unit/supervise/test_restarts.py
def test_three_lives_without_a_new_step_are_the_last(supervised, state):
    ends = dict.fromkeys(range(1, 20), (10, KILL))
    trainer = supervised(ends)
    assert trainer.wait() == 137, trainer.output
    assert len(_lives(state)) == 4  # the first made ten
    assert "3 attempts in a row have made no new step" in trainer.output


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_stop_is_a_stop(supervised, folder, state, name):
    trainer = supervised({}, total=100_000)
    wait_until(lambda: beaten_step(folder) > 1, 20, "a few steps")
    trainer.send(getattr(signal, f"SIG{name}"))
    assert trainer.wait() == {"TERM": 143, "INT": 130}[name]
    assert len(_lives(state)) == 1
    assert "holdfast why" not in trainer.output


def test_a_stop_from_elsewhere_is_a_stop_too(supervised, folder, state):
    trainer = supervised({}, total=100_000)
    wait_until(lambda: beaten_step(folder) > 1, 20, "a few steps")
    subprocess.run([PROGRAM, "stop", folder, "--wait"], check=True, capture_output=True)
    assert trainer.wait() == 130
    assert len(_lives(state)) == 1
    assert "holdfast why" not in trainer.output


def test_a_command_that_opens_no_run_has_one_life_unless_more_are_wanted(tmp_path, state):
    env = environment(HOLDFAST_STATE=str(state), HOLDFAST_PAUSE_SECONDS="0.01")
    script = f"echo x >> {tmp_path}/lives; exit 3"
    for options, lives in (((), 1), (("--max-restarts", "2"), 3)):
        (tmp_path / "lives").write_text("")
        command = [*SUPERVISE[:2], *options, "--", "sh", "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 3
        assert (tmp_path / "lives").read_text() == "x\n" * lives, done.stderr


def test_a_task_of_several_is_not_restarted(supervised, state):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    one_of_two = {**step, "SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}
    trainer = supervised({1: (20, KILL)}, **one_of_two)
    assert trainer.wait() == 137, trainer.output
    assert len(_lives(state)) == 1
    assert "holdfast: rank 0: " in trainer.output


def test_a_trainer_whose_leader_is_killed_saves_and_leaves(folder, gate, light):
    trainer = light(
        *(folder, "--total", 100_000, "--sleep", 0.02, "--settings", EAGER), prefix=SUPERVISE
    )
    trainer.ready()
    wait_until(lambda: beaten_step(folder) >= 5, 20, "a few steps")
    (command,) = [p for p in psutil.Process(trainer.pid).children() if str(LIGHT) in words_of(p)]
    trainer.kill()
    command.wait(20)
    wait_for_keeper_gone(folder)
    left = json.loads((folder / "attempts/0001/exit.json").read_text())
    assert left["how"] == "SIGTERM"
    assert checkpoint_steps(folder)[-1] == left["step"]


def test_a_script_that_knows_nothing_of_it_ends_with_its_leader(tmp_path):
    process = subprocess.Popen(
        [*SUPERVISE, "sh", "-c", "echo $$; exec sleep 60"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout:
        command = psutil.Process(int(process.stdout.readline()))
        process.kill()
        command.wait(10)


@pytest.mark.parametrize("how", ["killed", "terminated"])
def test_what_a_killed_shell_leaves_behind_is_ended_but_no_daemon(how):
    script = (
        "sleep 60 & echo $!; RANK=0 setsid sleep 60 & echo $!; "
        "(setsid sleep 60 >/dev/null & echo $!); echo $$; wait"
    )
    command = [*SUPERVISE, "sh", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        sleeps = [psutil.Process(int(process.stdout.readline())) for _ in range(3)]
        shell = psutil.Process(int(process.stdout.readline()))
        for each in sleeps:
            wait_until(lambda each=each: each.name() == "sleep", 10, "the sleep")
        if how == "killed":
            shell.kill()
        else:
            process.terminate()
        assert process.wait(20) == 128 + (signal.SIGKILL if how == "killed" else signal.SIGTERM)
    *ended, daemon = (is_gone(each) for each in sleeps)
    sleeps[2].kill()
    assert (ended, daemon) == ([True, True], False)


@pytest.mark.nightly  # above: the children of any command
def test_the_ranks_of_torchrun_end_with_the_leader(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "def leave(*_):\n"
        "    pathlib.Path(sys.argv[1], 'left' + os.environ['RANK']).touch()\n"
        "    os._exit(143)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "pathlib.Path(sys.argv[1], 'here' + os.environ['RANK']).touch()\n"
        "time.sleep(60)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*SUPERVISE, *torchrun, "--nproc-per-node=2", str(script), str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL, stderr=-3
    )
    with process:
        wait_until(lambda: len(list(tmp_path.glob("here*"))) == 2, 60, "both ranks")
        process.kill()
        wait_until(lambda: len(list(tmp_path.glob("left*"))) == 2, 20, "the ranks' saving")


def test_the_keeper_of_a_killed_trainer_has_left_before_the_next_life(supervised, folder, state):
    trainer = supervised({1: (20, KILL)})
    assert trainer.wait() == 0
    assert not keepers(folder)
    ends = [event["attempt"] for event in journal_events(folder, "start")]
    assert ends == [1, 2]


def test_out_of_memory_is_tried_once(supervised, state):
    from tests.cgroups import limited_memory, why_not

    if reason := why_not():
        pytest.skip(reason)
    eat = "hog = [bytearray(8 << 20) for _ in range(1000)]"
    with limited_memory(400 << 20) as group:
        ends = {life: (10 * life, eat) for life in (1, 2, 3)}
        trainer = supervised(ends, within=group.prefix)
        assert trainer.wait() == 137, trainer.output
    assert len(_lives(state)) == 2, trainer.output
    assert "it has been restarted once for want of memory" in trainer.output
