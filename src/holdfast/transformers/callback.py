"""The callback that a user gives to a Trainer."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback

from holdfast._errors import HoldfastError
from holdfast._run.run import Run
from holdfast._settings import Settings
from holdfast.rules import Rule
from holdfast.transformers.training import Training
from holdfast.transformers.yielding import refuse_other_trainers, yield_signals

_OURS = ("model", "optimizer", "scheduler", "scaler", "trainer")
_LOOKED_AT = 6  # frames up from an event to the trainer that it comes from


class Callback(TrainerCallback):
    """Makes `trainer.train()` a run that stops at a step and resumes in the middle of an epoch.

    >>> trainer = Trainer(model, args, callbacks=[Callback("runs/a")])  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    Model, optimizer, scheduler, scaler, the trainer's own counts and the position in the data are
    kept by themselves; `more_state` is what else decides what comes next. `run.log` is given what
    the trainer logs, but for times and speeds.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        settings: Settings | None = None,
        stop_when: Rule | None = None,
        **more_state: Any,
    ) -> None:
        taken = sorted(set(_OURS) & set(more_state))
        if taken:
            raise HoldfastError(
                f"holdfast.transformers.Callback({', '.join(taken)}=…): this is kept by itself.\n"
                "Leave it out, or give it another name."
            )
        self._folder = folder
        self._settings = settings
        self._rule = stop_when
        self._more_state = more_state
        self._training: Training | None = None

    @property
    def run(self) -> Run | None:
        """The run, while `trainer.train()` trains: for `run.stop()`, `run.log`, `run.save()`."""
        return None if self._training is None else self._training.run

    def make_run(self, state: dict[str, Any]) -> Run:
        """The run of a training, not open yet."""
        return Run(
            self._folder,
            settings=self._settings,
            stop_when=self._rule,
            **state,
            **self._more_state,
        )

    # -- what the trainer calls ----------------------------------------------------------

    def on_init_end(self, *_: Any, **__: Any) -> None:
        trainer = _find_trainer(sys._getframe(1), self)
        refuse_other_trainers(trainer)
        yield_signals(trainer)
        inner = trainer._inner_training_loop

        def train(batch_size: int | None = None, **named: Any) -> Any:
            if sum(isinstance(e, Callback) for e in trainer.callback_handler.callbacks) > 1:
                raise HoldfastError(
                    "two holdfast.transformers.Callback in one Trainer: each would count the "
                    "steps.\nGive it one."
                )
            if self not in trainer.callback_handler.callbacks:
                return inner(batch_size, **named)  # it was taken out again
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
        self._training.begin()

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if self._training is not None:
            self._training.log(logs or {})


def _find_trainer(frame: FrameType | None, callback: Callback) -> Any:
    """The trainer whose callback this is: events do not tell."""
    for _ in range(_LOOKED_AT):
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
