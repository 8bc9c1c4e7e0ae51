"""Ranks that are opening a run notice by themselves that their launcher has died.

A store of torch whose server is gone may hold a rank for the better part of an hour, in a call
that no signal ends. There is no keeper yet. Once the run is open, the keepers watch the launcher.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from holdfast._ranks.world import find_launcher
from holdfast._say import say

_LOOK_SECONDS = 0.5
_ERROR_SECONDS = 3.0  # for the error of the call itself, which says more


class LauncherWatch:
    """Ends this process if the one that started it dies before the run is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._launcher = find_launcher()
        self._parent = os.getppid()
        if self._launcher is not None:
            threading.Thread(target=self._watch, name="holdfast-launcher", daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        assert self._launcher is not None
        while os.getppid() == self._parent:
            if self._is_over.wait(_LOOK_SECONDS):
                return
        if self._is_over.wait(_ERROR_SECONDS):
            return
        say(
            f"{self._folder}: {self._launcher.name} (pid {self._parent}) is gone, and the ranks "
            "had not opened the run yet. This rank leaves with status 1.\n"
            "Nothing was trained. Start the job again."
        )
        os._exit(1)
