"""Who yields: a Trainer has a handler for SIGTERM and a resume of its own, and one must do.

While a training is a run, holdfast hears the signals, saves and leaves; what the Trainer would
have done is said, if the script asked for it. Its checkpoints in `output_dir` are written as ever:
a best model is loaded from there.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import transformers
import transformers.trainer

from holdfast._errors import HoldfastError
from holdfast._text import say

# What of a Trainer is ours while it trains; since 5.4 an epoch is a method of its own.
TAKEN = (
    "_inner_training_loop",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_finalize_training",
    "_load_rng_state",
)
# What it has counted by its first event, and we keep: what is missing would be kept as nothing.
COUNTED = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")


class TrainerPatches:
    """Attributes of single objects that are ours for a while."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, place: Any, name: str, ours: Any) -> Any:
        """Put ours in place of an attribute, and return what was there."""
        former, is_own = getattr(place, name), name in vars(place)

        def put_back() -> None:
            if is_own:
                setattr(place, name, former)
            else:
                delattr(place, name)  # the class's own is seen again

        self._undo.append(put_back)
        setattr(place, name, ours)
        return former

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def refuse_other_trainers(trainer: Any) -> None:
    """Refuse a Trainer that is made otherwise, or whose state is held by another."""
    missing = [name for name in TAKEN if not callable(getattr(trainer, name, None))]
    if not hasattr(transformers.trainer, "skip_first_batches"):
        missing.append("skip_first_batches")
    _refuse_missing(missing)
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise HoldfastError(
            "holdfast.transformers.Callback: DeepSpeed holds model and optimizer in its own way, "
            "and cannot be kept exactly.\nUse one device, DDP, or FSDP of version 2."
        )


def refuse_other_counts(trainer: Any) -> None:
    """Refuse a Trainer that begins to train and counts otherwise: it would not be exact."""
    _refuse_missing([name for name in COUNTED if not hasattr(trainer, name)])


def _refuse_missing(names: list[str]) -> None:
    if names:
        raise HoldfastError(
            f"holdfast.transformers.Callback: this Trainer (Transformers "
            f"{transformers.__version__}) has no {names[0]}.\n"
            "Install one that has: pip install 'transformers>=5.4'"
        )


def refuse_search(trial: Any) -> None:
    if trial is not None:
        raise HoldfastError(
            "hyperparameter_search with holdfast.transformers.Callback: all trials would be one "
            "run.\nLeave the callback out of the search."
        )


def yield_signals(trainer: Any) -> None:
    """Take the Trainer's own handler away: it waits for seconds, and saves amid a step."""
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
            "holdfast hears the signals, saves and leaves.\nLeave the argument out."
        )


def yield_resume(path: Any, *, is_resumed: bool) -> None:
    """Say which of two states counts, if the Trainer has loaded one as well."""
    if not path:
        return
    if is_resumed:
        say(
            f"the Trainer has loaded {path} (resume_from_checkpoint); the run goes on with what "
            "its own folder has, and that counts.\nLeave resume_from_checkpoint out, or use a new "
            "folder to begin from there."
        )
    else:
        say(f"the run begins with what the Trainer has loaded from {path}.")
