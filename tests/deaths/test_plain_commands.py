"""Small commands that know nothing of holdfast: each dies or hangs in its own way, and `why` tells.

Nightly, since each starts a process or three. In `make test`, test_one_process.py has the same
deaths of a run, tests/unit/diagnose/test_why_scenarios.py what such commands print, and
tests/unit/diagnose/test_why_pids.py the hangs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import PROGRAM, environment, holdfast_process
from tests.support import SLACK

pytestmark = pytest.mark.nightly

_PRINTS = "print('step 1', flush=True)\n"
_SENDS = (
    "import os, subprocess, time\n"
    + _PRINTS
    + "subprocess.Popen(['sh', '-c', f'sleep 0.3; kill -{name} {{os.getpid()}}'])\n"
    "time.sleep(60)\n"
)
DEATHS = {
    "a segfault in ctypes": ("import ctypes\nctypes.string_at(0)\n", "segfault", ""),
    "an abort in a thread": (
        "import os, threading, time\nthreading.Timer(0.2, os.abort).start()\ntime.sleep(60)\n",
        "abort",
        "",
    ),
    "recursion": ("def depth():\n    depth()\n\n\ndepth()\n", "python-exception", "RecursionError"),
    "a limit on files": (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))\n"
        "with open('big', 'wb') as file:\n    file.write(bytes(99999))\n",
        "python-exception",
        "ulimit -f",
    ),
    "a limit on open files": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))\n"
        "kept = [open(__file__) for _ in range(99)]\n",
        "python-exception",
        "ulimit -n",
    ),
    "a full device": (
        "with open('/dev/full', 'wb') as file:\n    file.write(bytes(99999))\n",
        "disk-full",
        "No space left",
    ),
    "kill -9": (_SENDS.format(name="KILL"), "killed", ""),
    "kill -TERM": (_SENDS.format(name="TERM"), "terminated", "SIGTERM"),
    "kill -HUP": (_SENDS.format(name="HUP"), "terminated", "SIGHUP"),
    "kill -USR1": (_SENDS.format(name="USR1"), "terminated", "SIGUSR1"),
    "sys.exit with words": ("import sys\nsys.exit('no shards in /data')\n", "unknown", "no shards"),
    "os._exit": ("import os\nos._exit(3)\n", "unknown", "status 3"),
    "exit in atexit": (
        "import atexit, os\natexit.register(lambda: os._exit(5))\n",
        "unknown",
        "status 5",
    ),
    "an exception in a thread": (
        "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\n"
        "thread.start()\nthread.join()\nprint('done')\n",
        "finished lying-status",  # as its lines arrive: its last word may be the error
        "ZeroDivisionError",
    ),
    "a tool that fails": (
        "import subprocess\nsubprocess.check_call(['sh', '-c', 'exit 187'])\n",
        "python-exception",
        "187",
    ),
    "a dead process of a pool": (
        "import os\nfrom concurrent.futures import ProcessPoolExecutor\n\n\n"
        "def task(number):\n    os.kill(os.getpid(), 11)\n\n\n"
        "with ProcessPoolExecutor(1) as pool:\n    list(pool.map(task, [1]))\n",
        "worker-died",
        "worker",
    ),
    "a script that is none": ("print('x'\n", "configuration", "SyntaxError"),
    "a mapped file that was cut": (
        "import mmap, os\nfile = open('map', 'w+b')\nfile.truncate(32768)\n"
        "mapped = mmap.mmap(file.fileno(), 0)\nos.truncate('map', 0)\nmapped[9000]\n",
        "bus-error",
        "mapped file",
    ),
}
HANGS = {
    "two locks": (
        "import threading, time\nfirst, second = threading.Lock(), threading.Lock()\n\n\n"
        "def other():\n    with first:\n        time.sleep(0.3)\n        second.acquire()\n\n\n"
        "threading.Thread(target=other, daemon=True).start()\nsecond.acquire()\ntime.sleep(0.5)\n"
        + _PRINTS
        + "first.acquire()\n",
        ("hang-lock",),
        "lock",
    ),
    "a pipe without a writer": (
        "import os\nos.mkfifo('fifo')\n" + _PRINTS + "open('fifo').read()\n",
        ("hang-call", "hang-disk"),
        "fifo|open",
    ),
    "a subprocess": (
        "import subprocess\n" + _PRINTS + "subprocess.run(['sleep', '1000'])\n",
        ("hang-call",),
        "sleep",
    ),
    "an empty queue": (
        "import queue\n" + _PRINTS + "queue.Queue().get()\n",
        ("hang-lock",),
        "queue",
    ),
    "a socket": (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n" + _PRINTS + "client.recv(1)\n",
        ("hang-call",),
        "network",
    ),
    "a stop": ("import os\n" + _PRINTS + "os.kill(os.getpid(), 19)\n", ("stopped",), "stop"),
}


def _ask(*arguments, env, folder):
    answer = holdfast_process("why", "--json", *arguments, env=env, cwd=folder)
    assert answer.returncode == 0, answer
    found = json.loads(answer.stdout)
    return found, "\n".join((found["sentence"], *found["evidence"], *found["advice"]))


@pytest.mark.parametrize("name", DEATHS)
def test_each_death_of_a_plain_command_is_told(name, tmp_path):
    script, cause, words = DEATHS[name]
    (tmp_path / "train.py").write_text(script)
    env = environment(HOLDFAST_STATE=str(tmp_path / "state"))
    holdfast_process("run", "--", sys.executable, "train.py", env=env, cwd=tmp_path)
    found, said = _ask(env=env, folder=tmp_path)
    assert found["cause"] in cause.split(), found
    assert words in said, found


@pytest.mark.parametrize("is_led", [False, True], ids=["by its pid", "led"])
@pytest.mark.parametrize("name", HANGS)
def test_each_hang_of_a_plain_command_is_told(name, is_led, tmp_path):
    """By its number; or by nothing at all, beside the `holdfast run` that leads it."""
    script, causes, words = HANGS[name]
    (tmp_path / "train.py").write_text("import os\nprint(os.getpid(), flush=True)\n" + script)
    env = environment(HOLDFAST_STATE=str(tmp_path / "state"))
    with subprocess.Popen(
        [*([PROGRAM, "run", "--"] if is_led else []), sys.executable, "train.py"],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            process.stdout.readline()
            _wait_until_it_sleeps(pid)
            asked = () if is_led else ("--pid", pid)
            found, said = _ask(*asked, env=env, folder=tmp_path)
        finally:
            # The leader first; what it leads has a session of its own.
            for group in dict.fromkeys((process.pid, pid)):
                os.killpg(group, signal.SIGKILL)
    assert found["cause"] in causes, found
    assert found["kind"] == ("led" if is_led else "pid")
    assert re.search(words, said), found


def _wait_until_it_sleeps(pid):
    """It has printed its line, and may not have come to the next one yet."""
    until = time.monotonic() + 20 * SLACK
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "STDt":
            return
        time.sleep(0.05)
