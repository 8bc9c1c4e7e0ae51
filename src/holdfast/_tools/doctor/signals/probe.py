"""Stands in for the training while `holdfast doctor` tries the launchers above it.

A copy of this file is put on PYTHONPATH as sitecustomize.py, so that every Python of the chain
runs it before all else. In the one that would train it takes over and never gives back; other
scripts of the user end at once; launchers go on as ever. It tells what it sees in files.

The Python that trains may be of another environment than ours: so the standard library alone,
nothing of holdfast at the top, and nothing that Python 3.8 does not know.
"""

# pathlib takes long to import, and this comes before every launcher.
# ruff: noqa: PTH100, PTH109, PTH110, PTH112, PTH118, PTH119, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

_HEARD = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
_LOOK_SECONDS = 0.1
# Options of the interpreter that take the next word.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_TOLD = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
)


def what_it_runs(words: Sequence[str]) -> tuple[str, str]:
    """The kind (file, module, text) and name of what a Python is started with.

    >>> what_it_runs(["python", "-u", "train.py", "--steps", "3"])
    ('file', 'train.py')
    >>> what_it_runs(["python3", "-um", "package.train"])
    ('module', 'package.train')
    >>> what_it_runs(["python", "-c", "print()"])
    ('text', '')
    """
    at = 1
    while at < len(words):
        word = words[at]
        if word in _WITH_VALUE:
            at += 2
        elif word.startswith("--") or word == "-":
            at += 1
        elif word.startswith("-"):
            for place, letter in enumerate(word[1:], 1):
                if letter == "c":
                    return "text", ""
                if letter == "m":
                    rest = word[place + 1 :] or "".join(words[at + 1 : at + 2])
                    return "module", rest
                if letter in "WX":
                    break
            at += 1
        else:
            return "file", word
    return "text", ""


def _is_own(kind: str, name: str) -> bool:
    """Whether this is the user's code, and no program that was installed."""
    if kind == "module":
        first = name.split(".")[0]
        return os.path.isdir(first) or os.path.exists(first + ".py")
    whole = os.path.realpath(name)
    if "site-packages" in whole or "dist-packages" in whole:
        return False
    libraries = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)}
    return not any(whole.startswith(os.path.realpath(each) + os.sep) for each in libraries)


