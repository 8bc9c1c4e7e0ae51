"""One call of `trainer.train()` as a run.

The Trainer runs its own loop. These methods of this one trainer are replaced while it trains:

    _prepare_for_training        model, optimizer and scheduler exist: the run opens
    _init_training_state         returns the first epoch, which is known once the run is open
    _run_epoch                   an epoch, with the number of its batches that are used
    _evaluate                    a phase
    callback_handler.on_epoch_end  the epoch has no more batches
    _finalize_training           the end

The Trainer asks for the batches of a step after all callbacks have seen the previous step, and
after its log, evaluation and save. That is the boundary.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers.trainer as trainer_module
from transformers.trainer_callback import ExportableState

from holdfast._adapters.adapter import has_state
from holdfast._run.data.course import Lap
from holdfast._run.data.feed import Feed, FeedAround, Seeds
from holdfast._run.data.session_feeds import Feeds
from holdfast._run.driver import LoopDriver, do_nothing, replace_method
from holdfast._run.run import Run
from holdfast._text import say, unique_names

_END = object()
_NONE = object()
_NOT_LOGGED = ("epoch", "total_flos", "num_input_tokens_seen")


@dataclass(eq=False)
class TrainData:
    """What `run.batches` is given: the loader of one epoch."""

    _loader: Any
    _first_epoch: int

    def holdfast_feed(self, feeds: Feeds) -> Feed:
        return TrainFeed(feeds.of((self._loader,)), self._first_epoch)


class TrainFeed(FeedAround):
    """Another feed, whose epochs begin at the epoch of the Trainer's own checkpoint."""

    def __init__(self, inner: Feed, first_epoch: int) -> None:
        super().__init__(inner)
        self._first_epoch = first_epoch

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        shifted = replace(lap, epoch=lap.epoch + self._first_epoch)
        batches = self._inner.open(shifted, seeds)
        lap.tally, self.length = shifted.tally, self._inner.length
        return batches


@dataclass(eq=False)
class TrainLoader:
    """The loader that the Trainer gets: an iterator over the batches of `run.batches`."""

    _take: Callable[[], Any]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._take()
        if batch is _END:
            raise StopIteration
        return batch


@dataclass(eq=False)
class _FirstEpoch:
    """The epoch to begin with: the Trainer prints it before the run opens, and uses it after."""

    _find: Callable[[], int]

    def __index__(self) -> int:
        return self._find()

    def __str__(self) -> str:
        return "the one that it was in"


