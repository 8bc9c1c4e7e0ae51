"""A Trainer's counts, log and callbacks, as a part of the run's state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import ExportableState

from holdfast._adapters.adapter import has_state
from holdfast._text import unique_names

# The fields of TrainerState that training changes; the script sets the others.
_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# Of the Trainer itself. It resets all of them between its preparation and its first event.
_COUNTS = (
    "current_flos",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_num_input_tokens_seen",
    "_initial_global_step",
)
_LEAST_BYTES = 1 << 14
_TIMES = ("_runtime", "_per_second")


class TrainerRecord:
    """The trainer's counts, its log, and the states of other callbacks.

    Until the training has reached the stored position, `state_dict` returns the stored state: the
    trainer and its callbacks start from zero, and receive that state only there.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stored: dict[str, Any] | None = None
        self._history = LogHistory()
        self.first_epoch = 0  # where a checkpoint of the Trainer's own has begun the run
        self.behind = 0  # batches of that epoch that were used before
        self.is_over = False
        self.is_early = False  # something other than the number of steps has ended it
        self.seen: list[Any] = [None, None]  # gradient norm and learning rate of the last step

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
            "callbacks": {
                name: callback.state_dict()
                if has_state(callback)
                else callback.state()["attributes"]
                for name, callback in self._stateful_callbacks().items()
            },
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

    # -- until the training has reached the stored position ---------------------------------

    @property
    def global_step(self) -> int:
        if self._stored is None:
            return int(self._trainer.state.global_step)
        return int(self._stored["state"]["global_step"])

    @property
    def stops(self) -> bool:
        """True if a stop of the epoch or the training was asked for, and it had not ended yet."""
        return self._stored is not None and any(self._stored["stops"]) and not self.is_over

    def restore_state(self) -> None:
        """Restore the trainer's state: callbacks read it when they begin."""
        if self._stored is None:
            return
        state = self._trainer.state
        for name, value in self._stored["state"].items():
            setattr(state, name, value)
        state.log_history = self._history.entries()

    def restore_counts(self) -> None:
        if self._stored is None:
            return
        trainer = self._trainer
        for name, value in self._stored["counts"].items():
            setattr(trainer, name, value)
        with torch.no_grad():
            trainer._tr_loss = torch.as_tensor(self._stored["loss"]).clone().to(trainer.args.device)

    def arrive(self, *, trains: bool = True) -> None:
        """The stored position is reached: restore everything, and count from now on."""
        if self._stored is None:
            return
        self.restore_state()
        self.restore_counts()
        control = self._trainer.control
        if not self.is_over:  # else the script asks for more steps than before
            control.should_training_stop, control.should_epoch_stop = self._stored["stops"]
        stored = self._stored["callbacks"]
        for name, callback in self._stateful_callbacks().items():
            if name in stored and has_state(callback):
                callback.load_state_dict(stored[name])
            elif name in stored:
                # Its arguments stay those of this script: a patience may have been raised.
                for key, value in stored[name].items():
                    setattr(callback, key, value)
        self._stored = None
        if trains:
            self.is_over = self.is_early = False

    def _stateful_callbacks(self) -> dict[str, Any]:
        """The callbacks that have a state, in the Trainer's sense or by state_dict."""
        return unique_names(
            (type(callback).__name__, callback)
            for callback in self._trainer.callback_handler.callbacks
            if has_state(callback) or isinstance(callback, ExportableState)
        )


class LogHistory:
    """The entries of a Trainer's `state.log_history`, as bytes in an array.

    The list grows with every log, and a snapshot needs new memory whenever the layout of the state
    changes. So the entries are text in an array that doubles when it is full. Times and speeds are
    left out: they differ in each attempt.
    """

    def __init__(self) -> None:
        self._text = np.zeros(_LEAST_BYTES, np.uint8)
        self._used = 0
        self._entries = 0

    def follow(self, entries: list[dict[str, Any]]) -> None:
        """Add the new entries; a list that is shorter than before is written from its start."""
        if len(entries) < self._entries:
            self._used = self._entries = 0
            self._text[:] = 0
        for entry in entries[self._entries :]:
            self._add(json.dumps(without_times(entry), default=_as_json).encode() + b"\n")
        self._entries = len(entries)

    def entries(self) -> list[dict[str, Any]]:
        lines = bytes(self._text[: self._used]).decode().splitlines()
        return [json.loads(line) for line in lines]

    def state(self) -> dict[str, Any]:
        return {"text": self._text, "used": self._used, "entries": self._entries}

    def load(self, state: Mapping[str, Any]) -> None:
        self._text = np.array(state["text"], np.uint8)
        self._used, self._entries = state["used"], state["entries"]

    def _add(self, line: bytes) -> None:
        end = self._used + len(line)
        while len(self._text) < end:
            self._text = np.concatenate([self._text, np.zeros_like(self._text)])
        self._text[self._used : end] = np.frombuffer(line, np.uint8)
        self._used = end


def without_times(logs: Mapping[str, Any]) -> dict[str, Any]:
    """What was logged, without times, speeds and memory."""
    return {
        name: value
        for name, value in logs.items()
        if not name.endswith(_TIMES) and "_mem_" not in name
    }


def _as_json(value: Any) -> Any:
    """A value of NumPy or torch as numbers; any other as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _plain(value: Any) -> Any:
    """A number of NumPy, as which a metric may come, as one of Python."""
    return value.item() if hasattr(value, "item") else value
