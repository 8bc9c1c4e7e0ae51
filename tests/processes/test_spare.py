"""`holdfast run --spare`: the next attempt has done its imports before it is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.command import PROGRAM
from tests.often import few
from tests.processes.looking import below
from tests.support import Trainer, environment, wait_for_keeper_gone, wait_until, words_of
from tests.terminal import CTRL_C, ForegroundJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it steps aside")
SPARE = (str(PROGRAM), "run", "--spare", "--")
NIGHTLY = pytest.mark.nightly  # `make test` runs one of each kind
READY = "a spare is ready (pid "
# A training that waits to be killed at step 20 of its first life, 40 of its second, and so on.
_TRAINING = """\
'''A training.'''
import hashlib, json, os, sys, time, warnings
from pathlib import Path
import numpy
import holdfast
{imports}

life = int(os.environ.get("HOLDFAST_RESTART", 99)) + 1
print("life", life, "is", os.getpid(), flush=True)
{body}
numpy.random.seed(7)
weights = numpy.zeros(1000)
with holdfast.Run({folder!r}, settings=holdfast.Settings(max_overhead=1.0), w=weights) as run:
    for step in run.steps(10**6 if life == {stays} else 80):
        time.sleep(0.002)
        weights += numpy.random.standard_normal(1000)
        if step == 20 * life and life <= {kills}:
            print("waits", life, flush=True)
            time.sleep(600)
