"""Prints which packages a Python has.

A program of its own, see `doctor_question`:

    python tell_packages.py

Run by the Python that is to train, which need not be the one that holdfast runs under. Nothing is
imported that it tells about: that would take seconds.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

_NAMES = (
    "holdfast", "torch", "torchvision", "torchaudio", "triton", "numpy", "py-spy", "click",
    "psutil", "rich", "tqdm", "xxhash",
)  # fmt: skip
_PINS = re.compile(r"([A-Za-z0-9._-]+)\s*\(?==\s*([^\s;,)]+)")


def look() -> dict[str, Any]:
    """{"python", "executable", "versions", "pins", "torch_cuda", "torch_hip"}."""
    versions = {name: version for name in _NAMES if (version := _version(name)) is not None}
    pins = []
    for name in ("torch", "torchvision", "torchaudio"):
        if name in versions:
            pins += _broken_pins(name)
    found: dict[str, Any] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "versions": versions,
        "pins": pins,
        "torch_cuda": None,
        "torch_hip": None,
        "has_torch": False,
        # It may be on the path without having been installed.
        "has_holdfast": "holdfast" in versions or _is_there("holdfast"),
    }
    found.update(_torch_build())
    return found


def _version(name: str) -> "str | None":
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError, TypeError):
        return None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _broken_pins(name: str) -> "list[list[str]]":
    """[package, what it wants, what is there] where a package wants one version exactly."""
    found = []
    for line in importlib.metadata.requires(name) or ():
        match = _PINS.match(line)
        if match is None or "extra ==" in line or not _applies(line):
            continue
        there = _version(match[1])
        wanted = match[2]
        if there is not None and there.partition("+")[0] != wanted.partition("+")[0]:
            found.append([name, f"{match[1]}=={wanted}", there])
    return found


def _applies(line: str) -> bool:
    """Whether a condition behind `;` may hold here; only the system is looked at."""
    condition = line.partition(";")[2]
    match = re.search(r"platform_system\s*==\s*['\"](\w+)['\"]", condition)
    system = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}.get(sys.platform, "")
    return match is None or match[1] == system


def _torch_build() -> "dict[str, Any]":
    """For which CUDA torch was built, read from its own file."""
    with contextlib.suppress(ImportError, ValueError, OSError, AttributeError):
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.origin:
            return {}
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        found: dict[str, Any] = {"has_torch": True}
        for name in ("cuda", "hip"):
            match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            found[f"torch_{name}"] = match[1] if match else None
        return found
    return {}


if __name__ == "__main__":
    del sys.path[0]  # our own folder, which is none of its business
    print(json.dumps(look()))
