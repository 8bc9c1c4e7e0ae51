"""The callback that a user gives to a Trainer.

A Trainer has a handler for SIGTERM and a resume of its own. While a training is a run, holdfast
handles the signals, saves and exits. If the script asked for the Trainer's way, a line says that
it is not used. Checkpoints in `output_dir` are written as usual: the best model is loaded from
there.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import transformers
import transformers.trainer
from transformers import Trainer, TrainerCallback

from holdfast._errors import HoldfastError
from holdfast._run.driver import RunCallback
from holdfast._text import say
from holdfast.transformers.training import Training

_MOST_FRAMES = 6  # up from an event to the trainer that it comes from
# The methods of a Trainer that are replaced or called; an epoch is a method since version 5.4.
USED_METHODS = (
    "_inner_training_loop",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_finalize_training",
    "_load_rng_state",
)
# The counts that a Trainer has at its first event. A missing one would be stored as nothing.
USED_COUNTS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")


class Callback(RunCallback, TrainerCallback):
    """Makes `trainer.train()` a run that stops at a step and resumes in the middle of an epoch.

    >>> trainer = Trainer(model, args, callbacks=[Callback("runs/a")])  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    Model, optimizer, scheduler, scaler, the trainer's own counts and the position in the data are
    stored automatically. `more_state` is any other state that decides the next steps. `run.log`
    receives what the trainer logs, except times and speeds.
    """

    name = "holdfast.transformers.Callback"
    kept = ("model", "optimizer", "scheduler", "scaler", "trainer")

    # -- what the trainer calls ----------------------------------------------------------

    def on_init_end(self, *_: Any, **__: Any) -> None:
        trainer = _find_trainer(sys._getframe(1), self)
        refuse_other_trainers(trainer)
        _remove_jit_checkpoint(trainer)
        inner = trainer._inner_training_loop

        def train(batch_size: int | None = None, **named: Any) -> Any:
            callbacks = trainer.callback_handler.callbacks
            self.refuse_another(callbacks)
            if self not in callbacks:
                return inner(batch_size, **named)  # the script has removed it
            if named.get("trial") is not None:
                raise HoldfastError(
                    "hyperparameter_search with holdfast.transformers.Callback: all trials would "
                    "be one run.\nLeave the callback out of the search."
                )
            self._training = Training(self, trainer)
            try:
                return self._training.train(inner, batch_size, **named)
            finally:
                self._training = None

        trainer._inner_training_loop = train

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._training is None:
            raise HoldfastError(
                "holdfast.transformers.Callback was added to a Trainer that was made already.\n"
                "Give it to the Trainer when that is made: Trainer(…, callbacks=[…])."
            )
        trainer = self._training.trainer
        _refuse_missing([name for name in USED_COUNTS if not hasattr(trainer, name)])
        self._training.begin()

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if self._training is not None:
            self._training.log(logs or {})


def _find_trainer(frame: FrameType | None, callback: Callback) -> Any:
    """The trainer that has this callback: an event does not name its trainer."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise HoldfastError(
        "holdfast.transformers.Callback: this event does not come from a Trainer of "
        "Transformers.\nGive the callback to one: Trainer(…, callbacks=[…])."
    )


def refuse_other_trainers(trainer: Any) -> None:
    """Refuse a Trainer of an unknown version, and one that DeepSpeed drives."""
    missing = [name for name in USED_METHODS if not callable(getattr(trainer, name, None))]
    if not hasattr(transformers.trainer, "skip_first_batches"):
        missing.append("skip_first_batches")
    _refuse_missing(missing)
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise HoldfastError(
            "holdfast.transformers.Callback: DeepSpeed holds model and optimizer in its own way, "
            "and cannot be kept exactly.\nUse one device, DDP, or FSDP of version 2."
        )


def _refuse_missing(names: list[str]) -> None:
    if names:
        raise HoldfastError(
            f"holdfast.transformers.Callback: this Trainer (Transformers "
            f"{transformers.__version__}) has no {names[0]}.\n"
            "Install one that has: pip install 'transformers>=5.4'"
        )


def _remove_jit_checkpoint(trainer: Any) -> None:
    """Remove the Trainer's own handler: it waits for seconds, and saves in the middle of a step."""
    handler = trainer.callback_handler
    for callback in list(handler.callbacks):
        if type(callback).__name__ != "JITCheckpointCallback":
            continue
        handler.callbacks.remove(callback)
        jit = getattr(callback, "jit_manager", None)
        before = getattr(jit, "_original_sigterm_handler", None)
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        say(
            "enable_jit_checkpoint: the Trainer's own handler for SIGTERM is switched off; "
            "holdfast handles the signals, saves and exits.\nLeave the argument out."
        )
