"""A script of the fork server behaves as one that Python has just started."""

from __future__ import annotations

import pytest

FACTS = """
import atexit, os, pathlib, random, signal, sys, threading, time
print(sys.argv, sys.orig_argv[-1], sys.path, sys.flags, sys.dont_write_bytecode, os.getcwd())
print(__name__, __file__, __spec__, __package__, __doc__, type(__loader__), sorted(globals()))
print(sys.modules["__main__"].__dict__ is globals(), sorted(os.environ.items()))
print([signal.getsignal(number) for number in signal.valid_signals()])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.umask(0))
print([t.name for t in threading.enumerate()])
print(sys.stdout.encoding, sys.stdout.errors, sys.stdin.read(), sys.stdout.isatty())
print(sorted(str(path.readlink())[:5] for path in pathlib.Path("/proc/self/fd").iterdir()))
atexit.register(print, "at the exit")
def annotated(x: int): ...
print(annotated.__annotations__)
"""
ENDS = {
    "the end": "threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()",
    "exit": "sys.exit(300)",
    "exit with a text": "sys.exit('enough')",
    "exit without a code": "sys.exit()",
    "exception": "raise ValueError('planted')",
    "interrupted": "signal.raise_signal(signal.SIGINT)",
    "signal": "sys.stdout.flush(); signal.raise_signal(signal.SIGTERM)",
    "no syntax": "1 1",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_knows_says_and_leaves_as_a_real_one(end, start, tmp_path):
    (tmp_path / "script.py").write_text(FACTS + ENDS[end])
    pairs = [
        start(1, "b", script=tmp_path / "script.py", cwd=tmp_path, real=r) for r in (True, False)
    ]
    statuses = [each.wait() for each in pairs]
    assert pairs[0].output == pairs[1].output
    assert statuses[0] == statuses[1]


def test_each_draws_other_numbers(start, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import random, numpy; print(random.random(), numpy.random.random())\n")
    trainers = [start(script=path) for _ in range(2)]
    assert [each.wait() for each in trainers] == [0, 0]
    (first, second), (third, fourth) = (each.output.split() for each in trainers)
    assert len({first, second, third, fourth}) == 4
