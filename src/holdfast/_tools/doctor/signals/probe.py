"""Takes the place of the training while `holdfast doctor` tries the launchers above it.

A copy of this file is on PYTHONPATH as sitecustomize.py, so every Python of the chain runs it
first. In the process that would train it takes over and never returns; other scripts of the user
end at once; launchers go on. It reports what it observes in files.

The Python that trains may be of another environment: so only the standard library, nothing of
holdfast at the top, and no syntax that Python 3.8 does not have.
"""

# pathlib takes long to import, and every launcher waits for this file.
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
from typing import Any, NamedTuple

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
_POLL_SECONDS = 0.1
# Options of the interpreter that take the next word.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
)


class PythonCommand(NamedTuple):
    """What a Python was started with."""

    kind: str  # file, module or text
    name: str  # empty for a text
    flags: str  # the letters of its own options

    @property
    def loses_path(self) -> bool:
        """True if this Python ignores PYTHONPATH, or the sitecustomize.py there."""
        return bool(set(self.flags) & set("EIS"))


def read_python(words: Sequence[str]) -> PythonCommand:
    """
    >>> tuple(read_python(["python", "-u", "train.py", "--steps", "3"]))
    ('file', 'train.py', 'u')
    >>> tuple(read_python(["python3", "-uIm", "package.train"]))
    ('module', 'package.train', 'uI')
    >>> tuple(read_python(["python", "-c", "print()"]))
    ('text', '', '')
    """
    at, flags = 1, ""
    while at < len(words):
        word = words[at]
        at += 1
        if word in _WITH_VALUE:
            at += 1
        elif word.startswith("-") and not word.startswith("--"):
            for place, letter in enumerate(word[1:], 2):
                if letter == "c":
                    return PythonCommand("text", "", flags)
                if letter == "m":
                    name = word[place:] or "".join(words[at : at + 1])
                    return PythonCommand("module", name, flags)
                if letter in "WX":
                    break
                flags += letter
        elif not word.startswith("--"):
            return PythonCommand("file", word, flags)
    return PythonCommand("text", "", flags)


def role(words: Sequence[str], targets: Collection[str]) -> str:
    """What to do in a Python that was started with these words: "train", "skip" or "go on"."""
    kind, name, _ = read_python(words)
    if kind == "text":
        return "go on"
    if (name if kind == "module" else os.path.basename(name)) in targets:
        return "train"
    if not _is_users(kind, name):
        return "go on"
    return "skip" if targets else "train"


def _is_users(kind: str, name: str) -> bool:
    if kind == "module":
        first = name.split(".")[0]
        return os.path.isdir(first) or os.path.exists(first + ".py")
    whole = os.path.realpath(name)
    if "site-packages" in whole or "dist-packages" in whole:
        return False
    libraries = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)}
    return not any(whole.startswith(os.path.realpath(each) + os.sep) for each in libraries)


def _is_there(kind: str, name: str) -> bool:
    """Whether Python would find the file or module, without running any of it."""
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


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def process(pid: int) -> dict[str, Any] | None:
    """One process and its signal masks; None if it is gone."""
    # The name comes first, in brackets, and may hold anything.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    masks = {}
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(b":")
        if name in (b"SigBlk", b"SigIgn", b"SigCgt"):
            masks[name] = int(value, 16)
    words = _read(f"/proc/{pid}/cmdline").decode("utf-8", "replace").split("\0")[:-1]
    return {
        "pid": pid,
        "parent": int(fields[1]),
        "started": int(fields[19]),
        "name": _read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip(),
        "words": [word[:300] for word in words[:40]],
        "caught": masks.get(b"SigCgt", 0) | masks.get(b"SigBlk", 0),
        "ignored": masks.get(b"SigIgn", 0),
    }


