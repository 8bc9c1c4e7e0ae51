"""A training that dies in the way it is told to.

    dying.py HOW [--run FOLDER] [--at STEP] [--place FOLDER]

With --run it is a run of holdfast; without, it has never heard of holdfast. It prints
`ready PID` before the first step and `dying` in the step in which it dies, or in which it waits
for somebody to end it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MEGABYTE = 1 << 20
place = Path()
run: str | None = None


def wait() -> None:
    """For whoever ends it, or for the file that ends the step."""
    deadline = time.monotonic() + 30
    while not (place / "gate").exists():
        if time.monotonic() > deadline:
            sys.exit("nobody came")
        time.sleep(0.01)


def hog(megabytes: int = 4096) -> None:
    """Take memory and touch it, in the time that a training takes to grow."""
    held = []
    for _ in range(megabytes // 4):
        held.append(bytearray(os.urandom(4096)) * 1024)
        time.sleep(0.02)


def lose_a_helper() -> None:
    """A child takes all the memory, and the parent cannot go on without it."""
    helper = multiprocessing.get_context("fork").Process(target=hog)
    helper.start()
    print("helper", helper.pid, flush=True)
    helper.join()
    if run is None:
        time.sleep(1.2)  # whoever leads it looks in this time, and finds the kill counted
    raise RuntimeError("no more samples: the tokenizer has gone")


def run_machine_code(code: bytes) -> None:
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CFUNCTYPE(None)(address)()


def meet_an_unknown_instruction() -> None:
    run_machine_code({"x86_64": b"\x0f\x0b", "aarch64": b"\0\0\0\0"}[platform.machine()])


def divide_by_zero() -> None:
    if platform.machine() == "x86_64":
        run_machine_code(b"\x31\xc9\xf7\xf1\xc3")  # xor ecx, ecx; div ecx; ret
    os.kill(os.getpid(), signal.SIGFPE)  # elsewhere a division traps nothing


def is_looked_at() -> bool:
    beats = [json.loads(p.read_text()) for p in Path(run or "").glob("attempts/*/heartbeat.json")]
    return run is None or any(beat.get("memory") for beat in beats)


def wait_for_a_look() -> None:
    """A run is older than this when it dies: its keeper has begun to look at it."""
    deadline = time.monotonic() + 20
    while not is_looked_at():
        if time.monotonic() > deadline:
            sys.exit("no keeper looks")
        time.sleep(0.01)


def write_into_a_hole() -> None:
    """A file on a full file system grows without complaint; its pages are not there."""
    wait_for_a_look()
    with (place / "mapped").open("wb+") as file:
        size = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize + 2 * MEGABYTE
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as memory:
            for offset in range(0, size, 4096):
                memory[offset] = 1


def write_past_the_end() -> None:
    """Somebody has cut the file that is mapped."""
    with (place / "mapped").open("wb+") as file:
        file.truncate(MEGABYTE)
        memory = mmap.mmap(file.fileno(), MEGABYTE)
        file.truncate(0)
        memory[0] = 1


def throw_in_cxx() -> None:
    library = ctypes.CDLL("libstdc++.so.6")
    library._ZSt21__throw_runtime_errorPKc(b"the cache of kernels is damaged")


def fail() -> None:
    losses = {"train": 0.5}
    print("loss", losses["valid"])


def fail_after_another() -> None:
    try:
        fail()
    except KeyError as error:
        raise ValueError("no loss of validation") from error


def fail_in_a_thread() -> None:
    feeder = threading.Thread(target=fail, name="feeder")
    feeder.start()
    feeder.join()
    sys.exit(1)


def fill_the_disk() -> None:
    with (place / "results.bin").open("wb", buffering=0) as file:
        while True:
            if file.write(bytes(MEGABYTE)) < MEGABYTE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def leave(status: object) -> Callable[[], None]:
    return lambda: sys.exit(status)


WAYS: dict[str, Callable[[], None]] = {
    "waits": wait,
    "oom": hog,
    "helper-oom": lose_a_helper,
    "segfault": lambda: ctypes.string_at(0) and None,
    "abort": os.abort,
    "illegal": meet_an_unknown_instruction,
    "fpe": divide_by_zero,
    "bus-full": write_into_a_hole,
    "bus-cut": write_past_the_end,
    "cxx": throw_in_cxx,
    "terminate": lambda: ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev(),
    "exception": fail,
    "exception-chained": fail_after_another,
    "exception-thread": fail_in_a_thread,
    "disk-full": fill_the_disk,
    "exit-256": leave(256),
    "exit-minus-1": leave(-1),
    "exit-text": leave("the data are not there"),
    "exit-3": leave(3),
    "ends": lambda: None,
}


@contextlib.contextmanager
def steps(folder: str | None, total: int) -> Iterator[Iterator[int]]:
    """The steps, of a run or of a bare loop."""
    if folder is None:
        print("ready", os.getpid(), flush=True)
        yield iter(range(total))
        return
    import numpy as np

    import holdfast

    settings = holdfast.Settings(max_overhead=1.0)
    with holdfast.Run(folder, settings=settings, weights=np.zeros(1000)) as run:
        print("ready", os.getpid(), flush=True)
        yield run.steps(total)


def main() -> None:
    global place, run
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=WAYS)
    parser.add_argument("--run", help="the folder of a run")
    parser.add_argument("--at", type=int, default=5, help="the step in which it dies")
    parser.add_argument("--place", type=Path, default=Path(), help="where it writes")
    options = parser.parse_args()
    place, run = options.place, options.run
    with steps(options.run, 10) as numbers:
        for step in numbers:
            time.sleep(0.01)
            if step == options.at:
                print("dying", flush=True)
                WAYS[options.how]()
    print("done", flush=True)


if __name__ == "__main__":
    main()
