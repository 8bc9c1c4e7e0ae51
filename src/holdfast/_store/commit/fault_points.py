"""Fault points: where the tests kill a process in the middle of a commit.

Every stage of a commit passes one. They do nothing unless the environment names the stage.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from holdfast._environment import variables


def fault_point(stage: str) -> None:
    """Die here by kill -9, once, if the environment asks for it (`stage@marker-file`)."""
    spec = variables.text("HOLDFAST_FAULT")
    if not spec:
        return
    wanted, _, marker = spec.partition("@")
    if wanted != stage:
        return
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
