"""One call of `trainer.train()` as a run.

The Trainer's loop is its own; methods of this one trainer are ours while it trains:

    _inner_training_loop         all of it
    _prepare_for_training        model, optimizer and scheduler are there: the run opens
    _init_training_state         says in which epoch to begin, when that is known
    _run_epoch                   an epoch, told how many of its batches are behind
    _evaluate                    a phase
    callback_handler.on_epoch_end  the epoch's batches are over
    _finalize_training           the end

The Trainer asks for the batches of a step when all callbacks have seen the last one, and its log,
evaluation and save are made. That is the boundary.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import transformers.trainer as trainer_module

from holdfast._run.driver import LoopDriver
from holdfast._run.run import Run
from holdfast._text import say
from holdfast.transformers.feeding import TrainData, TrainLoader, passing_ours
from holdfast.transformers.history import lasting
from holdfast.transformers.record import TrainerRecord
from holdfast.transformers.yielding import (
    TrainerPatches,
    refuse_other_counts,
    refuse_search,
    yield_resume,
)

_END = object()
_NONE = object()
_NOT_LOGGED = ("epoch", "total_flos", "num_input_tokens_seen")


class _Later:
    """The epoch to begin with: asked for when the run is open, and told before it is."""

    def __init__(self, find: Callable[[], int]) -> None:
        self._find = find

    def __index__(self) -> int:
        return self._find()

    def __str__(self) -> str:
        return "the one that it was in"


class Training:
    """What a callback does in one call of `trainer.train()`."""

    _driver: LoopDriver  # of the run, once it is open

    def __init__(self, callback: Any, trainer: Any) -> None:
        self.run: Run | None = None
        self._callback = callback
        self._trainer = trainer
        self._patches = TrainerPatches()
        self._record = TrainerRecord(trainer)
        self._closing = contextlib.ExitStack()
        self._resume_path: Any = None
        self._begun = (0, 0)  # where the Trainer's own checkpoint was
        self._loader: Any = None
        self._rest: Any = None  # the loader of an epoch that the Trainer's own checkpoint was in
        self._epochs: Iterator[int] | None = None
        self._lap: Any = None
        self._ahead: Any = _NONE  # a batch that was taken to arrive
        self._counted = 0  # the steps that the run knows of
        self._is_passed_over = False
        self._is_whole = False  # all batches of the epoch are used

    # -- the training, from its beginning to its end ---------------------------------------

    def train(self, inner: Callable[..., Any], batch_size: int | None, **named: Any) -> Any:
        refuse_search(named.get("trial"))
        self._resume_path = named.get("resume_from_checkpoint")
        with self._closing as stack:
            stack.callback(self._patches.undo)
            self._take_over()
            return inner(batch_size, **named)

    def _take_over(self) -> None:
        put, trainer = self._patches.put, self._trainer
        self._init_state = put(trainer, "_init_training_state", self._begin_in)
        self._prepare = put(trainer, "_prepare_for_training", self._open)
        self._run_whole_epoch = put(trainer, "_run_epoch", self._run_epoch)
        self._log_save_evaluate = put(trainer, "_maybe_log_save_evaluate", self._log_and_evaluate)
        self._evaluate_all = put(trainer, "_evaluate", self._evaluate)
        self._finalize = put(trainer, "_finalize_training", self._end)
        self._load_rng = put(trainer, "_load_rng_state", _do_nothing)
        handler = trainer.callback_handler
        self._tell_epoch_end = put(handler, "on_epoch_end", self._end_lap)
        skip = vars(trainer_module)["skip_first_batches"]  # as the Trainer finds it
        self._skip = put(trainer_module, "skip_first_batches", passing_ours(skip))

    def _begin_in(self, *arguments: Any, **named: Any) -> tuple[Any, int]:
        self._begun = self._init_state(*arguments, **named)
        return _Later(self._first_epoch), self._begun[1]

    def _open(self, *arguments: Any, **named: Any) -> Any:
        """Model, optimizer and scheduler are made: they are the state of the run."""
        trainer, record = self._trainer, self._record
        model, self._loader = self._prepare(*arguments, **named)
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
        yield_resume(self._resume_path, is_resumed=run.resumed_from is not None)
        self._is_passed_over = self._is_over(run)
        record.tell_state()
        return model, self._loader

    def begin(self) -> None:
        """The trainer has set its counts to zero, and callbacks begin."""
        run, record = self._opened, self._record
        refuse_other_counts(self._trainer)
        record.tell_counts()
        self._counted = record.global_step
        if not self._trainer.args.disable_tqdm:
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
        record, state = self._record, self._trainer.state
        if not record.is_over:
            return False
        epochs = record.first_epoch + run.epoch
        is_whole = record.global_step >= state.max_steps or epochs >= state.num_train_epochs
        return record.is_early or is_whole

    def _first_epoch(self) -> int:
        if self._is_passed_over:
            return int(self._trainer.state.num_train_epochs)
        return self._record.first_epoch + self._opened.epoch

    def _end(self, *arguments: Any, **named: Any) -> Any:
        """All is trained; what is done now (the best model is loaded) belongs to what is kept."""
        run, record, trainer = self._opened, self._record, self._trainer
        logged, loss = list(trainer.state.log_history), trainer._total_loss_scalar
        result = self._finalize(*arguments, **named)
        trainer._total_loss_scalar = loss  # to which it adds what was not logged, each time
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

    def _run_epoch(self, **named: Any) -> None:
        """In place of the trainer's own, which is told how many of its batches are behind."""
        trainer, run, record = self._trainer, self._opened, self._record
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
            done = updates * trainer.args.gradient_accumulation_steps
        else:
            done = self._batches_behind(named["steps_in_epoch"])
        named["train_dataloader"] = TrainLoader(self._take, _END)
        named["resume_from_checkpoint"] = "the run" if done else None
        named["epochs_trained"] = epoch
        named["steps_trained_in_current_epoch"] = done
        ignores, trainer.args.ignore_data_skip = trainer.args.ignore_data_skip, False
        try:
            self._run_whole_epoch(**named)
        finally:
            trainer.args.ignore_data_skip = ignores
        if trainer.control.should_training_stop or epoch + 1 >= trainer.state.num_train_epochs:
            return  # what follows belongs to the last epoch too
        if next(self._epochs, None) is None:  # a rule has found that this is enough
            self._stop()

    def _count_epochs(self) -> int:
        state, first = self._trainer.state, self._record.first_epoch
        if state.num_train_epochs == sys.maxsize:  # of data without a length
            return int(state.max_steps)
        return int(max(0, state.num_train_epochs - first))

    def _begin_lap(self, epoch: int) -> None:
        """Begin the epoch's batches, or go on in their middle."""
        run, record = self._opened, self._record
        loader, is_first = self._loader, epoch == record.first_epoch
        if is_first and record.behind:
            if self._rest is None:
                self._rest = self._skip(loader, record.behind)
            loader = self._rest
        # A run that begins with the Trainer's own checkpoint has its generators too, from where
        # the Trainer would: the loader draws when it begins.
        begins = is_first and run.resumed_from is None
        if begins and not record.behind:
            self._load_rng(self._resume_path)
        self._is_whole = False
        known = _length(loader)
        # Of data without a length only the trainer knows when it steps, and says so.
        accumulate = 1 if known is None else self._trainer.args.gradient_accumulation_steps
        self._lap = run.batches(TrainData(loader, record.first_epoch), accumulate=accumulate)
        self._ahead = next(self._lap, _END)
        if begins and record.behind:
            self._load_rng(self._resume_path)

    def _batches_behind(self, in_epoch: int) -> int:
        """The batches of this epoch that are used, as the trainer counts them."""
        run = self._opened
        length = self._driver.feed_length
        return run.batch if length is None else max(0, in_epoch - (length - run.batch))

    def _take(self) -> Any:
        """The next batch; before it, the boundary behind the last step is passed."""
        batch, self._ahead = self._ahead, _NONE
        if batch is _NONE:
            batch = self._pass_boundary()
        if self._opened.over is not None:
            self._stop()
        return batch

    def _pass_boundary(self) -> Any:
        made = self._trainer.state.global_step
        if self._lap is None:
            return _END
        self._driver.set_completes_step(made != self._counted)
        self._counted = made
        return next(self._lap, _END)

    def _end_lap(self, *arguments: Any, **named: Any) -> Any:
        """The epoch has no more batches, or was told to stop: before callbacks hear of it."""
        if self._lap is not None:
            # Of an epoch that ends early, one batch more than it needs.
            self._is_whole = self._pass_boundary() is _END
            self._close_lap()
            if self._opened.over is not None:
                self._stop()
        return self._tell_epoch_end(*arguments, **named)

    def _close_lap(self) -> None:
        lap, self._lap = self._lap, None
        self._ahead = _END
        if lap is not None:
            lap.close()

    def _stop(self) -> None:
        self._trainer.control.should_training_stop = True

    # -- what is done between the steps ------------------------------------------------------

    def _log_and_evaluate(self, loss: Any, norm: Any, *arguments: Any, **named: Any) -> None:
        """Where no step was made in this life, the epoch ends with what the last one had seen."""
        record = self._record
        if norm is None and named.get("learning_rate") is None:
            norm, named["learning_rate"] = record.seen
        else:
            record.seen = [norm, named.get("learning_rate")]
        self._log_save_evaluate(loss, norm, *arguments, **named)

    def _evaluate(self, *arguments: Any, **named: Any) -> Any:
        run = self._opened
        if self._epochs is None:
            # Before the first step: it was made when the run began.
            return {} if run.resumed_from is not None else self._evaluate_all(*arguments, **named)
        with run.phase("eval"):
            return self._evaluate_all(*arguments, **named)

    def log(self, logs: dict[str, Any]) -> None:
        if self.run is None or self._is_passed_over:
            return
        numbers = {
            name: value
            for name, value in lasting(logs).items()
            if name not in _NOT_LOGGED and isinstance(value, int | float)
        }
        if numbers:
            self.run.log(**numbers)

    @property
    def _opened(self) -> Run:
        assert self.run is not None  # the trainer's methods are ours only while it is open
        return self.run


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
