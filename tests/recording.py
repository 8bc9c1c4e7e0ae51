"""A plugin that records evidence of real deaths and hangs, for unit tests that judge it.

    pytest --record-evidence tests/deaths tests/hangs [-k NAME]

runs the tests that make what the tables hold, whatever their marks, and none besides. Each stores
the files that `holdfast why` reads, without checkpoints. Names of this machine and its paths are
replaced, so that nothing of a restored folder can be looked up here. Not for several workers of
xdist: they would write the same file.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "unit/recorded"
HOME, HOST, BOOT = "/home/ada", "node1", "00000000-0000-4000-8000-000000000000"
COMMAND = ".venv/bin/python -m pytest --record-evidence tests/deaths tests/hangs"

# What the judges read; stacks of a hang as text are for people.
_READ = re.compile(
    r"run/(?:run\.json|journal\.jsonl)"
    r"|run/attempts/\d+/(?:lease|heartbeat|origin|exit|requeue|hang|look)\.json"
    r"|run/attempts/\d+/(?:error|death|led|stacks|output|trouble)(?:-\d+)?\.(?:json|txt|log)"
    r"|run/attempts/\d+/ranks/\d+\.json"
    r"|state/led/[^/]+/life-\d+/(?:led|hang|run)\.json"
    r"|state/led/[^/]+/life-\d+/output\.log"
)
_CHECKPOINT = re.compile(r"run/checkpoints/step-[^/]+")
Keep = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-evidence", action="store_true", help="record deaths and hangs for the unit tests"
    )


@pytest.hookimpl(tryfirst=True)  # before -m deselects any
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--record-evidence"):
        config.option.markexpr = ""
        kept = [each for each in items if "keep_evidence" in getattr(each, "fixturenames", ())]
        config.hook.pytest_deselected(items=[each for each in items if each not in kept])
        items[:] = kept


@pytest.fixture
def keep_evidence(request: pytest.FixtureRequest) -> Keep:
    """Store what a stage has left, where that is asked for: table, name, way, home, scripts."""
    return _record if request.config.getoption("--record-evidence") else lambda *_: None


def _record(table: str, name: str, way: str, home: Path, *scripts: Path) -> None:
    parts = ("run",) if way == "alone" else ("run", "state")
    files = dict(sorted(each for part in parts for each in _files(home, part)))
    for script in scripts:
        files[f"scripts/{script.name}"] = _marked_lines(script)
    path = RECORDS / f"{table}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known.setdefault(name, {})[way] = files
    path.parent.mkdir(exist_ok=True)
    path.write_text(_in_lines(known))


def _marked_lines(script: Path) -> str:
    """The lines on which it can stand, each at its number; no verdict reads the others."""
    lines = script.read_text().splitlines()
    return "\n".join(line if "# stuck: " in line else "" for line in lines).rstrip()


def _in_lines(known: dict[str, dict[str, Any]]) -> str:
    """One record a line: a difference shows which ones have changed."""
    entries = []
    for name, ways in sorted(known.items()):
        lines = (
            f"{json.dumps(way)}: {json.dumps(files, separators=(',', ':'))}"
            for way, files in sorted(ways.items())
        )
        entries.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _files(home: Path, part: str) -> Iterator[tuple[str, Any]]:
    """Each file by its path, JSON as what it says, and checkpoints by their names alone."""
    for path in (home / part).rglob("*"):
        name = path.relative_to(home).as_posix()
        if _CHECKPOINT.fullmatch(name) and path.is_dir():
            yield f"{name}/", None
        elif _READ.fullmatch(name):
            text = _neutral(path.read_text(errors="replace"), home)
            yield _neutral(name, home), json.loads(text) if name.endswith(".json") else text


def _neutral(text: str, home: Path) -> str:
    """The same on a machine of Ada's, with holdfast installed as any package is."""
    installed = f"{HOME}/venv/lib/python3.11/site-packages"
    scripts = {str(ROOT / f"tests/{table}/scripts"): f"{HOME}/scripts" for table in _TABLES}
    packages = {path: installed for path in sys.path if path.endswith("/site-packages")}
    names = {
        **{str(home): HOME, str(ROOT / "src"): installed, sys.prefix: f"{HOME}/venv"},
        **{sys.base_prefix: "/usr", str(ROOT): f"{HOME}/project", tempfile.gettempdir(): "/tmp"},
        **scripts,
        **packages,
        **{path: "/job" for path in _cgroups() if len(path) > 1},
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(): BOOT,
    }
    for name in sorted(names, key=len, reverse=True):  # a folder before the one that it is in
        text = text.replace(name, names[name])
    text = re.sub(rf"\b{re.escape(os.uname().nodename)}\b", HOST, text)
    for name in (str(ROOT), str(Path.home())):
        assert name not in text, f"{name} is left in {text}"
    return text


_TABLES = ("deaths", "hangs")


def _cgroups() -> Iterator[str]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        yield line.split(":", 2)[2]
