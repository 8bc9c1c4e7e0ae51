"""What the cases of adopting share: commands in this process, refusals, and results as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import holdfast
from holdfast._tools.cli import main


def command(*words, status=0):
    """Run a command as its process would; returns what it printed."""
    out, err = io.StringIO(), io.StringIO()
    former, sys.argv = sys.argv, ["holdfast", *map(str, words)]
    left = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        left = end.code
    finally:
        sys.argv = former
    told = out.getvalue() + err.getvalue()
    assert left == status, (left, told)
    return told


def refused(folder, **state):
    """What a run says that does not take the state."""
    try:
        with holdfast.Run(folder, **state):
            raise AssertionError("it was taken")
    except holdfast.StateMismatch as error:
        return str(error)


def run_all(folder: Path, cases: dict[str, Callable[[Path], None]]) -> None:
    """Run each in a folder of its own; what came of it goes to results.json."""
    results = {}
    for name, case in cases.items():
        here = folder / name
        here.mkdir()
        try:
            case(here)
        except BaseException:  # noqa: BLE001  what it was stands in the result
            results[name] = traceback.format_exc()
        else:
            results[name] = "ok"
    (folder / "results.json").write_text(json.dumps(results))
