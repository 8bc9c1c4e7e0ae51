"""A training that hangs, or looks as if it did, in the way it is told to.

    hanging.py HOW --run FOLDER [--timeout SECONDS] [--place FOLDER]

It prints `ready PID` before the first step and `hanging STEP` in the step in which it does: when
its keeper has seen how long a step takes. The lines at which it then stands are marked, so that a
test can look for their numbers in the verdict.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import multiprocessing
import os
import pdb
import queue
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from measured import is_measured  # beside this one, which is run as a script

import holdfast

LONG_SECONDS = 120.0
place = Path()


def take_a_lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # stuck: lock


def wait_for_an_empty_queue() -> None:
    samples: queue.Queue[int] = queue.Queue()
    threading.Thread(target=time.sleep, args=(LONG_SECONDS,), name="feeder", daemon=True).start()
    samples.get()  # stuck: queue


def stick_in_c(library: ctypes.CDLL) -> None:
    """As a library does that waits for a thread of its own."""
    semaphore = ctypes.create_string_buffer(64)
    library.sem_wait(semaphore)  # stuck: call


def match_for_ever() -> None:
    """The time doubles with every letter, and the interpreter is held all the while."""
    re.fullmatch(r"(a+)+", "a" * 60 + "b")  # stuck: regex


def wait_for_a_stuck_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        result = pool.apply_async(take_a_lock_twice)
        result.get()  # stuck: pool


def wait_for_a_dead_pool() -> None:
    """The pool starts another worker, but what the dead one had taken is lost."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        result = pool.apply_async(os._exit, (3,))
        result.get()  # stuck: dead pool


def wait_for_threads_of_its_own() -> None:
    """A task that waits for another, in a pool of one."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:

        def outer() -> None:
            pool.submit(time.time).result()  # stuck: task

        pool.submit(outer).result()  # stuck: future


def read_from_a_dead_disk() -> None:
    with (place / "samples.bin").open("rb", buffering=0) as file:
        file.read(10)  # stuck: disk


def wait_for_somebody() -> None:
    """What is done to it comes from outside."""
    deadline = time.monotonic() + LONG_SECONDS
    while time.monotonic() < deadline and not (place / "gate").exists():
        time.sleep(0.02)


def stop_in_pdb() -> None:
    pdb.set_trace()
    print("went on", flush=True)  # stuck: pdb


def stop_in_debugpy() -> None:
    """At the breakpoint that an editor sets when it has attached."""
    import debugpy

    print("debugpy", debugpy.listen(("127.0.0.1", 0))[1], flush=True)
    debugpy.wait_for_client()
    print("went on", flush=True)  # stuck: debugpy


def compute(rounds: int) -> int:
    """Something that costs an interpreter time, and a tracer much more."""
    total = 0
    for number in range(rounds):
        total += add_one(number) & 7
    return total


def add_one(number: int) -> int:
    return number + 1


def look_on(frame: FrameType, event: str, argument: object) -> object:
    """What a tracer or a profiler in Python does at every line or call: too much."""
    for _ in range(60):
        hash(frame.f_lineno)
    return look_on


def crowd(count: int = 12) -> None:
    """Threads that all want to run from now on, as those of OpenMP do, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # One call without an end, and without the interpreter: they are ready at every moment.
    digest = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"sample", b"salt", 2**31 - 1)
    for number in range(count):
        threading.Thread(target=digest, name=f"omp-{number}", daemon=True).start()


WAYS: dict[str, Callable[[], None]] = {
    "lock": take_a_lock_twice,
    "queue": wait_for_an_empty_queue,
    "gil-asleep": lambda: stick_in_c(ctypes.PyDLL(None)),
    "gil-spinning": match_for_ever,
    "call": lambda: stick_in_c(ctypes.CDLL(None)),
    "pool-stuck": wait_for_a_stuck_pool,
    "pool-dead": wait_for_a_dead_pool,
    "threads": wait_for_threads_of_its_own,
    "disk": read_from_a_dead_disk,
    "waits": wait_for_somebody,
    "pdb": stop_in_pdb,
    "debugpy": stop_in_debugpy,
    "traced": lambda: sys.settrace(look_on),
    "profiled": lambda: sys.setprofile(look_on),
    "many-threads": crowd,
    "swaps": lambda: None,
}


def touch(memory: bytearray) -> None:
    """Much of it, here and there: more than fits is asked for again and again."""
    if not memory:
        memory.extend(bytes(150 << 20))
    for _ in range(300):
        memory[random.randrange(len(memory))] = 1


def work_of(how: str) -> Callable[[bool], object]:
    """What each step does besides, before (False) and after that moment."""
    if how == "swaps":
        memory = bytearray()
        return lambda is_late: touch(memory) if is_late else None
    rounds = {"traced": 20_000, "profiled": 40_000}.get(how, 0)
    return lambda _: compute(rounds)


def main() -> None:
    global place
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=WAYS)
    parser.add_argument("--run", help="the folder of a run")
    parser.add_argument("--timeout", type=float, help="that is given; else it is learned")
    parser.add_argument("--at", type=int, default=10, help="the first step in which it may hang")
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds of each step")
    parser.add_argument("--total", type=int, default=1_000_000)
    parser.add_argument("--place", type=Path, default=Path(), help="where it reads")
    options = parser.parse_args()
    place = options.place
    work = work_of(options.how)
    settings = holdfast.Settings(max_overhead=1.0, hang_timeout=options.timeout)
    with holdfast.Run(options.run, settings=settings, weights=bytearray(4000)) as run:
        print("ready", os.getpid(), flush=True)
        hangs = False
        for step in run.steps(options.total):
            time.sleep(options.sleep)
            work(hangs)
            is_first = options.at == 0  # of which the keeper can know no measure
            if not hangs and step >= options.at and (is_first or is_measured(options.run, step)):
                hangs = True
                print("hanging", step, flush=True)
                WAYS[options.how]()
    print("done", flush=True)


if __name__ == "__main__":
    main()
