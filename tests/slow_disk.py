"""A disk on which every flush takes its time, for the keeper of a run and nobody else."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import environment

_CUSTOMIZE = """\
import os, sys, time

if any("holdfast._keeper" in word for word in sys.orig_argv):
    flush = os.fsync

    def fsync(descriptor):
        time.sleep(float(os.environ["SLOW_DISK_SECONDS"]))
        flush(descriptor)

    os.fsync = fsync
"""


def slow_disk(place: Path, seconds: float) -> dict[str, str]:
    """The environment of a training whose keeper finds that a flush takes so long."""
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(_CUSTOMIZE)
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    return environment(PYTHONPATH=path, SLOW_DISK_SECONDS=str(seconds))
