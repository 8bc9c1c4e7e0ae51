"""`holdfast run` at a terminal: as if it were not there, and the terminal is as it was."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes.leading import HEADER, LEAD
from tests.support import wait_until
from tests.terminal import CTRL_C, ForegroundJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it steps aside")
CTRL_Z = "\x1a"


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[Callable[..., ForegroundJob]]:
    """Start a script, or a command as it is, in the foreground of a terminal."""
    jobs: list[ForegroundJob] = []

    def begin(body: str | list[str], *prefix: str, **options: Any) -> ForegroundJob:
        if isinstance(body, str):
            script = tmp_path / "script.py"
            script.write_text(HEADER + body)
            body = [*prefix, sys.executable, str(script), str(tmp_path)]
        jobs.append(ForegroundJob(body, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def _see(job: ForegroundJob, text: str, seconds: float = 20) -> None:
    try:
        wait_until(lambda: text.encode() in job.raw, seconds)
    except AssertionError:
        raise AssertionError(f"{text!r} is not in:\n{job.raw.decode(errors='replace')}") from None


_LOOKS = """\
print([os.isatty(n) for n in (0, 1, 2)], os.get_terminal_size(), flush=True)
print(os.tcgetpgrp(0) == os.getpgrp(), open("/dev/tty").isatty(), flush=True)
sys.stderr.write("\\x1b[31mred\\x1b[0m\\r 10%|#    |\\n")
"""


def test_the_screen_is_the_same_with_and_without_it(at_terminal):
    alone, led = (at_terminal(_LOOKS, *how, columns=97, rows=31) for how in ((), LEAD))
    assert (alone.wait(), led.wait()) == (0, 0)
    assert b"[True, True, True] os.terminal_size(columns=97, lines=31)" in alone.raw
    assert led.raw == alone.raw


def test_so_is_what_is_printed_just_before_the_end(at_terminal):
    command = ["seq", "1500"]
    alone = at_terminal(command)
    alone.wait()
    for _ in range(3):
        led = at_terminal([*LEAD, *command])
        assert led.wait() == 0
        assert led.raw == alone.raw


def test_a_new_size_of_the_window_is_passed_on(at_terminal):
    job = at_terminal(
        "signal.signal(signal.SIGWINCH, lambda *_: tell(os.get_terminal_size()))\n"
        "tell('ready')\nwait_for(here / 'gate')\n",
        *LEAD,
    )
    _see(job, "ready")
    job._set_size(123, 45)
    _see(job, "columns=123, lines=45")


def test_what_is_typed_is_echoed_and_read(at_terminal):
    job = at_terminal("name = input('name? ')\nprint('hello', name.upper())\n", *LEAD)
    _see(job, "name? ")
    job.press("ada\r")
    assert job.wait(20) == 0
    assert b"name? ada\r\nhello ADA\r\n" in job.raw


def test_ctrl_c_in_a_debugger_goes_to_the_debugger(at_terminal):
    job = at_terminal("x = 41\nbreakpoint()\nprint('went on')\n", *LEAD)
    _see(job, "(Pdb) ")
    job.press("x + 1\r")
    _see(job, "42")
    job.press(CTRL_C)
    _see(job, "--KeyboardInterrupt--")
    job.press("c\r")
    assert job.wait(20) == 0


@pytest.mark.parametrize("how", ["exits", "dies", "is terminated"])
def test_the_terminal_is_put_back(at_terminal, how):
    job = at_terminal("tell('ready')\ninput()\nos.abort()\n" if how == "dies" else
                      "tell('ready')\ninput()\n", *LEAD)  # fmt: skip
    before = _cooked(job)
    _see(job, "ready")
    wait_until(lambda: _cooked(job) != before, 10, "the raw mode")
    if how == "is terminated":
        os.kill(job.pid, signal.SIGTERM)
    else:
        job.press("\r")
    job.process.wait(20)
    assert _cooked(job) == before


def _cooked(job: ForegroundJob) -> list[Any]:
    return termios.tcgetattr(job._master)[:4]


_COUNTS = """\
(here / 'pid').write_text(str(os.getpid()))
tell('ready')
wait_for(here / 'gate')
tell('left')
"""


@pytest.mark.parametrize("streams", ["", "</dev/null >{0}/log 2>&1"], ids=["own", "elsewhere"])
def test_ctrl_z_stops_both_and_fg_continues_them(at_terminal, tmp_path, streams):
    shell = at_terminal(["bash", "--norc", "--noprofile", "-i"], env={**os.environ, "PS1": "$ "})
    _see(shell, "$ ")
    before = _cooked(shell)
    (tmp_path / "script.py").write_text(HEADER + _COUNTS)
    words = [*LEAD, sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    shell.press(" ".join([*words, streams.format(tmp_path)]) + "\r")
    wait_until((tmp_path / "pid").exists, 20)
    pid = int(wait_until((tmp_path / "pid").read_text, 20))  # it is written after it is made
    command = psutil.Process(pid)
    shell.press(CTRL_Z)
    _see(shell, "Stopped")
    _see_prompt(shell)
    for each in (command, command.parent()):  # a busy machine lets a process run to its stop
        wait_until(lambda each=each: each.status() == psutil.STATUS_STOPPED, 10, "the stop")
    assert _cooked(shell)[3] & termios.ISIG == before[3] & termios.ISIG != 0
    shell.press("echo it is $((6 * 7))\r")  # the shell has the terminal
    _see(shell, "it is 42")
    _see_prompt(shell)
    shell.press("fg\r")
    wait_until(lambda: command.status() != psutil.STATUS_STOPPED, 10, "the command's going on")
    (tmp_path / "gate").touch()
    wait_until(lambda: not command.is_running(), 20, "the command's end")
    _see_prompt(shell)
    shell.press("echo status $?\r")
    _see(shell, "status 0")


def _see_prompt(shell: ForegroundJob) -> None:
    wait_until(lambda: shell.raw.endswith(b"$ "), 20, "the shell's prompt")


def test_a_job_in_the_background_writes_on_and_is_not_stopped(at_terminal, tmp_path):
    shell = at_terminal(["bash", "--norc", "--noprofile", "-i"], env={**os.environ, "PS1": "$ "})
    _see(shell, "$ ")
    (tmp_path / "script.py").write_text(HEADER + _COUNTS)
    words = [*LEAD, sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    shell.press(" ".join(words) + " &\r")
    _see(shell, "ready\r")
    shell.press("echo it is $((6 * 7))\r")  # typed for the shell, and not eaten
    _see(shell, "it is 42")
    _see_prompt(shell)
    shell.press("fg\r")
    wait_until(lambda: not _cooked(shell)[3] & termios.ISIG, 10, "the terminal in our hands")
    shell.press(CTRL_C)
    _see(shell, "KeyboardInterrupt")
    _see_prompt(shell)
    shell.press("echo status $?\r")
    _see(shell, "status 130")


def test_stopped_by_a_signal_it_gives_the_terminal_up_and_takes_it_again(at_terminal, tmp_path):
    shell = at_terminal(["bash", "--norc", "--noprofile", "-i"], env={**os.environ, "PS1": "$ "})
    _see(shell, "$ ")
    (tmp_path / "script.py").write_text(HEADER + _COUNTS)
    words = [*LEAD, sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    shell.press(" ".join(words) + "\r")
    _see(shell, "ready\r")
    leader = psutil.Process(int((tmp_path / "pid").read_text())).parent()
    wait_until(lambda: not _cooked(shell)[3] & termios.ISIG, 10, "the terminal in our hands")
    leader.send_signal(signal.SIGSTOP)
    _see(shell, "Stopped")
    _see_prompt(shell)
    shell.press("bg\r")
    _see_prompt(shell)
    shell.press("echo it is $((6 * 7))\r")  # typed for the shell: it neither takes it nor stops
    _see(shell, "it is 42")
    _see_prompt(shell)
    assert leader.status() != psutil.STATUS_STOPPED
    shell.press("fg\r")
    wait_until(lambda: not _cooked(shell)[3] & termios.ISIG, 10, "the terminal in our hands again")
    shell.press(CTRL_C)
    _see(shell, "KeyboardInterrupt")
    _see_prompt(shell)
    shell.press("echo status $?\r")
    _see(shell, "status 130")


def test_a_command_in_a_pipe_of_the_shell_hears_ctrl_c_once(at_terminal, tmp_path):
    (tmp_path / "script.py").write_text(
        HEADER + "hear('INT')\ntell('ready', os.isatty(0), os.isatty(1))\n"
        "wait_for(here / 'gate')\nsys.exit(5)\n"
    )
    script = f"{sys.executable} {tmp_path}/script.py {tmp_path}"
    pipe = f"set -o pipefail; {' '.join(LEAD)} {script} | (trap '' INT; cat)"
    job = at_terminal(["bash", "-c", f"trap : INT; {pipe}; exit $?"])
    _see(job, "ready True False")
    job.press(CTRL_C)
    _see(job, "heard SIGINT")
    (tmp_path / "gate").touch()
    assert job.wait(20) == 5
    assert job.raw.count(b"heard") == 1


def test_ctrl_c_reaches_all_of_a_command_whose_streams_are_elsewhere(at_terminal, tmp_path):
    led = f"{' '.join(LEAD)} sh -c 'sleep 60; true' </dev/null >{tmp_path}/log 2>&1"
    job = at_terminal(["sh", "-c", f"exec {led}"])

    def sleeps() -> bool:
        below = psutil.Process(job.pid).children(recursive=True)
        return "sleep" in [process.name() for process in below]

    wait_until(sleeps, 20, "the command")
    job.press(CTRL_C)
    assert job.wait(20) == 130