def above(pid: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while pid > 0 and len(found) < 64:
        one = process(pid)
        if one is None:
            break
        found.append(one)
        pid = one["parent"]
    return found


def _is_alive(pid: int, started: int) -> bool:
    now = process(pid)
    return now is not None and now["started"] == started


def _kill_chain(folder: str) -> None:
    """Kill all that the doctor has started on this host, from the top, except this process."""
    mine = os.getpid()
    higher = [each["pid"] for each in reversed(above(mine)[1:])]
    others = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in [*higher, *(pid for pid in others if pid not in higher)]:
        if pid != mine and folder.encode() in _read(f"/proc/{pid}/environ"):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


# -- In the place of the training ------------------------------------------------------------------


class _Report:
    def __init__(self, folder: str) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(os.path.join(folder, "told", name), flags, 0o600)

    def send(self, what: str, **more: Any) -> None:
        line = json.dumps(dict(more, what=what, time=time.time())) + "\n"
        os.write(self._file, line.encode())

    def send_presence(self, what: str, script: str) -> None:
        self.send(
            what,
            pid=os.getpid(),
            host=socket.gethostname(),
            script=script,
            variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            above=above(os.getpid()),
        )


class _Stay:
    """How long the probe stays.

    If it ended earlier, a shell above would go on with the line behind the training. So if the
    doctor is gone, or too late, the probe ends all that the doctor has started.
    """

    def __init__(self, folder: str, seconds: float, doctor: Sequence[int]) -> None:
        self._folder = folder
        self._deadline = time.monotonic() + seconds
        known = [(each["pid"], each["started"]) for each in above(os.getpid())]
        # On another host, or in a container, the doctor is not visible.
        self._doctor = tuple(doctor) if tuple(doctor) in known else None

    def is_over(self) -> bool:
        folder = self._folder
        if not os.path.isdir(folder) or os.path.exists(os.path.join(folder, "stop")):
            return True
        if self._doctor is None:
            is_left = time.monotonic() > self._deadline
        else:
            is_left = not _is_alive(*self._doctor)
        if is_left:
            import shutil

            _kill_chain(folder)
            shutil.rmtree(folder, ignore_errors=True)
        return is_left


def _report_signals(report: _Report, script: str, stay: _Stay) -> None:
    numbers = {getattr(signal, name) for name in _SIGNALS}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a shell's background a training does not receive it either.
        numbers.remove(signal.SIGINT)
    # Blocked for sigtimedwait, and with a handler: `holdfast run` reads in /proc which process
    # catches a signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    chain = [(each["pid"], each["started"]) for each in above(os.getpid())[1:]]
    report.send_presence("here", script)
    while not stay.is_over():
        info = signal.sigtimedwait(numbers, _POLL_SECONDS)
        if info is not None:
            name = signal.Signals(info.si_signo).name
            # The kernel sends SIGHUP when the doctor's terminal has lost its first process.
            if name != "SIGHUP" or info.si_code <= 0:
                report.send("signal", name=name)
            continue
        for each in [each for each in chain if not _is_alive(*each)]:
            chain.remove(each)
            report.send("gone", pid=each[0])


def _meet_ranks(report: _Report, errand: dict[str, Any], script: str, stay: _Stay) -> None:
    report.send_presence("here", script)
    # Without other ranks, torch is not needed.
    if all(os.environ.get(name, "1") == "1" for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        report.send("done")
    else:
        try:
            from holdfast.torch.reduce import meet_other_ranks
        except ImportError as error:
            report.send("error", text=f"{sys.executable}: {error}", kind="import")
        else:
            meet_other_ranks(report.send, errand["seconds"], errand["backend"] or None)
    while not stay.is_over():
        time.sleep(_POLL_SECONDS)


def _take_over(part: str, script: str, errand: dict[str, Any]) -> None:
    # First of all: a doctor that ends meanwhile must not count as invisible.
    stay = _Stay(errand["folder"], 2 * errand["seconds"], errand["doctor"])
    report = _Report(errand["folder"])
    if part == "skip":
        report.send_presence("skipped", script)
    elif errand["kind"] == "ranks":
        _meet_ranks(report, errand, script, stay)
    else:
        _report_signals(report, script, stay)


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    # In a file, not in a variable: a launcher may pass on PYTHONPATH and nothing else.
    errand = json.loads(_read(os.path.join(here, "errand.json")))
    words = getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv]
    part = role(words, errand["targets"])
    if part == "go on":
        ours = sys.modules.pop("sitecustomize", None)
        try:
            import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  the user's own
        except ImportError:
            if ours is not None:
                sys.modules["sitecustomize"] = ours
        return
    # From here on, the training must not begin in any case.
    status = 1
    try:
        kind, script, _ = read_python(words)
        if _is_there(kind, script):
            _take_over(part, script, errand)
            status = 0
        else:
            print(f"there is no {kind} {script}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001  the doctor reads it in the output
        print(f"holdfast doctor: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _kill_chain(here)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)


if __name__ == "sitecustomize":
    _begin()
