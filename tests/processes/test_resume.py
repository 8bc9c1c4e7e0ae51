"""`holdfast resume`: a killed run is started again the same way, to the same bits.

Several tests take some seconds: two trainings and a command start Python, one after the other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PROGRAM, holdfast
from tests.processes.conftest import EAGER, LIGHT
from tests.processes.leading import LEAD
from tests.secrets import KINDS
from tests.support import SCRIPTS, SLACK, Trainer, environment, keepers, wait_until

TOTAL = 60
HELD = 40
# A fresh login: no variable of the shell that started the run.
FRESH = {"HOME": "/nonexistent", "PATH": "/usr/bin:/bin", "HOLDFAST_NOTICES": "off"}


def record_of(folder: Path, attempt: int = 1) -> dict[str, Any]:
    found = json.loads((folder / f"attempts/{attempt:04d}/start.json").read_text())
    assert isinstance(found, dict)
    return found


def resume(folder: Path | str, *words: str, cwd: Path, **more: str) -> Any:
    """From another folder, by a process that knows nothing of the shell before."""
    return subprocess.run(
        [PROGRAM, "resume", str(folder), *words],
        cwd=cwd,
        env={**FRESH, **more},
        capture_output=True,
        text=True,
        timeout=60 * SLACK,
        check=False,
    )


@pytest.fixture
def held(gate: Path) -> list[str]:
    """The arguments of a training that is held up at a step, in its first attempt."""
    return [
        *("--total", str(TOTAL), "--hold-at", str(HELD), "--once", "--gate", str(gate)),
        *("--settings", EAGER),
    ]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    place = tmp_path / "elsewhere"
    place.mkdir()
    return place


def kill_and_wait(trainer: Trainer, folder: Path, pid: int | None = None) -> None:
    """Kill -9; returns when its keeper has made the last snapshot durable."""
    trainer.wait_for("holding")
    if pid is None:
        trainer.kill()
    else:
        os.kill(pid, signal.SIGKILL)
    trainer.wait()
    wait_until(lambda: not keepers(folder), 30, "the keeper's end")


def hash_in(output: str) -> str:
    return next(line.split()[1] for line in output.splitlines() if line.startswith("hash "))


def test_a_killed_script_is_resumed_to_the_same_bits(
    folder, start, held, tmp_path, elsewhere, light_reference
):
    first = start("run", *held, script=LIGHT, real=True, cwd=tmp_path)
    kill_and_wait(first, folder)
    done = resume(folder, cwd=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hash_in(done.stdout) == light_reference(TOTAL)
    assert f"{folder}: starting it as attempt 1 was, by python, in {tmp_path}:" in done.stderr
    assert f"  {sys.executable} {LIGHT} run --total {TOTAL}" in done.stderr
    assert "resumed at step" in done.stderr
    assert "changed since" not in done.stderr
    assert record_of(folder, 2)["command"] == record_of(folder)["command"]
    assert record_of(folder, 2)["environment"]["OMP_NUM_THREADS"] == "1"  # FRESH has none


def test_a_module_is_resumed_from_another_folder(folder, held, elsewhere, light_reference, start):
    # By a script of its own, since `start` starts scripts: it becomes `python -m light`.
    words = [sys.executable, "-m", "light", str(folder), *held]
    script = elsewhere / "become.py"
    script.write_text(f"import os\nos.chdir({str(SCRIPTS)!r})\nos.execv({words[0]!r}, {words!r})\n")
    first = start(script=script, real=True)
    kill_and_wait(first, folder)
    assert record_of(folder)["command"][1:3] == ["-m", "light"]
    assert record_of(folder)["cwd"] == str(SCRIPTS)
    done = resume(folder, cwd=elsewhere)
    assert hash_in(done.stdout) == light_reference(TOTAL), done.stderr


@pytest.mark.nightly
def test_a_script_that_changes_its_folder_is_resumed_where_it_was_started(
    folder, tmp_path, start, elsewhere
):
    script = tmp_path / "moving.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            os.chdir({str(elsewhere)!r})
            import numpy, holdfast
            with holdfast.Run({str(folder)!r}, w=numpy.zeros(3)) as run:
                for step in run.steps(4):
                    if step == 2 and run.attempt == 1:
                        print("holding", flush=True)
                        __import__("signal").pause()
            print("hash done")
            """
        )
    )
    first = start(script=Path("moving.py"), real=True, cwd=tmp_path)
    kill_and_wait(first, folder)
    assert record_of(folder)["cwd"] == str(tmp_path)
    done = resume(folder, cwd=elsewhere)
    assert hash_in(done.stdout) == "done", done.stderr


