"""The callback that a user gives to a Trainer.

Lightning has signal handlers, a requeue and a resume of its own. While a fit is a run, holdfast
handles the signals, saves, exits and requeues. Lightning's handlers are not installed: the one for
SIGTERM raises in the middle of a collective operation, and the one for SLURM saves inside the
handler. If the script asked for Lightning's way, a line says that it is not used.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._run.driver import RunCallback
from holdfast._text import say
from holdfast.lightning.fitting import Fit
from holdfast.lightning.package import callback_class, package_of

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
# Lightning does not document any of these; 2.2 to 2.6 have them.
_USED = (
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


class Callback(RunCallback, callback_class()):  # type: ignore[misc]  # of one package or the other
    """Makes `trainer.fit` a run that stops at a step and resumes in the middle of an epoch.

    >>> trainer = Trainer(callbacks=[holdfast.lightning.Callback("runs/a")])  # doctest: +SKIP
    >>> trainer.fit(module, loader)  # doctest: +SKIP

    Module, optimizers, schedulers, precision, loops, other callbacks and the position in the data
    are stored automatically. `more_state` is any other state that decides the next steps. `run.log`
    receives what the module logs.
    """

    name = "holdfast.lightning.Callback"
    kept = ("module", "optimizer", "optimizers", "schedulers", "scaler", "fit")

    # -- what Lightning calls ------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002  Lightning's
        if stage != "fit":
            return
        if trainer.fast_dev_run:
            say("fast_dev_run: this fit is a try and no run; nothing is kept or resumed.")
            return
        self.refuse_another(trainer.callbacks)
        _refuse_version(trainer)
        _refuse_strategy(trainer)
        Callback.teardown(self)  # a subclass may have its own
        self._training = Fit(self, trainer)

    def teardown(self, *_: Any, **__: Any) -> None:
        fit, self._training = self._training, None
        if fit is not None:
            fit.release()

    on_exception = teardown


def _refuse_version(trainer: Any) -> None:
    """Refuse a Lightning that lacks what is read or replaced here, before anything is changed."""
    for path in _USED:
        try:
            operator.attrgetter(path)(trainer)
        except AttributeError as error:
            version = sys.modules[package_of(trainer)].__version__
            raise HoldfastError(
                f"Lightning {version} is not one that holdfast.lightning.Callback knows: "
                f"trainer.{path} is missing.\n"
                "Install one that it knows: pip install 'lightning>=2.2,<2.7'"
            ) from error


def _refuse_strategy(trainer: Any) -> None:
    strategy = trainer.strategy
    name = type(strategy).__name__
    if not any(kind.__name__ in _STRATEGIES for kind in type(strategy).__mro__):
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
