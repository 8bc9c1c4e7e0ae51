"""The only file that reads the environment."""

from __future__ import annotations

import os

_NOT_FOR_CHILDREN = (
    *("PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC"),
    "HOLDFAST_ERRAND",  # the keeper is no script to be watched
)


def fault_spec() -> str:
    """The commit stage at which the tests kill this process: `stage@marker-file`, or nothing."""
    return os.environ.get("HOLDFAST_FAULT", "")


def child_environment() -> dict[str, str]:
    """The environment for a process of ours: without what would make its start slower."""
    environment = dict(os.environ)
    for name in _NOT_FOR_CHILDREN:
        environment.pop(name, None)
    return environment


def progress_wish() -> str:
    """What HOLDFAST_PROGRESS asks for: "off", "plain", or "" for whatever suits."""
    wish = os.environ.get("HOLDFAST_PROGRESS", "").strip().lower()
    if wish in ("0", "off", "no", "false"):
        return "off"
    return "plain" if wish == "plain" else ""


def terminal_is_dumb() -> bool:
    """Whether the terminal can only append."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def errand_text() -> str:
    """What a proof has asked this process to tell, as JSON; nothing in an ordinary run."""
    return os.environ.get("HOLDFAST_ERRAND", "")


def rank() -> int:
    """Which process of a job that was started by torchrun this is."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0
