"""holdfast makes a training run impossible to lose.

with holdfast.Run("runs/demo", model=model, optimizer=optimizer) as run:
    for step in run.steps(10_000):
        ...

PYTEST_DONT_REWRITE: where holdfast is imported before pytest begins, pytest would warn of it, since
there is a plugin in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._store.format.version import __version__

__all__ = [
    "CheckpointError",
    "DamagedCheckpoint",
    "FolderError",
    "HoldfastError",
    "MirrorError",
    "NoGoodCheckpoint",
    "NotARun",
    "ProofError",
    "RanksError",
    "RestoreDiffers",
    "Run",
    "RunIsLive",
    "SaveFailed",
    "Settings",
    "SettingsError",
    "StateError",
    "StateMismatch",
    "Stopped",
    "UnreadableCheckpoint",
    "UnstorableState",
    "__version__",
    "save",
    "stop",
]

if TYPE_CHECKING:
    from holdfast._errors import (
        CheckpointError,
        DamagedCheckpoint,
        FolderError,
        HoldfastError,
        MirrorError,
        NoGoodCheckpoint,
        NotARun,
        ProofError,
        RanksError,
        RestoreDiffers,
        RunIsLive,
        SaveFailed,
        SettingsError,
        StateError,
        StateMismatch,
        Stopped,
        UnreadableCheckpoint,
        UnstorableState,
    )
    from holdfast._run.run import Run
    from holdfast._settings import Settings
    from holdfast._store.folder.requests import save, stop


def __getattr__(name: str) -> Any:
    # On first use: the keeper imports this package too, and needs none of it.
    modules = (
        "jax",
        "keras",
        "lightning",
        "loggers",
        "rules",
        "tensorflow",
        "torch",
        "transformers",
    )
    if name in modules:
        import importlib

        return importlib.import_module(f"holdfast.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from holdfast import _errors, _settings
    from holdfast._run import run
    from holdfast._store.folder import requests

    for module in (run, _settings, _errors, requests):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