class Training:
    _driver: LoopDriver  # of the run, once it is open

    def __init__(self, callback: Any, trainer: Any) -> None:
        self.run: Run | None = None
        self.trainer = trainer
        self._callback = callback
        self._record = TrainerRecord(trainer)
        self._closing = contextlib.ExitStack()
        self._resume_path: Any = None
        self._begun = (0, 0)  # the position of the Trainer's own checkpoint
        self._loader: Any = None
        self._rest: Any = None  # the loader of an epoch that the Trainer's own checkpoint was in
        self._epochs: Iterator[int] | None = None
        self._lap: Any = None
        self._ahead: Any = _NONE  # the batch that was taken to reach the stored position
        self._counted = 0  # the steps that the run knows of
        self._is_passed_over = False
        self._is_whole = False  # all batches of the epoch are used

    # -- the training, from its beginning to its end ---------------------------------------

    def train(self, inner: Callable[..., Any], batch_size: int | None, **named: Any) -> Any:
        self._resume_path = named.get("resume_from_checkpoint")
        with self._closing as stack:
            for name, ours in (
                ("_init_training_state", self._init_state),
                ("_prepare_for_training", self._open),
                ("_run_epoch", self._run_epoch),
                ("_maybe_log_save_evaluate", self._log_and_evaluate),
                ("_evaluate", self._evaluate),
                ("_finalize_training", self._end),
            ):
                replace_method(stack, self.trainer, name, ours)
            self._load_rng = replace_method(stack, self.trainer, "_load_rng_state", do_nothing)
            replace_method(stack, self.trainer.callback_handler, "on_epoch_end", self._end_lap)
            # The name by which the Trainer finds it.
            self._skip = replace_method(stack, trainer_module, "skip_first_batches", _skip_others)
            return inner(batch_size, **named)

    def _init_state(self, init: Any, *arguments: Any, **named: Any) -> tuple[Any, int]:
        self._begun = init(*arguments, **named)
        return _FirstEpoch(self._first_epoch), self._begun[1]

    def _open(self, prepare: Any, *arguments: Any, **named: Any) -> Any:
        """Model, optimizer and scheduler exist: they are the state of the run."""
        trainer, record = self.trainer, self._record
        model, self._loader = prepare(*arguments, **named)
        record.first_epoch, record.behind = self._begun
        state = {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "trainer": record,
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        self.run = run = self._callback.make_run(state)
        self._closing.enter_context(run)
        self._driver = LoopDriver(run)
        if self._resume_path and run.resumed_from is not None:
            say(
                f"the Trainer has loaded {self._resume_path} (resume_from_checkpoint); the run "
                "goes on with what its own folder has, and that counts.\nLeave "
                "resume_from_checkpoint out, or use a new folder to begin from there."
            )
        elif self._resume_path:
            say(f"the run begins with what the Trainer has loaded from {self._resume_path}.")
        self._is_passed_over = self._is_over(run)
        record.restore_state()
        return model, self._loader

    def begin(self) -> None:
        """The trainer has set its counts to zero, and callbacks begin."""
        run, record = self._opened, self._record
        record.restore_counts()
        self._counted = record.global_step
        if not self.trainer.args.disable_tqdm:
            self._driver.hide_progress()  # the Trainer shows its own
        if not self._is_passed_over:
            return
        self._driver.pass_over()
        record.arrive(trains=False)
        if run.over is None:
            say(
                f"{self._driver.folder}: this training was finished at step {run.step}; nothing "
                "left to train."
            )

    def _is_over(self, run: Run) -> bool:
        if run.resumed_from is None:
            return False
        if run.over is not None:
            return self._driver.was_ended_before()
        record, state = self._record, self.trainer.state
        if not record.is_over:
            return False
        epochs = record.first_epoch + run.epoch
        is_whole = record.global_step >= state.max_steps or epochs >= state.num_train_epochs
        return record.is_early or is_whole

    def _first_epoch(self) -> int:
        if self._is_passed_over:
            return int(self.trainer.state.num_train_epochs)
        return self._record.first_epoch + self._opened.epoch

    def _end(self, finalize: Any, *arguments: Any, **named: Any) -> Any:
        """All is trained. The Trainer may load its best model now: that is part of the state."""
        run, record, trainer = self._opened, self._record, self.trainer
        logged, loss = list(trainer.state.log_history), trainer._total_loss_scalar
        result = finalize(*arguments, **named)
        trainer._total_loss_scalar = loss  # each call adds the loss that was not logged yet
        epochs, self._epochs = self._epochs, None
        if self._is_passed_over:
            trainer.state.log_history = logged
            return result
        if epochs is None:
            return result  # there was nothing to train
        record.is_over = True
        record.is_early = run.over is None and trainer.state.global_step < trainer.state.max_steps
        self._driver.end_epochs()
        if self._is_whole and next(epochs, None) is None:
            return result
        epochs.close()  # type: ignore[attr-defined]  # a generator
        if run.over is None or not self._driver.is_finished:
            run.finish()
        return result

    # -- an epoch --------------------------------------------------------------------------

    def _run_epoch(self, run_epoch: Any, **named: Any) -> None:
        """Run the trainer's own, with the number of the epoch's batches that are used."""
        trainer, run, record = self.trainer, self._opened, self._record
        epoch, updates = named["epoch"], named["num_update_steps_per_epoch"]
        if self._epochs is None:
            self._epochs = run.epochs(self._count_epochs())
            if next(self._epochs, None) is None:
                self._stop()
                return
        is_stopped = record.stops
        self._begin_lap(epoch)
        record.arrive()
        if is_stopped or self._ahead is _END:
            self._close_lap()
            used = updates * trainer.args.gradient_accumulation_steps
        else:
            length = self._driver.feed_length
            left = None if length is None else length - run.batch
            # As the trainer counts them.
            used = run.batch if left is None else max(0, named["steps_in_epoch"] - left)
        named["train_dataloader"] = TrainLoader(self._take)
        named["resume_from_checkpoint"] = "the run" if used else None
        named["epochs_trained"] = epoch
        named["steps_trained_in_current_epoch"] = used
        ignores, trainer.args.ignore_data_skip = trainer.args.ignore_data_skip, False
        try:
            run_epoch(**named)
        finally:
            trainer.args.ignore_data_skip = ignores
        if trainer.control.should_training_stop or epoch + 1 >= trainer.state.num_train_epochs:
            return  # what follows belongs to the last epoch too
        if next(self._epochs, None) is None:  # a rule ends the training
            self._stop()

    def _count_epochs(self) -> int:
        state, first = self.trainer.state, self._record.first_epoch
        if state.num_train_epochs == sys.maxsize:  # of data without a length
            return int(state.max_steps)
        return int(max(0, state.num_train_epochs - first))

    def _begin_lap(self, epoch: int) -> None:
        """Begin the epoch's batches, or continue in the middle of them."""
        run, record = self._opened, self._record
        loader, is_first = self._loader, epoch == record.first_epoch
        if is_first and record.behind:
            if self._rest is None:
                self._rest = self._skip(loader, record.behind)
            loader = self._rest
        # A run that begins with the Trainer's own checkpoint takes its generators too, at the
        # same place as the Trainer would: the loader draws when it begins.
        begins = is_first and run.resumed_from is None
        if begins and not record.behind:
            self._load_rng(self._resume_path)
        self._is_whole = False
        # If the data have no length, only the trainer knows which batch completes a step.
        has_length = True
        try:
            len(loader)
        except TypeError:
            has_length = False
        accumulate = self.trainer.args.gradient_accumulation_steps if has_length else 1
        self._lap = run.batches(TrainData(loader, record.first_epoch), accumulate=accumulate)
        self._ahead = next(self._lap, _END)
        if begins and record.behind:
            self._load_rng(self._resume_path)

    def _take(self) -> Any:
        """Pass the boundary of the last step, and return the next batch."""
        batch, self._ahead = self._ahead, _NONE
        if batch is _NONE:
            batch = self._pass_boundary()
        if self._opened.over is not None:
            self._stop()
        return batch

    def _pass_boundary(self) -> Any:
        made = self.trainer.state.global_step
        if self._lap is None:
            return _END
        self._driver.set_completes_step(made != self._counted)
        self._counted = made
        return next(self._lap, _END)

    def _end_lap(self, on_epoch_end: Any, *arguments: Any, **named: Any) -> Any:
        """The epoch has no more batches, or a stop was asked for: before callbacks are called."""
        if self._lap is not None:
            # This takes one batch more than an epoch that ends early has used.
            self._is_whole = self._pass_boundary() is _END
            self._close_lap()
            if self._opened.over is not None:
                self._stop()
        return on_epoch_end(*arguments, **named)

    def _close_lap(self) -> None:
        lap, self._lap = self._lap, None
        self._ahead = _END
        if lap is not None:
            lap.close()

    def _stop(self) -> None:
        self.trainer.control.should_training_stop = True

    # -- between the steps -------------------------------------------------------------------

    def _log_and_evaluate(self, own: Any, loss: Any, norm: Any, *more: Any, **named: Any) -> None:
        """If this attempt has made no step yet, use the values of the last step."""
        record = self._record
        if norm is None and named.get("learning_rate") is None:
            norm, named["learning_rate"] = record.seen
        else:
            record.seen = [norm, named.get("learning_rate")]
        own(loss, norm, *more, **named)

    def _evaluate(self, evaluate: Any, *arguments: Any, **named: Any) -> Any:
        run = self._opened
        if self._epochs is None:
            # Before the first step: the first attempt has evaluated there.
            return {} if run.resumed_from is not None else evaluate(*arguments, **named)
        with run.phase("eval"):
            return evaluate(*arguments, **named)

    def log(self, logs: dict[str, Any]) -> None:
        if self.run is not None and not self._is_passed_over:
            logs = without_times(logs)
            self._driver.log_numbers({n: v for n, v in logs.items() if n not in _NOT_LOGGED})

    @property
    def _opened(self) -> Run:
        assert self.run is not None  # the trainer's methods are replaced only while it is open
        return self.run


def _skip_others(skip: Any, dataloader: Any, num_batches: int = 0) -> Any:
    """Accelerate's `skip_first_batches`; ours is at the right batch already."""
    return dataloader if isinstance(dataloader, TrainLoader) else skip(dataloader, num_batches)


# -- A Trainer's counts, log and callbacks, as a part of the run's state --------------------


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
