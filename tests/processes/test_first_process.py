"""A trainer as process 1 of a real PID namespace, and `holdfast run` in that place."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast._store.folder.attempts import read_json
from tests.often import few
from tests.support import (
    Trainer,
    checkpoint_steps,
    environment,
    journal_events,
    traced_steps,
    wait_until,
)

_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
_AS_USER = ["--user", "--map-root-user"]
_LONG = ("--total", 100000, "--sleep", 0.005)
# Makes orphans: a child starts a grandchild, is seen with it, and leaves it behind.
_ORPHANS = """
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", "import subprocess, sys, time; "
        "subprocess.Popen(['sleep', sys.argv[1]]); time.sleep(float(sys.argv[2]))", "6", "5"])
"""


def _prefix() -> tuple[str, ...] | None:
    if shutil.which("unshare") is None:
        return None
    for more in ([], _AS_USER):
        words = [*_UNSHARE[:1], *more, *_UNSHARE[1:]]
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return tuple(words)
    return None


@pytest.fixture(scope="module")
def container() -> tuple[str, ...]:
    """What starts a command as process 1."""
    found = _prefix()
    if found is None:
        pytest.skip("needs PID namespaces: unshare of util-linux, as root or with user namespaces")
    return found


@pytest.fixture
def started(container):
    """Starts a training as process 1, or something that leads it."""
    made: list[Trainer] = []

    def start(folder, *arguments, lead=()):
        trace = folder.with_suffix(".trace")
        prefix = (*container, *lead)
        trainer = Trainer(folder, *arguments, "--trace", trace, prefix=prefix)
        made.append(trainer)
        _wait_for_steps(trainer, trace)
        return trainer

    yield start
    for each in made:
        each.end()


def _wait_for_steps(trainer: Trainer, trace: Path) -> None:
    """Until it is in its loop: before it, a signal acts at once and nothing is saved."""
    trainer.ready()
    wait_until(lambda: len(traced_steps(trace)) > 2, what="steps")


def _first(trainer: Trainer) -> psutil.Process:
    """Process 1 of the container, as it is known outside."""
    (found,) = psutil.Process(trainer.pid).children()
    return found


def _lead() -> tuple[str, ...]:
    return (sys.executable, "-m", "holdfast", "run", "--")


# Over 5 s: real starts in a PID namespace.
@pytest.mark.parametrize("leads", few([False, True], [True]))
def test_sigterm_to_process_1_stops_with_everything_saved(started, tmp_path, leads):
    folder = tmp_path / "run"
    trainer = started(folder, *_LONG, lead=_lead() if leads else ())
    _first(trainer).send_signal(signal.SIGTERM)
    assert trainer.wait() == 143, trainer.output
    (stop,) = journal_events(folder, "stop")
    assert checkpoint_steps(folder)[-1] == stop["step"]


# Over 5 s: real starts in a PID namespace.
def test_a_trainer_under_holdfast_run_may_be_killed_and_the_keeper_saves(started, tmp_path):
    folder = tmp_path / "run"
    settings = ("--settings", '{"max_overhead": 1.0, "checkpoint_every": "10h"}')
    lead = (*_lead()[:-1], "--max-restarts", "0", "--")
    trainer = started(folder, *_LONG, *settings, lead=lead)
    beat = folder / "attempts/0001/heartbeat.json"
    wait_until(lambda: read_json(beat).get("memory_step"), what="a snapshot")
    (child,) = _first(trainer).children()
    child.kill()
    assert trainer.wait() == 137, trainer.output
    (death,) = journal_events(folder, "death")
    assert checkpoint_steps(folder) == [death["durable_step"]]


@pytest.mark.nightly  # test_exit_status.py
def test_sigquit_to_process_1_leaves_stacks_and_the_newest_snapshot(started, tmp_path):
    folder = tmp_path / "run"
    trainer = started(folder, *_LONG, "--settings", '{"max_overhead": 1.0}')
    trainer.wait_for("process 1 of its container")
    _first(trainer).send_signal(signal.SIGQUIT)
    assert trainer.wait() == 131, trainer.output
    stacks = [path.read_text() for path in folder.glob("attempts/*/stacks*")]
    assert any("train.py" in text for text in stacks)
    assert checkpoint_steps(folder)


@pytest.mark.nightly  # only here; above: signals in the run
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_after_the_run_a_signal_ends_process_1_as_it_would_any_other(container, tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nimport holdfast\n"
        "with holdfast.Run(sys.argv[1], state={'a': 1}) as run:\n"
        "    for step in run.steps(3):\n        pass\n"
        "print('closed', flush=True)\ntime.sleep(300)\n"
    )
    trainer = Trainer(tmp_path / "run", script=script, prefix=container)
    try:
        trainer.wait_for("closed")
        _first(trainer).send_signal(number)
        assert trainer.wait() == 128 + number, trainer.output
    finally:
        trainer.end()


@pytest.mark.nightly
@pytest.mark.parametrize("leads", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_no_orphan_stays_a_zombie(container, tmp_path, leads):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, subprocess\nimport holdfast\n"
        "with holdfast.Run(sys.argv[1], state={'a': 1}) as run:\n"
        "    made = subprocess.Popen([sys.executable, '-c', sys.argv[2]])\n"
        "    own = subprocess.Popen(['sh', '-c', 'exit 7'])\n"
        "    print('ready', flush=True)\n"
        "    for step in run.steps(100000):\n"
        "        time.sleep(0.01)\n"
        "        if made.poll() is not None and step % 100 == 0:\n"
        "            print('own', own.poll(), flush=True)\n"
    )
    lead = _lead() if leads else ()
    trainer = Trainer(
        tmp_path / "run", _ORPHANS, script=script, prefix=(*container, *lead), env=environment()
    )
    try:
        trainer.wait_for("own 7")  # whoever started it has its status

        def all_are_gone() -> bool:
            found = _first(trainer).children(recursive=True)
            return all(each.name() != "sleep" for each in found)

        wait_until(all_are_gone, 30, "the end of all orphans")
    finally:
        trainer.end()


@pytest.mark.parametrize(
    ("text", "said"), [("50", "If 50 s are not enough"), ("soon", "is not a time")]
)
def test_the_grace_can_come_from_the_manifest(tmp_path: Path, text, said):
    variables = environment(HOLDFAST_GRACE_SECONDS=text)
    trace = tmp_path / "trace"
    trainer = Trainer(tmp_path / "run", *_LONG, "--trace", trace, env=variables)
    try:
        _wait_for_steps(trainer, trace)
        trainer.send(signal.SIGTERM)
        assert trainer.wait() == 143, trainer.output
        assert said in trainer.output
    finally:
        trainer.end()
