"""The `holdfast` command as a person calls it: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import SCRIPTS

TRAIN_NUMPY = SCRIPTS / "train_numpy.py"
PROGRAM = Path(sys.executable).with_name("holdfast")
FEW = json.dumps({"checkpoint_every": 1_000_000})


def environment(**extra: str) -> dict[str, str]:
    """Ours, without what would colour or break the lines."""
    left_out = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE")
    return {**{k: v for k, v in os.environ.items() if k not in left_out}, **extra}


def holdfast(
    *arguments: Any, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, through pipes."""
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=env or environment(),
        cwd=cwd,
        check=False,
    )


def succeed(*arguments: Any, **options: Any) -> str:
    """What a command that must succeed prints."""
    done = holdfast(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def status_of(folder: Path) -> dict[str, Any]:
    """The one run of `status --json`."""
    (found,) = json.loads(succeed("status", folder, "--json"))
    assert isinstance(found, dict)
    return found
