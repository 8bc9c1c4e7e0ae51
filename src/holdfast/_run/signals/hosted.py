"""A loop in a thread of a process that somebody else leads, such as a worker of Ray Train.

Python gives signal handlers to the main thread alone, and that one is the host's. So are the
process, which lives on behind the loop, and its working folder.
"""

from __future__ import annotations

from pathlib import Path

_folder: Path | None = None  # of the script that has asked for the training


def enter_host(folder: str) -> None:
    """From now on loops of this process are led, for a script with this working folder."""
    global _folder
    _folder = Path(folder)


def leave_host() -> None:
    global _folder
    _folder = None


def is_led() -> bool:
    """Whether whoever leads this process knows what a stop is."""
    return _folder is not None


def as_the_script_means(folder: Path) -> Path:
    """The folder that the script has written down: the host may have changed to one of its own."""
    return folder if _folder is None else _folder / folder