# Over 5 s: a supervisor, a training and a command start Python, twice.
def test_a_supervised_script_is_resumed_under_its_supervisor(
    folder, start, held, tmp_path, elsewhere, light_reference
):
    lead = start("run", *held, script=LIGHT, prefix=LEAD, cwd=tmp_path)
    lead.wait_for("holding")
    record = record_of(folder)
    assert record["launcher"] == "holdfast run"
    live = resume(folder, cwd=elsewhere)
    assert live.returncode != 0
    assert "is live" in live.stderr
    assert "is finished" not in live.stderr
    kill_and_wait(lead, folder, int(json.loads(_lease(folder))["process"]["pid"]))
    done = resume(folder, cwd=elsewhere)
    assert hash_in(done.stdout) == light_reference(TOTAL), done.stderr
    assert "by holdfast run" in done.stderr
    assert record_of(folder, 2)["launcher"] == "holdfast run"
    assert record_of(folder, 2)["start"]["command"] == record["start"]["command"]
    again = resume(folder, cwd=elsewhere)
    assert again.returncode != 0
    assert f"{folder}: has finished, at step {TOTAL}. Nothing is left to train." in again.stderr


def _lease(folder: Path) -> str:
    return (folder / "attempts/0001/lease.json").read_text()


def test_a_detached_start_writes_into_the_run_folder(
    folder, start, held, tmp_path, elsewhere, light_reference
):
    kill_and_wait(start("run", *held, script=LIGHT, real=True, cwd=tmp_path), folder)
    done = resume(folder, "--detach", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert f"To follow it: tail -F {folder}/resume.log" in done.stdout
    log = folder / "resume.log"
    wait_until(lambda: "hash " in log.read_text(), 30, "the end of the training")
    assert hash_in(log.read_text()) == light_reference(TOTAL)


def test_a_detached_start_that_fails_is_told(folder, start, held, elsewhere, tmp_path):
    kill_and_wait(start("run", *held, script=LIGHT, real=True, cwd=tmp_path), folder)
    words = ("--", sys.executable, "-c", "raise SystemExit(3)")
    done = resume(folder, "--detach", *words, cwd=elsewhere)
    assert done.returncode == 1
    assert "it has ended with status 3, before it opened the run" in done.stderr


def test_a_secret_argument_must_be_given_again(folder, tmp_path, start, elsewhere):
    script = tmp_path / "secret.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal, sys
            import numpy, holdfast
            with holdfast.Run(sys.argv[1], w=numpy.zeros(3)) as run:
                for step in run.steps(4):
                    if step == 2 and run.attempt == 1:
                        print("holding", flush=True)
                        signal.pause()
            print("hash", sys.argv[3])
            """
        )
    )
    kill_and_wait(
        start("run", "--api-key", "abc-123", script=script, real=True, cwd=tmp_path), folder
    )
    assert b"abc-123" not in everything_in(folder)
    refused = resume(folder, cwd=elsewhere)
    assert refused.returncode != 0
    assert (
        f"{folder}: its command has a secret, which is not recorded: --api-key." in refused.stderr
    )
    line = f"holdfast resume {folder} -- {sys.executable} -u {script} run --api-key VALUE"
    assert line in refused.stderr
    words = line.replace("VALUE", "abc-123").split()[3:]
    done = resume(folder, *words, cwd=elsewhere)
    assert hash_in(done.stdout) == "abc-123", done.stderr
    assert "changed since" not in done.stderr
    assert b"abc-123" not in everything_in(folder)


def everything_in(folder: Path) -> bytes:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "output.log"]
    return b"\n".join(path.read_bytes() for path in files)


def test_no_secret_is_in_the_run_folder(folder, tmp_path, start):
    """Of 30 kinds, each in the environment, the arguments, the config and the git diff."""
    script = tmp_path / "planted.py"
    script.write_text(_PLANTED)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "planted.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True, timeout=30)
    code = "\n".join(kind.as_code for kind in KINDS)
    script.write_text(f"{_PLANTED}\nif 0:\n" + textwrap.indent(code, "    ") + "\n")
    variables = {kind.variable: kind.value for kind in KINDS}
    # Also under names that are recorded.
    variables |= {f"HF_{index}": kind.value_in_place for index, kind in enumerate(KINDS)}
    words = [word for kind in KINDS for word in kind.words]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({kind.variable: [kind.value, kind.value_in_place] for kind in KINDS})
    )
    trainer = start(
        *(folder, config, *words),
        script=script,
        prefix=LEAD,
        cwd=tmp_path,
        env=environment(**variables),
    )
    assert trainer.wait() == 0, trainer.output
    record = record_of(folder)
    assert record["git"]["dirty"] is True
    assert "+if 0:" in record["git"]["diff"]
    assert set(record["left_out"]) >= {kind.variable for kind in KINDS[:16]}
    assert json.loads((folder / "attempts/0001/led.json").read_text())["command"]
    stored = everything_in(folder)
    assert [kind.name for kind in KINDS if kind.secret.encode() in stored] == []
    escaped = [json.dumps(kind.secret)[1:-1].encode() for kind in KINDS]
    assert [kind.name for kind, text in zip(KINDS, escaped, strict=True) if text in stored] == []


_PLANTED = """\
import json, sys, time
from pathlib import Path
import numpy, holdfast
lr = 0.1
config = json.loads(Path(sys.argv[2]).read_text())
with holdfast.Run(sys.argv[1], w=numpy.zeros(3), config=config) as run:
    record = Path(sys.argv[1], "attempts/0001/start.json")
    for step in run.steps(3):
        deadline = time.monotonic() + 60  # the keeper asks git in the background
        while "dirty" not in record.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
"""


def test_a_change_is_said_in_one_line_at_the_next_start(folder, light):
    light(folder, "--total", 5).wait()
    second = light(folder, "--total", 9)
    second.wait()
    said = [line for line in second.lines if "changed since attempt 1" in line]
    assert len(said) == 1
    assert "the command (--total 5 → --total 9)" in said[0]


BROKEN: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "interpreter": (lambda place, _: (place / "bin/python").unlink(), "its interpreter is gone"),
    "script": (lambda place, _: (place / "train.py").unlink(), "its script is gone"),
    "folder": (lambda _, cwd: shutil.rmtree(cwd), "the folder that it was started in is gone"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_gone_is_named(what, folder, tmp_path, light, elsewhere):
    kill_and_wait(light(folder, "--total", 5, "--hold-at", 2, "--once"), folder)
    place = tmp_path / "place"
    (place / "bin").mkdir(parents=True)
    (place / "bin/python").touch(0o755)
    (place / "train.py").touch()
    # As if it had been started there.
    path = folder / "attempts/0001/start.json"
    record = record_of(folder)
    command = [str(place / "bin/python"), str(place / "train.py")]
    record["start"] |= {"command": command, "cwd": str(elsewhere), "left_out": []}
    path.write_text(json.dumps(record))
    break_it, sentence = BROKEN[what]
    break_it(place, elsewhere)
    done = holdfast("resume", folder)
    assert done.returncode != 0
    assert f"{folder}: {sentence}" in done.stderr
    assert f"holdfast resume {folder} -- python train.py" in done.stderr


def test_a_copied_run_is_not_resumed_by_the_command_of_its_original(folder, light, tmp_path):
    light(folder, "--total", 5).wait()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "journal.jsonl").write_text("")
    done = holdfast("resume", copy)
    assert done.returncode != 0
    assert f"{copy}: was started as {folder}, and its command would train there." in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away: run it as root")
def test_a_command_that_another_user_has_recorded_is_not_run(folder, light, elsewhere):
    kill_and_wait(light(folder, "--total", 5, "--hold-at", 2, "--once"), folder)
    os.chown(folder / "attempts/0001/start.json", 12345, 12345)
    done = holdfast("resume", folder)
    assert done.returncode != 0
    assert "its recorded command would run as you" in done.stderr


def test_a_run_of_an_older_version_is_refused(folder, light):
    kill_and_wait(light(folder, "--total", 5, "--hold-at", 2, "--once"), folder)
    (folder / "attempts/0001/start.json").unlink(missing_ok=True)  # a kill can be earlier
    done = holdfast("resume", folder)
    assert done.returncode != 0
    assert "there is no record of how it was started" in done.stderr
