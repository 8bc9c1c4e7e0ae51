"""GPU and driver, and the packages of the Python that is to train."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast._text import size
from holdfast._tools.doctor.finding import Check
from holdfast._tools.lint.wrappers import CONTAINERS, RUNNERS, is_python

_BUSY_SHARE = 0.1  # of a GPU's memory
_TORCH = (2, 4)
_NUMPY = (1, 26)
_PYTHON = (3, 11)
_ELSEWHERE = RUNNERS | {
    "conda",
    "docker",
    "mamba",
    "micromamba",
    "pipenv",
    "podman",
    "poetry",
    "ssh",
}


def python_of(command: Sequence[str]) -> str | None:
    """The Python that a command starts, if its words name one or its launcher has one."""
    names = [Path(word).name for word in command]
    if not CONTAINERS.isdisjoint(names) or not _ELSEWHERE.isdisjoint(names):
        return None  # it has files of its own
    for word, name in zip(command, names, strict=True):
        if is_python(name) and (found := shutil.which(word)) is not None:
            return found
    for word in command:
        if Path(word).name in ("torchrun", "accelerate", "deepspeed"):
            return _python_of_script(shutil.which(word))
    return None


def _python_of_script(path: str | None) -> str | None:
    """What stands behind `#!`: a launcher runs the ranks with the Python that runs itself."""
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return None
    words = shlex.split(first[2:]) if first.startswith("#!") else []
    return shutil.which(words[0]) if words and is_python(Path(words[0]).name) else None


def judge_gpus(facts: Mapping[str, Any] | None, packages: Mapping[str, Any] | None) -> list[Check]:
    """What the driver says; nothing where there is no GPU."""
    if facts is None:
        return [
            Check(
                "gpu",
                "fail",
                "the driver does not answer: a GPU that has failed holds whoever asks",
                "nvidia-smi   (if that hangs too, the machine has to be restarted)",
            )
        ]
    data = {key: facts.get(key) for key in ("driver", "cuda", "gpus")}
    if facts.get("error"):
        return [
            Check(
                "gpu",
                "fail",
                f"NVIDIA's driver says: {facts['error']}",
                "nvidia-smi   (after an update of the driver, restart the machine)",
                data,
            )
        ]
    gpus = [each for each in facts.get("gpus") or () if isinstance(each, dict)]
    if not gpus:
        return []
    names = sorted({str(each.get("name")) for each in gpus})
    found = f"{len(gpus)} × {', '.join(names)}, driver {facts.get('driver')}"
    checks = list(_broken(gpus, data)) or [Check("gpu", "ok", found, "", data)]
    checks += judge_torch(facts, packages or {})
    return checks


def _broken(gpus: Sequence[Mapping[str, Any]], data: dict[str, Any]) -> Iterator[Check]:
    for each in gpus:
        name = f"GPU {each.get('index')}"
        look = f"nvidia-smi -i {each.get('index')}"
        if each.get("error"):
            found = f"{name}: {each['error']}"
            yield Check("gpu", "fail", found, f"{look} -q   (then leave it out, or restart)", data)
            continue
        if each.get("ecc"):
            found = f"{name}: {each['ecc']} memory errors that could not be corrected"
            yield Check("gpu", "warn", found, f"{look} -r   (as root, resets it)", data)
        used, total = each.get("used"), each.get("total")
        if used and total and used > _BUSY_SHARE * total:
            found = f"{name}: {size(used)} of {size(total)} are in use already"
            yield Check("gpu", "warn", found, f"{look}   (shows by whom)", data)


def judge_torch(facts: Mapping[str, Any], packages: Mapping[str, Any]) -> Iterator[Check]:
    """Whether torch was built for the driver and GPUs that there are."""
    if not packages.get("has_torch") or packages.get("torch_hip"):
        return
    built, driver = packages.get("torch_cuda"), facts.get("cuda")
    data = {"torch_cuda": built, "driver_cuda": driver}
    if built is None:
        yield Check(
            "torch and cuda",
            "warn",
            "torch is built for the CPU alone, and there are GPUs: the training will not use them",
            "pip install --force-reinstall torch   (with the index for your CUDA, see pytorch.org)",
            data,
        )
        return
    wanted = version(str(built))
    if not driver or not wanted:
        return
    # Within one major version a driver runs what was built for a newer minor one.
    if wanted[0] > driver[0]:
        yield Check(
            "torch and cuda",
            "fail",
            f"torch is built for CUDA {built}, and driver {facts.get('driver')} knows up to "
            f"{driver[0]}.{driver[1]}: no GPU will be found",
            f"a newer driver, or a torch built for CUDA {driver[0]}.{driver[1]} or older "
            "(pytorch.org has the command)",
            data,
        )
    else:
        found = f"torch is built for CUDA {built}, the driver knows up to {driver[0]}.{driver[1]}"
        yield Check("torch and cuda", "ok", found, "", data)


def judge_packages(
    facts: Mapping[str, Any] | None, own: str, python: str | None = None
) -> Iterator[Check]:
    """Versions too old, or that do not fit each other; `own` is the version that runs this."""
    if facts is None:
        found = f"{python or 'this Python'} did not say which packages it has"
        yield Check("packages", "warn", found, f"{python or 'python'} -m pip list")
        return
    versions = facts.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    pip = f"{shlex.quote(str(facts.get('executable')))} -m pip install"
    data = {key: facts.get(key) for key in ("python", "executable", "versions", "torch_cuda")}
    wrong = list(_wrong(facts, versions, own, pip, data))
    yield from wrong
    if not wrong:
        names = ("torch", "numpy", "holdfast")
        shown = [f"{name} {versions[name]}" for name in names if name in versions]
        yield Check(
            "packages", "ok", ", ".join([f"Python {facts.get('python')}", *shown]), "", data
        )


def _wrong(
    facts: Mapping[str, Any],
    versions: Mapping[str, str],
    own: str,
    pip: str,
    data: dict[str, Any],
) -> Iterator[Check]:
    python = str(facts.get("python"))
    if version(python) and version(python) < _PYTHON:
        found = f"{facts.get('executable')} is Python {python}; holdfast needs 3.11 or newer"
        yield Check("packages", "fail", found, "use a newer Python", data)
    there = versions.get("holdfast")
    if not facts.get("has_holdfast"):
        found = f"{facts.get('executable')} has no holdfast: a script that imports it fails"
        yield Check("packages", "warn", found, f"{pip} holdfast", data)
    elif there is not None and there != own:
        found = f"{facts.get('executable')} has holdfast {there}, and this command is of {own}"
        yield Check("packages", "warn", found, f"{pip} holdfast=={own}", data)
    for name, least in (("torch", _TORCH), ("numpy", _NUMPY)):
        have = versions.get(name)
        if have is not None and version(have) and version(have) < least:
            wanted = ".".join(map(str, least))
            found = f"{name} {have} is older than {wanted}, with which holdfast is tested"
            yield Check("packages", "warn", found, f"{pip} '{name}>={wanted}'", data)
    for each in facts.get("pins") or ():
        who, wanted, have = each
        found = f"{who} was made for {wanted}, and {have} is installed: imports fail or crash"
        yield Check("packages", "warn", found, f"{pip} '{wanted}'", data)


def version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> version("2.13.0+cpu"), version("12.4"), version("?")
    ((2, 13), (12, 4), ())
    """
    match = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2] or 0)) if match else ()
