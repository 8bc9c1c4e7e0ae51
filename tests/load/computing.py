"""A training that only computes: each step a moment of processor time, at one line.

    computing.py FOLDER itself|worker SECONDS

It prints `ready PID` before the first step, and how often its main thread could not run at the end.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

import holdfast
from holdfast._environment.processes.proc import waits_of

STEP_SECONDS = 0.2  # of a processor: with a twentieth of it, four seconds


def work(rounds: int) -> None:
    """One call of C: no line moves meanwhile."""
    hashlib.pbkdf2_hmac("sha256", b"sample", b"salt", rounds)


def rounds_for(seconds: float) -> int:
    began = time.thread_time()
    work(100_000)
    return int(100_000 * seconds / (time.thread_time() - began))


def serve(link: Connection) -> None:
    while True:
        work(link.recv())
        link.send(os.getpid())


def in_worker() -> tuple[Callable[[int], object], int]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=serve, args=(theirs,), daemon=True)
    worker.start()
    assert worker.pid is not None

    def ask(rounds: int) -> object:
        ours.send(rounds)
        return ours.recv()

    return ask, worker.pid


def main() -> None:
    folder, who, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    rounds = rounds_for(STEP_SECONDS)
    step, pid = in_worker() if who == "worker" else (work, os.getpid())
    settings = holdfast.Settings(max_overhead=1.0, hang_timeout=1.0)
    with holdfast.Run(folder, settings=settings, weights=np.zeros(1000)) as run:
        print("ready", os.getpid(), flush=True)
        began, before = time.monotonic(), waits_of([pid]).get(pid, 0.0)
        for number in run.steps(1_000_000):
            step(rounds)
            if time.monotonic() - began > seconds:
                waited = waits_of([pid]).get(pid, 0.0) - before
                passed = time.monotonic() - began
                print("waited", waited / passed, passed / (number + 1), flush=True)
                break


if __name__ == "__main__":
    main()
