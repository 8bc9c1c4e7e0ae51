"""A training loop in a thread of a host process, such as a worker of Ray Train.

The main thread, and with it the signal handlers, belongs to the host. So do the working folder and
the process itself, which goes on after the loop.
"""

from __future__ import annotations

from pathlib import Path

_folder: Path | None = None  # working folder of the script that asked for the training


def enter_host(folder: str) -> None:
    """Loops of this process are hosted from now on, for a script with this working folder."""
    global _folder
    _folder = Path(folder)


def leave_host() -> None:
    global _folder
    _folder = None


def is_led() -> bool:
    """True if the host handles a stop (`holdfast.ray`)."""
    return _folder is not None


def as_the_script_means(folder: Path) -> Path:
    """Resolve a relative folder as the script means it: the host may have another cwd."""
    return folder if _folder is None else _folder / folder