def _is_there(kind: str, name: str) -> bool:
    """Whether Python would find what it is to run; nothing of it is run for that."""
    if kind == "file":
        return os.path.exists(name)
    import importlib.util

    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name.split(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


def role(words: Sequence[str], targets: Collection[str]) -> str:
    """What to do in a Python that was started so: "train", "skip" or "go on"."""
    kind, name = what_it_runs(words)
    if kind == "text":
        return "go on"
    if (name if kind == "module" else os.path.basename(name)) in targets:
        return "train"
    if not _is_own(kind, name):
        return "go on"
    return "skip" if targets else "train"


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def process(pid: int) -> dict[str, Any] | None:
    """One process, and what it does with signals; None if it is gone."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    masks = {}
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(b":")
        if name in (b"SigBlk", b"SigIgn", b"SigCgt"):
            masks[name.decode()] = int(value, 16)
    words = _read(f"/proc/{pid}/cmdline").decode("utf-8", "replace").split("\0")[:-1]
    return {
        "pid": pid,
        "parent": int(fields[1]),
        "started": int(fields[19]),
        "name": _read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip(),
        "words": [word[:300] for word in words[:40]],
        "caught": masks.get("SigCgt", 0) | masks.get("SigBlk", 0),
        "ignored": masks.get("SigIgn", 0),
    }


def above(pid: int) -> list[dict[str, Any]]:
    """A process and all above it, the lowest first."""
    found: list[dict[str, Any]] = []
    while pid > 0 and len(found) < 64:
        one = process(pid)
        if one is None:
            break
        found.append(one)
        pid = one["parent"]
    return found


class _Told:
    """The file in which one process tells what it sees."""

    def __init__(self, folder: str) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}.jsonl"
        path = os.path.join(folder, "told", name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags, 0o600)

    def tell(self, what: str, **more: Any) -> None:
        line = json.dumps(dict(more, what=what, time=time.time())) + "\n"
        os.write(self._file, line.encode())


def _tell_presence(told: _Told, what: str, script: str) -> None:
    told.tell(
        what,
        pid=os.getpid(),
        host=socket.gethostname(),
        script=script,
        python=sys.executable,
        variables={name: os.environ[name] for name in _TOLD if name in os.environ},
        above=above(os.getpid()),
    )


class _Stay:
    """How long the probe stays, as a training would.

    Whoever ended before would let a shell above go on with what comes behind the training. So
    where the doctor is gone, or too late, all that it has started is ended from here.
    """

    def __init__(self, folder: str, seconds: float, doctor: Sequence[int]) -> None:
        self._folder = folder
        self._deadline = time.monotonic() + seconds
        known = [(each["pid"], each["started"]) for each in above(os.getpid())]
        # On another host, or in a container, it cannot be seen.
        self._doctor = tuple(doctor) if tuple(doctor) in known else None

    def is_over(self) -> bool:
        if not os.path.isdir(self._folder):
            return True
        if os.path.exists(os.path.join(self._folder, "stop")):
            return True
        if self._doctor is None:
            is_left = time.monotonic() > self._deadline
        else:
            pid, started = self._doctor
            now = process(pid)
            is_left = now is None or now["started"] != started
        if is_left:
            import shutil

            _kill_chain(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
        return is_left


def _kill_chain(folder: str) -> None:
    """All of this host that the doctor has started, from the top; this process alone is left."""
    mine = os.getpid()
    higher = [each["pid"] for each in reversed(above(mine)[1:])]
    others = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in [*higher, *(pid for pid in others if pid not in higher)]:
        if pid != mine and folder.encode() in _read(f"/proc/{pid}/environ"):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _listen(told: _Told, errand: dict[str, Any], stay: _Stay) -> None:
    """Tell each signal that comes, until it is over."""
    numbers = {getattr(signal, name) for name in _HEARD}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a shell's background: a training does not get it either.
        numbers.remove(signal.SIGINT)
    # Blocked, so that each can be taken with whoever sent it; and with a handler, since `holdfast
    # run` looks in /proc for who catches a signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    chain = [(each["pid"], each["started"]) for each in above(os.getpid())[1:]]
    _tell_presence(told, "here", errand["script"])
    while not stay.is_over():
        info = signal.sigtimedwait(numbers, _LOOK_SECONDS)
        if info is not None:
            name = signal.Signals(info.si_signo).name
            # Of SI_USER, SI_QUEUE and SI_TKILL there is a sender; the others come from the kernel.
            has_sender = info.si_code in (0, -1, -6)
            sender = process(info.si_pid) if has_sender and info.si_pid else None
            told.tell("signal", name=name, sender=sender, code=info.si_code)
            continue
        for pid, started in list(chain):
            now = process(pid)
            if now is None or now["started"] != started:
                chain.remove((pid, started))
                told.tell("gone", pid=pid)


def _measure(told: _Told, errand: dict[str, Any], stay: _Stay) -> None:
    """Meet the other ranks, and reduce with them."""
    _tell_presence(told, "here", errand["script"])
    try:
        from holdfast._tools.doctor.reduce_probe import reduce_with_others
    except ImportError as error:
        told.tell("error", text=f"{sys.executable}: {error}", kind="import")
    else:
        reduce_with_others(told.tell, errand["seconds"], errand.get("backend") or None)
    while not stay.is_over():
        time.sleep(_LOOK_SECONDS)


def _take_over(part: str, errand: dict[str, Any]) -> None:
    # First of all: a doctor that is gone by then would be taken for one that cannot be seen.
    stay = _Stay(errand["folder"], 2 * errand["seconds"], errand["doctor"])
    told = _Told(errand["folder"])
    if part == "skip":
        _tell_presence(told, "skipped", errand["script"])
        return
    if errand["kind"] == "ranks":
        _measure(told, errand, stay)
    else:
        _listen(told, errand, stay)


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    # In a file beside this one: a launcher may pass PYTHONPATH on, and no other variable.
    errand = json.loads(_read(os.path.join(here, "errand.json")))
    words = getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv]
    part = role(words, errand["targets"])
    if part == "go on":
        ours = sys.modules.pop("sitecustomize", None)
        try:
            import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  the one that would have been found without ours
        except ImportError:
            if ours is not None:
                sys.modules["sitecustomize"] = ours
        return
    # Whatever happens from here on, the training must not begin.
    status = 1
    try:
        kind, errand["script"] = what_it_runs(words)
        if _is_there(kind, errand["script"]):
            _take_over(part, errand)
            status = 0
        else:
            print(f"there is no {kind} {errand['script']}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001  the doctor reads it in the output
        print(f"holdfast doctor: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _kill_chain(here)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)


if __name__ == "sitecustomize":
    _begin()
