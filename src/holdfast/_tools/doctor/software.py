"""GPU and driver, the packages of the Python that trains, and whether py-spy can read stacks."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast._environment.processes.libc import libc
from holdfast._environment.processes.proc import FairDeadline, read_bytes, read_number
from holdfast._environment.processes.stacks import Dump, dump_stacks, find_pyspy
from holdfast._environment.processes.tree import children
from holdfast._text import duration, size
from holdfast._tools.doctor.check import Check, slow
from holdfast._tools.doctor.signals.target import shebang
from holdfast._tools.lint.launch import CONDA, CONTAINERS, RUNNERS, is_python

_BUSY_SHARE = 0.1  # of a GPU's memory
_OLDEST = {"torch": (2, 4), "numpy": (1, 26)}
_OLDEST_PYTHON = (3, 11)
# They start a Python with files of its own.
_ELSEWHERE = CONTAINERS | RUNNERS | CONDA | {"docker", "pipenv", "podman", "poetry", "ssh"}

Facts = Mapping[str, Any]  # as `machine_facts.py` has printed them


def python_of(command: Sequence[str]) -> str | None:
    """The Python that a command starts, if its words name one or its launcher has one."""
    names = [Path(word).name for word in command]
    if not _ELSEWHERE.isdisjoint(names):
        return None
    for word, name in zip(command, names, strict=True):
        if is_python(name) and (found := shutil.which(word)) is not None:
            return found
    for word, name in zip(command, names, strict=True):
        if name in ("torchrun", "accelerate", "deepspeed"):
            # A launcher starts the ranks with its own Python, which is behind `#!`.
            path = shutil.which(word)
            words = shlex.split(shebang(Path(path))[2:]) if path is not None else []
            return shutil.which(words[0]) if words and is_python(Path(words[0]).name) else None
    return None


def judge_gpus(facts: Facts | None, packages: Facts | None) -> list[Check]:
    """What the driver says; nothing where there is no GPU."""
    if facts is None:
        found = "the driver does not answer: a failed GPU blocks every process that asks it"
        remedy = "nvidia-smi   (if that hangs too, the machine has to be restarted)"
        return [Check("gpu", "fail", found, remedy)]
    data = {key: facts.get(key) for key in ("driver", "cuda", "gpus")}
    if facts.get("error"):
        remedy = "nvidia-smi   (after an update of the driver, restart the machine)"
        return [Check("gpu", "fail", f"NVIDIA's driver says: {facts['error']}", remedy, data)]
    gpus = [each for each in facts.get("gpus") or () if isinstance(each, dict)]
    if not gpus:
        return []
    names = sorted({str(each.get("name")) for each in gpus})
    found = f"{len(gpus)} × {', '.join(names)}, driver {facts.get('driver')}"
    checks = list(_broken_gpus(gpus, data)) or [Check("gpu", "ok", found, "", data)]
    return [*checks, *judge_torch(facts, packages or {})]


def _broken_gpus(gpus: Sequence[Facts], data: dict[str, Any]) -> Iterator[Check]:
    check = partial(Check, "gpu", data=data)
    for each in gpus:
        name, show = f"GPU {each.get('index')}", f"nvidia-smi -i {each.get('index')}"
        if each.get("error"):
            remedy = f"{show} -q   (then leave it out, or restart)"
            yield check("fail", f"{name}: {each['error']}", remedy)
            continue
        if each.get("ecc"):
            found = f"{name}: {each['ecc']} memory errors that could not be corrected"
            yield check("warn", found, f"{show} -r   (as root, resets it)")
        used, total = each.get("used"), each.get("total")
        if used and total and used > _BUSY_SHARE * total:
            found = f"{name}: {size(used)} of {size(total)} are in use already"
            yield check("warn", found, f"{show}   (shows by whom)")


def judge_torch(facts: Facts, packages: Facts) -> Iterator[Check]:
    """Whether torch was built for this driver."""
    if not packages.get("has_torch") or packages.get("torch_hip"):
        return
    built, driver = packages.get("torch_cuda"), facts.get("cuda")
    check = partial(Check, "torch and cuda", data={"torch_cuda": built, "driver_cuda": driver})
    if built is None:
        found = "torch is built for the CPU alone, and there are GPUs: the training will not use "
        remedy = "pip install --force-reinstall torch   (with the index for your CUDA, see "
        yield check("warn", f"{found}them", f"{remedy}pytorch.org)")
        return
    wanted = version(str(built))
    if not driver or not wanted:
        return
    newest = f"{driver[0]}.{driver[1]}"
    # Within one major version, a driver runs what was built for a newer minor version.
    if wanted[0] <= driver[0]:
        yield check("ok", f"torch is built for CUDA {built}, the driver knows up to {newest}")
        return
    found = (
        f"torch is built for CUDA {built}, and driver {facts.get('driver')} knows up to {newest}"
    )
    remedy = f"a newer driver, or a torch built for CUDA {newest} or older (pytorch.org has the "
    yield check("fail", f"{found}: no GPU will be found", f"{remedy}command)")


def judge_packages(facts: Facts | None, own: str, python: str | None = None) -> Iterator[Check]:
    """Versions that are too old or do not fit each other; `own` is this holdfast's version."""
    if facts is None:
        found = f"{python or 'this Python'} did not say which packages it has"
        yield Check("packages", "warn", found, f"{python or 'python'} -m pip list")
        return
    versions = facts.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    data = {key: facts.get(key) for key in ("python", "executable", "versions", "torch_cuda")}
    wrong = list(_wrong_packages(facts, versions, own, data))
    yield from wrong
    if not wrong:
        names = ("torch", "numpy", "holdfast")
        shown = [f"{name} {versions[name]}" for name in names if name in versions]
        found = ", ".join([f"Python {facts.get('python')}", *shown])
        yield Check("packages", "ok", found, "", data)