print("hash", hashlib.sha256(weights.tobytes()).hexdigest(), flush=True)
"""


class Spared:
    """A training under `holdfast run --spare`, in a folder with the script and its modules."""

    def __init__(self, place: Path, start: Callable[..., Trainer]) -> None:
        self.place = place
        self.folder = place / "run"
        self._start = start
        self.env = {
            "HOLDFAST_STATE": str(place / "state"),
            "HOLDFAST_SPARE_SECONDS": "0",
            "HOLDFAST_PAUSE_SECONDS": "0.01",
        }

    def write(
        self,
        imports: str = "",
        body: str = "",
        *,
        kills: int = 1,
        stays: int = 0,
        path: str = "train.py",
    ) -> None:
        """The script; `body` runs in each life, before the run is opened. `stays` is the life that
        makes no end of itself."""
        script = self.place / path
        script.parent.mkdir(exist_ok=True)
        text = textwrap.dedent(body)
        known = {"kills": kills, "stays": stays, "folder": str(self.folder)}
        script.write_text(_TRAINING.format(imports=imports, body=text, **known))

    def start(self, *words: str, prefix: tuple[str, ...] = SPARE) -> Trainer:
        script, *arguments = words or ("train.py",)
        return self._start(
            *arguments,
            script=Path(script),
            prefix=prefix,
            real=True,
            env=environment(**self.env),
            cwd=self.place,
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        words = [*SPARE, *command]
        known: dict[str, Any] = {"env": environment(**self.env), "cwd": self.place}
        return subprocess.run(words, capture_output=True, text=True, check=False, **known)

    def lives(self) -> list[dict[str, Any]]:
        paths = sorted((self.place / "state").glob("led/*/life-*/led.json"))
        return [json.loads(path.read_text()) for path in paths]

    def wait_for_spare(self, life: int, seconds: float = 30) -> int:
        """Wait until the leader of a life has a spare that is ready; its pid."""

        def look() -> int | None:
            lives = self.lives()
            spare = lives[life - 1].get("spare") if len(lives) >= life else None
            return None if spare is None else int(spare["pid"])

        return wait_until(look, seconds, "a spare")

    def kill_life(self, trainer: Trainer, life: int) -> None:
        trainer.wait_for(f"waits {life}")
        os.kill(pid_of(trainer, life), signal.SIGKILL)


@pytest.fixture
def spared(tmp_path: Path, start: Callable[..., Trainer]) -> Iterator[Spared]:
    found = Spared(tmp_path, start)
    yield found
    wait_for_keeper_gone(found.folder)


def pid_of(trainer: Trainer, life: int) -> int:
    return int(trainer.wait_for(f"life {life} is ").split()[-1])


def spares(leader: int) -> list[psutil.Process]:
    """The spares below a leader that wait."""
    processes = [psutil.Process(pid) for pid in below(leader)]
    return [each for each in processes if "spare_process.py" in words_of(each)]


def test_killed_twice_it_goes_on_in_spares_to_the_bit(spared):
    spared.write(kills=2)
    trainer = spared.start()
    for life in (1, 2):
        spare = spared.wait_for_spare(life)
        spared.kill_life(trainer, life)
        assert pid_of(trainer, life + 1) == spare
    found = trainer.state_hash()
    assert [life.get("is_spare") for life in spared.lives()] == [None, True, True]
    assert trainer.output.count(READY) == 1
    spared.folder = spared.place / "undisturbed"
    spared.write(kills=0)
    assert spared.start(prefix=()).state_hash() == found


_SLOW = """\
import os, time
from pathlib import Path
with Path(os.environ["IMPORTS"]).open("a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(0.5)
"""


@pytest.mark.nightly
def test_a_slow_import_is_done_before_it_is_needed(spared):
    _install(spared, "slow_package", _SLOW)
    imports = spared.place / "imports"
    spared.env["IMPORTS"] = str(imports)
    spared.write("import slow_package")
    trainer = spared.start()
    spare = spared.wait_for_spare(1)
    before = imports.read_text()
    assert before.split() == [str(pid_of(trainer, 1)), str(spare)]
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output
    assert pid_of(trainer, 2) == spare
    assert imports.read_text().split()[:2] == before.split()


@pytest.mark.nightly  # torch and what its optimizers import, twice
def test_what_torch_imports_late_is_in_the_spare(spared):
    body = """
        print("dynamo", life, "torch._dynamo" in sys.modules, flush=True)
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW([parameter])
        print("cuda", torch.cuda.is_initialized(), flush=True)
    """
    spared.write("import torch", body)
    trainer = spared.start()
    spare = spared.wait_for_spare(1, seconds=240)
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output
    assert pid_of(trainer, 2) == spare
    assert "dynamo 1 False" in trainer.output
    assert "dynamo 2 True" in trainer.output
    assert trainer.output.count("cuda False") == 2


# As a process finds itself; without what is told of the life, and of the process.
_FINDS = """\
print("finds", json.dumps({
    "argv": [sys.argv, sys.orig_argv, sys.path, sys.executable, str(sys.flags), os.getcwd()],
    "main": [__name__, __file__, __doc__, __package__, __spec__ and __spec__.name,
             repr(type(__loader__)), __cached__, sorted(vars()), repr(__builtins__)],
    "streams": [[each.line_buffering, each.write_through, each.encoding, each.errors, each.name,
                 os.fstat(each.fileno()).st_mode & 0o170000]
                for each in (sys.stdin, sys.stdout, sys.stderr)],
    "warnings": list(map(str, warnings.filters)),
    "variables": {**os.environ, "HOLDFAST_RESTART": "", "HOLDFAST_LED": ""},
    "group": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), os.getpriority(0, 0)],
    "signals": [Path("/proc/self/status").read_text().split("SigQ:")[1].split("\\n")[1:6]],
    "oom": Path("/proc/self/oom_score_adj").read_text(),
    "files": sorted(os.listdir("/proc/self/fd"))[:3],
    "main_module": vars() is vars(sys.modules["__main__"]),
}), flush=True)
"""


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("train.py", ["train.py", "--lr", "1"], id="script"),
        pytest.param("package/train.py", ["-m", "package.train", "-x"], id="module", marks=NIGHTLY),
        pytest.param("sub/train.py", ["./sub/../sub/train.py"], id="path", marks=NIGHTLY),
        pytest.param("package/__main__.py", ["-m", "package"], id="package", marks=NIGHTLY),
    ],
)
def test_the_script_finds_all_as_in_a_fresh_start(spared, path, words):
    spared.write("", _FINDS, path=path)
    trainer = spared.start(*words)
    spare = spared.wait_for_spare(1)
    assert (Path(f"/proc/{spare}") / "oom_score_adj").read_text() == "1000\n"
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output
    assert pid_of(trainer, 2) == spare
    fresh, other = (
        json.loads(line.removeprefix("finds "))
        for line in trainer.lines
        if line.startswith("finds")
    )
    assert other == fresh


def _install(spared: Spared, name: str, text: str) -> None:
    """A package as pip installs it."""
    package = spared.place / "site-packages" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    spared.env["PYTHONPATH"] = path


@pytest.mark.nightly  # unit/supervise shows the choice
def test_a_module_of_the_script_is_imported_only_by_the_script(spared):
    """It may write files, or start processes; and it may be another one by then."""
    module = spared.place / "model.py"
    module.write_text("VERSION = 'old'\nopen('trace', 'a').write('x')\n")
    spared.write("import model", "print('model', model.VERSION, flush=True)")
    trainer = spared.start()
    spare = spared.wait_for_spare(1)
    assert (spared.place / "trace").read_text() == "x"
    module.write_text("VERSION = 'newer'\n")
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output
    assert pid_of(trainer, 2) == spare
    assert "model newer" in trainer.output


@pytest.mark.parametrize(
    ("act", "what"),
    [
        ("socket.create_server(('127.0.0.1', 0))", "socket:"),
        pytest.param(
            "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "a thread",
            marks=NIGHTLY,
        ),
        pytest.param("subprocess.Popen(['sleep', '600'])", "a process", marks=NIGHTLY),
        pytest.param("open('trace', 'a')", "/trace", marks=NIGHTLY),
    ],
)
def test_a_package_that_leaves_something_open_at_its_import_has_no_spare(spared, act, what):
    lines = "import socket, subprocess, threading, time\nkept = "
    _install(spared, "busy_package", lines + act)
    spared.write("import busy_package")
    trainer = spared.start()
    line = trainer.wait_for("no spare: ")
    assert what in line
    assert "left" in line
    wait_until(lambda: not spares(trainer.pid), 20, "the end of the spare")
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output
    assert [life.get("is_spare") for life in spared.lives()] == [None, None]
    assert trainer.output.count("no spare") == 1


@pytest.mark.nightly  # unit/supervise shows the choice
def test_a_script_that_sets_variables_has_no_spare(spared):
    spared.write("", "os.environ['SOME_SETTING'] = 'x'")
    trainer = spared.start()
    trainer.wait_for("no spare: the script sets SOME_SETTING: set that before `holdfast run`")
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output


def test_an_error_in_the_spare_shows_the_script_and_nothing_of_ours(spared):
    body = """
        def fails():
            raise ValueError("planted")
        if life == 2:
            fails()
    """
    spared.write("", body)
    trainer = spared.start()
    spared.wait_for_spare(1)
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output  # in a third life
    text = trainer.output[trainer.output.index("Traceback") :]
    assert "_supervise" not in text.partition("ValueError: planted")[0]
    assert text.splitlines()[1] == f'  File "{spared.place}/train.py", line 14, in <module>'


@pytest.mark.nightly
def test_a_spare_that_is_killed_is_replaced_by_a_plain_start(spared):
    spared.write()
    trainer = spared.start()
    os.kill(spared.wait_for_spare(1), signal.SIGKILL)
    trainer.wait_for("the spare has ended (signal 9): the next start is a plain one")
    spared.kill_life(trainer, 1)
    assert trainer.wait() == 0, trainer.output
    assert [life.get("is_spare") for life in spared.lives()] == [None, None]
    assert spared.lives()[0]["status"] == -9


@pytest.mark.parametrize("state", few(["ready", "importing"], ["ready"]))
def test_no_spare_outlives_its_supervisor(spared, state):
    if state == "importing":
        # It is found by its command, while it still imports.
        sleeps = "import time\nif 'spare_process' in open('/proc/self/cmdline').read():"
        _install(spared, "slow_package", f"{sleeps} time.sleep(600)\n")
    spared.write("import slow_package" if state == "importing" else "", kills=0, stays=1)
    trainer = spared.start()
    if state == "ready":
        spared.wait_for_spare(1)
    spare = wait_until(lambda: spares(trainer.pid), 30, "a spare")[0]
    trainer.kill()
    wait_until(lambda: not spare.is_running(), 20, "the end of the spare")
    trainer.wait()


@pytest.mark.nightly  # as the end of its supervisor, above
def test_nor_the_end_of_the_run(spared):
    body = "def wait():\n    while not Path('gate').exists(): time.sleep(0.01)"
    spared.write("", body, kills=0)
    script = spared.place / "train.py"
    script.write_text(script.read_text().replace('print("hash"', 'wait()\nprint("hash"'))
    trainer = spared.start()
    spare = psutil.Process(spared.wait_for_spare(1))
    (spared.place / "gate").touch()
    assert trainer.wait() == 0, trainer.output
    assert not spare.is_running()


@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
@pytest.mark.parametrize("life", few([1, 2], [2]))
def test_a_request_to_stop_ends_both(spared, number, life):
    spared.write(kills=life - 1, stays=life)
    trainer = spared.start()
    spare = psutil.Process(spared.wait_for_spare(1))
    if life == 2:
        spared.kill_life(trainer, 1)
        assert pid_of(trainer, 2) == spare.pid
        spare = psutil.Process(spared.wait_for_spare(2))
    trainer.send(number)
    assert trainer.wait() == 128 + number, trainer.output
    assert not spare.is_running()
    assert len(spared.lives()) == life


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "exit 3"],
        [sys.executable, "-c", "exit(3)"],
        ["sh", "torchrun"],  # whatever its interpreter
    ],
)
def test_another_command_has_none_and_runs_as_without_it(spared, command):
    (spared.place / "torchrun").write_text("exit 3\n")
    trainer = spared.run(*command)
    assert trainer.returncode == 3
    assert trainer.stderr.count("holdfast: no spare: ") == 1
    assert "A restart is a plain start." in trainer.stderr


def test_at_a_terminal_the_spare_has_keys_and_the_new_size(spared):
    body = """
        if life == 2:
            print([os.isatty(n) for n in (0, 1, 2)], os.get_terminal_size(), flush=True)
            print("typed", input("name? ").upper(), flush=True)
            pdb.Pdb(nosigint=True).set_trace()
    """
    spared.write("import pdb", body, stays=2)
    command = [*SPARE, sys.executable, "train.py"]
    job = ForegroundJob(command, env=environment(**spared.env), cwd=spared.place)
    try:
        _see(job, "waits 1")
        spare = spared.wait_for_spare(1)
        job._set_size(123, 45)
        os.kill(spared.lives()[0]["child_pid"], signal.SIGKILL)
        _see(job, f"life 2 is {spare}\r\n")
        _see(job, "[True, True, True] os.terminal_size(columns=123, lines=45)\r\n")
        _see(job, "name? ")
        job.press("ada\r")
        _see(job, "name? ada\r\ntyped ADA\r\n")
        _see(job, "(Pdb) ")
        job.press("life + 40\r")
        _see(job, "42\r\n")
        job.press("c\r")
        _see(job, "resumed at step")
        other = psutil.Process(spared.wait_for_spare(2))
        job.press(CTRL_C)
        assert job.wait() == 128 + signal.SIGINT
        assert not other.is_running()
    finally:
        job.end()


@pytest.mark.nightly  # as with all streams, above
def test_with_some_streams_at_a_terminal_it_gets_its_keys(spared):
    body = "print('group', life, os.getpgrp() == os.getpgid(os.getppid()), flush=True)"
    spared.write("", body, stays=2)
    command = f"{' '.join(SPARE)} {sys.executable} train.py | cat"
    words = ["bash", "-c", command]
    job = ForegroundJob(words, env=environment(**spared.env), cwd=spared.place)
    try:
        _see(job, "waits 1")
        spare = spared.wait_for_spare(1)
        assert os.getpgid(spare) == spare
        os.kill(spared.lives()[0]["child_pid"], signal.SIGKILL)
        _see(job, f"life 2 is {spare}")
        _see(job, "group 2 True")
        _see(job, "resumed at step")
        other = psutil.Process(spared.wait_for_spare(2))
        job.press(CTRL_C)
        job.wait()
        wait_until(lambda: not other.is_running(), 20, "the end of the spare")
        assert len(spared.lives()) == 2
    finally:
        job.end()


def _see(job: ForegroundJob, text: str) -> None:
    try:
        wait_until(lambda: text.encode() in job.raw, 30)
    except AssertionError:
        raise AssertionError(f"{text!r} is not in:\n{job.raw.decode(errors='replace')}") from None
