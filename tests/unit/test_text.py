"""The lines that holdfast says to people."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

_ENDS_WITHIN_A_LINE = """
import atexit, threading
from holdfast import _text

_text._LINE_SECONDS = 60.0
atexit.register(print, "ends", flush=True)
begun = threading.Event()

def say_much():
    begun.set()
    _text.say("x" * 1_000_000)  # more than a pipe takes

threading.Thread(target=say_much, daemon=True).start()
begun.wait()
while _text._speaking.acquire(blocking=False):  # until the line is being written
    _text._speaking.release()
"""


def test_a_line_that_a_thread_writes_at_the_end_does_not_abort_the_process() -> None:
    ends = subprocess.Popen(
        [sys.executable, "-c", _ENDS_WITHIN_A_LINE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert ends.stdout is not None
    assert ends.stdout.readline() == b"ends\n"
    time.sleep(0.3)  # without the lock, Python would now wait for the stream in vain
    _, said = ends.communicate(timeout=60)
    assert ends.returncode == 0, said[-2000:]
    assert said == b"holdfast: " + b"x" * 1_000_000 + b"\n"


_SAYS_AT_THE_END = """
import atexit, threading
from holdfast import _text

def say_both():
    _text.say("from the first thread")
    other = threading.Thread(target=_text.say, args=("from another",))
    other.start()
    other.join(20)
    print(other.is_alive())

_text._LINE_SECONDS = 0.1
atexit.unregister(_text._let_nobody_speak)
atexit.register(say_both)
atexit.register(_text._let_nobody_speak)
"""


def test_at_the_end_only_the_first_thread_says_lines() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SAYS_AT_THE_END], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "False\n")
    assert ended.stderr == "holdfast: from the first thread\n"


_FORKS_WITHIN_A_LINE = """
import os, sys, threading
from holdfast import _text

begun, over = threading.Event(), threading.Event()

class Slow:
    def write(self, text):
        begun.set()
        over.wait()
    def flush(self):
        pass

real, sys.stderr = sys.stderr, Slow()
thread = threading.Thread(target=_text.say, args=("slow",))
thread.start()
begun.wait()
pid = os.fork()
if pid == 0:
    sys.stderr = real
    _text.say("from the child")
    os._exit(0)
os.waitpid(pid, 0)
over.set()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_within_a_line_can_say_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS_WITHIN_A_LINE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "holdfast: from the child\n")
