"""What a Trainer counts beside model, optimizer and scheduler, as a part of the run's state."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from holdfast.transformers.history import LogHistory

# Of TrainerState, what training changes; the rest is what the script of today has set.
_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# Of the Trainer itself; all are set anew between its preparation and its first event.
_COUNTS = (
    "current_flos",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_num_input_tokens_seen",
    "_initial_global_step",
)


class TrainerRecord:
    """The trainer's counts, its log, and the states of other callbacks.

    What was stored is given back until the training has arrived where it had been: before that,
    the trainer and its callbacks begin anew, and do not know it yet.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stored: dict[str, Any] | None = None
        self._history = LogHistory()
        self.first_epoch = 0  # where a checkpoint of the Trainer's own has begun the run
        self.behind = 0  # batches that were used before, in that epoch
        self.is_over = False
        self.is_early = False  # something other than the number of steps has ended it
        self.seen: list[Any] = [
            None,
            None,
        ]  # the norm of the gradient and the rate, in the last step

    # -- as a part of the run's state -----------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._stored is not None:
            return self._stored
        trainer = self._trainer
        state, control = trainer.state, trainer.control
        self._history.follow(state.log_history)
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "state": {name: _plain(getattr(state, name)) for name in _STATE},
            "counts": {name: _plain(getattr(trainer, name, 0)) for name in _COUNTS},
            "loss": torch.zeros((), device=trainer.args.device) if loss is None else loss,
            "seen": list(self.seen),
            "stops": [control.should_training_stop, control.should_epoch_stop],
            "callbacks": self._callbacks_state(),
            "history": self._history.state(),
            "begun": [self.first_epoch, self.behind],
            "over": [self.is_over, self.is_early],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stored = state
        self._history.load(state["history"])
        self.first_epoch, self.behind = state["begun"]
        self.is_over, self.is_early = state["over"]
        self.seen = list(state["seen"])

    # -- on the way to where the training had been -----------------------------------------

    @property
    def global_step(self) -> int:
        """The optimizer steps that were made."""
        if self._stored is None:
            return int(self._trainer.state.global_step)
        return int(self._stored["state"]["global_step"])

    @property
    def stops(self) -> bool:
        """Whether the epoch or the training had been told to stop, and had not come to its end."""
        return self._stored is not None and any(self._stored["stops"]) and not self.is_over

    def tell_state(self) -> None:
        """Let the trainer's state be what it was: callbacks look at it when they begin."""
        if self._stored is None:
            return
        state = self._trainer.state
        for name, value in self._stored["state"].items():
            setattr(state, name, value)
        state.log_history = self._history.entries()

    def tell_counts(self) -> None:
        """Let the trainer's own counts be what they were."""
        if self._stored is None:
            return
        trainer = self._trainer
        for name, value in self._stored["counts"].items():
            setattr(trainer, name, value)
        with torch.no_grad():
            trainer._tr_loss = torch.as_tensor(self._stored["loss"]).clone().to(trainer.args.device)

    def arrive(self, *, trains: bool = True) -> None:
        """Here the life before had been: everything is as it was, and from now on it is counted."""
        if self._stored is None:
            return
        self.tell_state()
        self.tell_counts()
        control = self._trainer.control
        if not self.is_over:  # else it had ended, and goes on after all
            control.should_training_stop, control.should_epoch_stop = self._stored["stops"]
        self._load_callbacks(self._stored["callbacks"])
        self._stored = None
        if trains:
            self.is_over = self.is_early = False

    # -- other callbacks --------------------------------------------------------------------

    def _named(self) -> dict[str, Any]:
        """The callbacks that have a state, in the Trainer's sense or by state_dict."""
        found: dict[str, Any] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if not (_keeps_state(callback) or isinstance(callback, ExportableState)):
                continue
            name, count = type(callback).__name__, 2
            while name in found:
                name, count = f"{type(callback).__name__}~{count}", count + 1
            found[name] = callback
        return found

    def _callbacks_state(self) -> dict[str, Any]:
        return {
            name: callback.state_dict()
            if _keeps_state(callback)
            else callback.state()["attributes"]
            for name, callback in self._named().items()
        }

    def _load_callbacks(self, stored: dict[str, Any]) -> None:
        for name, callback in self._named().items():
            if name not in stored:
                continue
            if _keeps_state(callback):
                callback.load_state_dict(stored[name])
                continue
            # What it was made with is the script's of today: a patience may have been raised.
            for key, value in stored[name].items():
                setattr(callback, key, value)


def _keeps_state(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(
        getattr(callback, "load_state_dict", None)
    )


def _plain(value: Any) -> Any:
    """A number of NumPy, as which a metric may come, as one of Python."""
    return value.item() if hasattr(value, "item") else value
