"""Who yields: Lightning has handlers, a requeue and a resume of its own, and there can be but one.

While a fit is a run, holdfast hears the signals, saves, leaves and requeues. Lightning's handlers
are not put in place: its own for SIGTERM raises in the middle of what other ranks do together, and
the one for SLURM saves inside the handler. What Lightning would have done is said, if the script
asked for it.
"""

from __future__ import annotations

import atexit
import contextlib
import subprocess
import sys
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._text import say
from holdfast.lightning.package import package_of, part_of

_LEAVE_SECONDS = 20.0
_KNOWN = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
# None of these is promised by Lightning; 2.2 to 2.6 have them.
_READ = (
    "_run_stage",
    "_signal_connector.register_signal_handlers",
    "_accelerator_connector.cluster_environment",
    "_checkpoint_connector._ckpt_path",
    "_logger_connector._callback_metrics",
    "_logger_connector._logged_metrics",
    "_logger_connector._progress_bar_metrics",
    "_logger_connector._first_loop_iter",
    "_logger_connector._current_fx",
    "fit_loop.setup_data",
    "fit_loop.on_advance_start",
    "fit_loop.on_advance_end",
    "fit_loop._combined_loader",
    "fit_loop._data_fetcher",
    "fit_loop._load_combined_loader_states",
    "fit_loop._last_train_dl_reload_epoch",
    "fit_loop._should_accumulate",
    "fit_loop.epoch_loop.advance",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._should_check_val_fx",
    "fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch",
)


class LightningPatches:
    """Methods of single objects that are ours for a while; their classes are left alone."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str]] = []

    def put(self, place: Any, name: str, ours: Any) -> Any:
        """Put ours in place of a method, and return Lightning's own."""
        former = getattr(place, name)
        setattr(place, name, ours)
        self._put.append((place, name))
        return former

    def undo(self) -> None:
        while self._put:
            place, name = self._put.pop()
            vars(place).pop(name, None)


def refuse_unknown(trainer: Any) -> None:
    """Refuse a Lightning that lacks what is read or replaced here, before anything is touched."""
    missing = [path for path in _READ if not _has(trainer, path)]
    if missing:
        version = sys.modules[package_of(trainer)].__version__
        raise HoldfastError(
            f"Lightning {version} is not one that holdfast.lightning.Callback knows: "
            f"trainer.{missing[0]} is missing.\n"
            "Install one that it knows: pip install 'lightning>=2.2,<2.7'"
        )


def _has(found: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def refuse_strategy(trainer: Any) -> None:
    """Refuse what shares a training out in a way that a run cannot keep."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    if not any(kind.__name__ in _KNOWN for kind in type(strategy).__mro__):
        raise HoldfastError(
            f"holdfast.lightning.Callback: a fit with {name} cannot be kept exactly.\n"
            "Use one device, strategy='ddp', or ModelParallelStrategy for sharded models."
        )
    launcher = strategy.launcher
    if launcher is not None and type(launcher).__name__ == "_MultiProcessingLauncher":
        raise HoldfastError(
            f"holdfast.lightning.Callback: {name} starts its processes by multiprocessing, and "
            "their exit statuses would be lost.\n"
            "Use strategy='ddp', or start the processes by torchrun or srun."
        )


def yield_signals(trainer: Any, patches: LightningPatches) -> None:
    """Keep Lightning's handlers from being put in place in this fit."""
    patches.put(trainer._signal_connector, "register_signal_handlers", _do_nothing)
    epoch_loop = trainer.fit_loop.epoch_loop
    if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
        # A collective in each step, to tell what nobody hears here.
        patches.put(epoch_loop, "_broadcast_sigterm_tensor", _do_nothing)
    environment = trainer._accelerator_connector.cluster_environment
    slurm = part_of(trainer, "plugins.environments").SLURMEnvironment
    if isinstance(environment, slurm) and environment.auto_requeue:
        say(
            "SLURM: Lightning's own requeue and its handlers are switched off in this fit; "
            "holdfast hears the signals, saves and requeues.\n"
            "To silence this: Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])."
        )


def yield_resume(trainer: Any, *, is_resumed: bool) -> None:
    """Say which of two states counts, if Lightning has loaded one as well."""
    path = trainer._checkpoint_connector._ckpt_path
    if not path:
        return
    if not is_resumed:
        say(f"the run begins with what Lightning has loaded from {path}.")
        return
    say(
        f"Lightning has loaded {path} (ckpt_path); the run folder has something newer, and that "
        "counts.\nLeave ckpt_path out, or use a new folder to begin from that file."
    )
    _begin_afresh(trainer.fit_loop)


def _begin_afresh(loop: Any) -> None:
    """Let loops forget that they were to go on in Lightning's own way."""
    loop._restarting = loop._loaded_from_state_dict = False
    if hasattr(loop, "_resuming_from_checkpoint"):
        loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting") and hasattr(inner, "_loaded_from_state_dict"):
            _begin_afresh(inner)


def release_children(trainer: Any) -> None:
    """Let ranks that Lightning has started leave with their status.

    Its observer would take a status for a failure, and kill this process too.
    """
    children = getattr(trainer.strategy.launcher, "procs", None)
    if not children:
        return
    leaving = list(children)
    children.clear()
    atexit.register(_wait_for, leaving)


def _wait_for(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LEAVE_SECONDS)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