def _wrong_packages(
    facts: Facts, versions: Mapping[str, str], own: str, data: dict[str, Any]
) -> Iterator[Check]:
    check = partial(Check, "packages", data=data)
    executable = facts.get("executable")
    pip = f"{shlex.quote(str(executable))} -m pip install"
    python = str(facts.get("python"))
    if version(python) and version(python) < _OLDEST_PYTHON:
        found = f"{executable} is Python {python}; holdfast needs 3.11 or newer"
        yield check("fail", found, "use a newer Python")
    there = versions.get("holdfast")
    if not facts.get("has_holdfast"):
        found = f"{executable} has no holdfast: a script that imports it fails"
        yield check("warn", found, f"{pip} holdfast")
    elif there is not None and there != own:
        found = f"{executable} has holdfast {there}, and this command is of {own}"
        yield check("warn", found, f"{pip} holdfast=={own}")
    for name, least in _OLDEST.items():
        have = versions.get(name)
        if have is not None and version(have) and version(have) < least:
            wanted = ".".join(map(str, least))
            found = f"{name} {have} is older than {wanted}, with which holdfast is tested"
            yield check("warn", found, f"{pip} '{name}>={wanted}'")


def version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> version("2.13.0+cpu"), version("12.4"), version("?")
    ((2, 13), (12, 4), ())
    """
    match = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2] or 0)) if match else ()


# -- Whether py-spy can read the stacks of a process -----------------------------------------------
_STACKS_SECONDS, _STACKS_TRIES = 3.0, 3
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


def try_stacks() -> Check | None:
    """Read our own stack; None outside Linux."""
    if sys.platform != "linux":
        return None
    program, pid = find_pyspy(), os.getpid()
    if program is None:
        return judge_stacks(None, 0.0)
    libc().prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # as a run allows it to its keeper
    deadline = FairDeadline(_STACKS_SECONDS, lambda: [pid, *children(pid)])
    try:
        # A reading fails if it meets a change of the stack: it does not stop the process.
        for _ in range(_STACKS_TRIES):
            began = time.monotonic()
            dump = dump_stacks([pid], _STACKS_SECONDS, program)[pid]
            check = judge_stacks(dump, time.monotonic() - began)
            if check.state == "ok":
                return check
            if dump.is_late:
                break
    finally:
        libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
    return slow("stacks", f"py-spy has read none ({check.data['error']})", deadline) or check


def judge_stacks(dump: Dump | None, seconds: float) -> Check:
    """What py-spy has read; None: there is no py-spy."""
    scope = read_number("/proc/sys/kernel/yama/ptrace_scope")
    data = {"ptrace_scope": scope, "seconds": round(seconds, 3), "error": None}
    where = "" if scope is None else f" (ptrace scope {scope})"
    if dump is None:
        found = (
            "py-spy is missing: the stacks of a hang come from Python alone, and not of processes "
            "that it has not prepared"
        )
        return Check("stacks", "warn", found, "pip install py-spy", data | {"error": "missing"})
    names = [frame.get("name") for thread in dump.threads for frame in thread.frames]
    if try_stacks.__name__ in names:
        found = f"py-spy reads those of a process in {duration(seconds)}{where}"
        return Check("stacks", "ok", found, "", data)
    remedy = "pip install --upgrade py-spy"
    if scope:
        remedy = "sysctl kernel.yama.ptrace_scope=1   (as root; 0 if that does not help)"
    elif b"\nSeccomp:\t2" in (read_bytes("/proc/self/status") or b""):
        remedy = "docker run --cap-add SYS_PTRACE …"
    said = (dump.error or "it saw no frames").replace("\n", " ")
    found = f"{said}{where}: those of a hang come from Python alone"
    return Check("stacks", "warn", found, remedy, data | {"error": said})
