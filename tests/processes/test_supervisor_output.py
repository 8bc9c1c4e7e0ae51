"""`holdfast run`: what the command prints goes where it would have gone, and is kept."""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast._environment.processes.proc import FairDeadline
from tests.processes.leading import LEAD
from tests.support import environment, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it steps aside")

_MUCH = """\
import os, random, sys
random.seed(3)
for number in range(400):
    stream = random.choice((1, 1, 2))
    data = random.randbytes(random.choice((1, 40, 9000)))
    while data:  # a pipe may take less
        data = data[os.write(stream, data):]
os.write(1, b"no end of line")
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def _lead(state: Path, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    env = environment(HOLDFAST_STATE=str(state))
    return subprocess.run([*LEAD, *command], **{"env": env, "timeout": 60, **options})


def _life(state: Path) -> Path:
    (folder,) = state.glob("led/*/life-*")
    return folder


def _record(state: Path) -> dict[str, Any]:
    record = json.loads((_life(state) / "led.json").read_text())
    assert isinstance(record, dict)
    return record


def test_both_streams_arrive_as_without_it(state):
    command = [sys.executable, "-c", _MUCH]
    alone = subprocess.run(command, capture_output=True)
    led = _lead(state, *command, capture_output=True)
    assert (led.stdout, led.stderr) == (alone.stdout, alone.stderr)


def test_the_order_holds_where_both_lead_to_one_place_and_all_of_it_is_kept(state):
    command = [sys.executable, "-c", _MUCH]
    together: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    led = _lead(state, *command, **together)
    assert led.stdout == subprocess.run(command, **together).stdout
    assert (_life(state) / "output.log").read_bytes() == led.stdout


def test_a_file_is_written_at_its_own_place(state, tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("a") as file:
        _lead(state, "sh", "-c", "echo within", stdout=file)
        file.write("after\n")
    assert log.read_text() == "before\nwithin\nafter\n"


def test_what_is_piped_in_reaches_the_command(state):
    led = _lead(state, "sh", "-c", "cat; exit 6", input=b"line\n", capture_output=True)
    assert (led.returncode, led.stdout) == (6, b"line\n")


def test_a_reader_that_leaves_ends_the_command_as_without_it(state):
    words = " ".join(LEAD)
    script = f"{{ {words} yes; echo $? >&2; }} | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, timeout=30, text=True)
    assert done.stdout == "y\n"
    assert done.stderr == "141\n"  # which needs no explanation


def test_a_reader_that_never_reads_keeps_no_signal_back(state, tmp_path):
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], 'w'), os._exit(9)))\n"
        "while True: os.write(1, b'x' * 4096)\n"
    )
    heard = tmp_path / "heard"
    command = [*LEAD, sys.executable, "-c", script, heard]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.read(1) == b"x"
        process.terminate()
        wait_until(heard.exists, 20, "the signal")
        assert process.wait(20) == 9  # it does not wait for ever for somebody to read the rest


def test_a_slow_reader_gets_everything(state):
    command = [*LEAD, "sh", "-c", "head -c 300000 /dev/zero; exit 3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert len(process.stdout.read()) == 300_000
        assert process.wait(20) == 3


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_stay_closed(state, tmp_path, closed):
    show = tmp_path / "show.py"
    show.write_text(
        "import os, sys\n"
        "def is_open(number):\n"
        "    try: os.fstat(number)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "found = [is_open(n) for n in (0, 1, 2)]\n"
        "open(sys.argv[1], 'w').write(str(found))\n"
        "os._exit(5)\n"
    )
    seen = tmp_path / "seen"
    words = " ".join([*LEAD, sys.executable, str(show), str(seen)])
    done = subprocess.run(
        ["sh", "-c", f"{words} {closed}"],
        env=environment(HOLDFAST_STATE=str(state)),
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 5, done.stderr
    expected = [sign not in closed.split() for sign in ("<&-", ">&-", "2>&-")]
    assert seen.read_text() == str(expected)
    assert not done.stdout  # no line of ours is among what the command prints
    assert b"Traceback" not in done.stderr


def test_what_is_left_behind_does_not_hold_it_by_writing_for_ever(state):
    # The reader is slower than that, so there is always something that waits.
    command = [*LEAD, "sh", "-c", "yes & echo $! >&2; sleep 0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        deadline = time.monotonic() + 30
        while os.read(process.stdout.fileno(), 100_000) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert process.wait(20) == 0
        assert time.monotonic() < deadline


def test_where_only_some_streams_are_terminals_they_stay_so(state):
    master, slave = pty.openpty()
    show = "import os; os.write(1, bytes(map(os.isatty, (0, 1, 2))))"
    done = _lead(
        *(state, sys.executable, "-c", show),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
    )
    os.close(master)
    os.close(slave)
    assert done.stdout == bytes([False, False, True])


def test_who_it_was_and_how_it_ended_is_noted(state, tmp_path):
    script = "x = bytearray(50 << 20); raise ValueError('planted')"
    done = _lead(state, sys.executable, "-c", script, stderr=subprocess.PIPE)
    assert done.returncode == 1
    record = _record(state)
    assert record["command"][0] == sys.executable
    assert record["status"] == 1
    assert record["began"] < record["ended"]
    assert record["maxrss"] > 50 << 20
    assert record["decision"]["restart"] is False
    assert record["counters"]["death"] is not None
    assert b"ValueError: planted" in (_life(state) / "output.log").read_bytes()
    assert stat.S_IMODE((state / "led").stat().st_mode) == 0o700


def test_whoever_sends_a_signal_is_noted(state):
    command = [*LEAD, "sh", "-c", "echo ready; sleep 60"]
    env = environment(HOLDFAST_STATE=str(state))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == b"ready\n"
        sender = subprocess.Popen(
            ["sh", "-c", f"kill -TERM {process.pid}; read line"], stdin=subprocess.PIPE
        )
        with sender:
            assert process.wait(20) == 128 + signal.SIGTERM
            sender.communicate(b"\n")
    (noted,) = _record(state)["signals"]
    assert noted["name"] == "SIGTERM"
    assert (noted["pid"], noted["uid"], noted["by"]) == (sender.pid, os.getuid(), "sh")


def test_the_ends_of_all_below_are_noted_in_their_order(state):
    script = (
        "import os, signal, subprocess, sys\n"
        "first, second = (subprocess.Popen(['sleep', '60']) for _ in range(2))\n"
        "input()\n"
        "second.kill(); second.wait()\n"
        "first.terminate(); first.wait()\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    env = environment(HOLDFAST_STATE=str(state))
    process = subprocess.Popen(
        [*LEAD, sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stderr=-1
    )
    with process:
        # The leader looks once a second that it has a processor; by then it has seen both.
        looked = FairDeadline(2.5, lambda: [process.pid], times=40)
        wait_until(looked.is_over, 100)
        assert process.poll() is None
        _, said = process.communicate(b"\n", timeout=30)
    assert b"Fatal Python error: Segmentation fault" in said  # though the script asked for nothing
    ends = [(each["comm"], each["status"]) for each in _record(state)["processes"]]
    assert ends[:2] == [("sleep", -9), ("sleep", -15)]
    assert _record(state)["status"] == -11
    assert len(_record(state)["memory"]) >= 2


def test_only_the_newest_are_kept(state):
    here, today = os.uname().nodename, time.strftime("%Y%m%d")
    for number in range(60):
        for name in (f"20200101-0000{number:02d}-{here}", f"{today}-0000{number:02d}-elsewhere"):
            old = state / "led" / f"{name}-999999{number}" / "life-0001"
            old.mkdir(parents=True)
            (old / "led.json").write_text("{}")
    (state / "led" / "20200101-000000-elsewhere-1").mkdir()
    _lead(state, "true")
    left = sorted(path.name for path in (state / "led").iterdir())
    of_others = [name for name in left if "-elsewhere-" in name]
    assert len(of_others) == 60  # they may still go on, but for one of long ago
    ours = [name for name in left if name not in of_others]
    assert len(ours) == 50
    assert ours[0].startswith("20200101-000011-")


def test_the_command_finds_the_record_from_any_folder(tmp_path):
    show = ("sh", "-c", 'cd / && ls "$HOLDFAST_LED"')
    done = _lead(Path("state"), *show, cwd=tmp_path, stdout=subprocess.PIPE)
    assert done.stdout.split() == [b"led.json", b"output.log"] or done.stdout == b"output.log\n"


def test_it_leads_where_nothing_can_be_noted(tmp_path):
    (tmp_path / "file").touch()
    done = _lead(tmp_path / "file" / "state", "sh", "-c", "exit 4")
    assert done.returncode == 4
