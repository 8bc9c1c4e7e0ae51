"""The `holdfast` command as a person calls it: in this process, or in one of its own.

`holdfast` calls the program's `main` here, which takes milliseconds. `holdfast_process` starts the
program: for signals, limits, encodings, a command that dies, and a command that leads others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.in_process import run_main
from tests.support import SCRIPTS, SLACK

TRAIN_NUMPY = SCRIPTS / "train_numpy.py"
PROGRAM = Path(sys.executable).with_name("holdfast")
FEW = json.dumps({"checkpoint_every": 1_000_000})


def environment(**extra: str) -> dict[str, str]:
    """Ours, without what would colour or break the lines."""
    left_out = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE")
    return {**{k: v for k, v in os.environ.items() if k not in left_out}, **extra}


def holdfast(
    *arguments: Any,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    given: str = "",
    stdout: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, in this process; it ends as the program would."""
    words = [str(PROGRAM), *map(str, arguments)]
    return run_main(words, env=env or environment(), cwd=cwd, given=given, stdout=stdout)


def holdfast_process(
    *arguments: Any, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Start the program, and wait for its end; through pipes, unless `options` say otherwise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60 * SLACK}
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        text=True,
        env=env or environment(),
        check=False,
        **{**pipes, **options},
    )


def succeed(*arguments: Any, **options: Any) -> str:
    """What a command that must succeed prints."""
    return output_of(holdfast(*arguments, **options))


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """What was printed, by a command that has succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def status_of(folder: Path) -> dict[str, Any]:
    """The one run of `status --json`."""
    (found,) = json.loads(succeed("status", folder, "--json"))
    assert isinstance(found, dict)
    return found
