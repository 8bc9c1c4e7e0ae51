"""`model.fit` as a run: it stops between two batches, and resumes there.

    with holdfast.Run("runs/a", model=model) as run:
        model.fit(data, epochs=3, callbacks=[holdfast.keras.Callback(run)])

Keras asks its epoch iterator for the next batch after all callbacks have seen the end of the last
one. That is a boundary. So the fit asks us instead: we pass the boundary through `run.batches`, and
return Keras's own iterator, opened at the right batch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
import numpy as np
from keras.src.trainers.epoch_iterator import EpochIterator

from holdfast._adapters.adapter import has_state
from holdfast._errors import HoldfastError
from holdfast._run.driver import LoopDriver, is_number
from holdfast._text import count, say, unique_names
from holdfast.keras.adapter import is_whole, settle_waiting
from holdfast.keras.fit_data import BatchCounter, FitData

_MOST_FRAMES = 12  # frames up from the callback to model.fit


class Callback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Makes `model.fit` a run that stops at a batch and resumes in the middle of an epoch.

    >>> with holdfast.Run("runs/a", model=model) as run:  # doctest: +SKIP
    ...     model.fit(x, y, epochs=3, callbacks=[holdfast.keras.Callback(run)])

    `run.log` receives what fit logs: with each batch `loss` and the metrics, as the epoch's mean so
    far; with each epoch `val_loss`. A rule on `loss` counts batches.
    """

    async_safe = True  # it has nothing to do at the end of a batch

    def __init__(self, run: Any) -> None:
        super().__init__()
        if not all(hasattr(run, name) for name in ("epochs", "batches", "phase")):
            raise HoldfastError(
                f"holdfast.keras.Callback({type(run).__name__}): this is not a run.\n"
                "Give it what `with holdfast.Run(…) as run:` gives."
            )
        self._run = run
        self._fit: _Fit | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  Keras calls it so
        LoopDriver(self._run).require_open()
        self._fit = _Fit(self._run, self._model, sys._getframe(1))

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002  Keras calls it so
        self._fit = None  # the last callback ends it

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002  Keras calls it so
        if self._fit is None:
            raise _belongs_into_fit("evaluate")
        self._fit.begin_validation()

    def on_test_end(self, logs: Any = None) -> None:  # noqa: ARG002  Keras calls it so
        if self._fit is not None:
            self._fit.end_validation()

    def on_predict_begin(self, logs: Any = None) -> None:  # noqa: ARG002  Keras calls it so
        raise _belongs_into_fit("predict")


# By run: its attempt, and how many fits the script has begun in it.
_fits_begun: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def _number_of_fit(run: Any) -> int:
    """The number of the fit that begins now, from 0, in this attempt of the run."""
    attempt, number = _fits_begun.get(run, (run.attempt, 0))
    number = number if attempt == run.attempt else 0
    _fits_begun[run] = (run.attempt, number + 1)
    return number


class _Fit:
    _others: Others  # from begin() on
    _data: FitData  # the same, unless there is nothing left to fit

    def __init__(self, run: Any, model: Any, frame: FrameType) -> None:
        self._run = run
        self._driver = LoopDriver(run)
        self._model = model
        if not _is_among(model, list(run.state.values())):
            raise HoldfastError(
                f"model.fit with holdfast.keras.Callback: the model {model.name!r} is not part of "
                "the run's state.\nGive it to the run: holdfast.Run(…, model=model)."
            )
        self._frame, found = _find_fit(frame, model)
        self._source: EpochIterator = found["iterator"]
        self._list = found["callbacks"]
        callbacks: list[Any] = self._list.callbacks
        self._epochs, self._initial = found["epochs"], found["initial_epoch"]
        if sum(isinstance(each, Callback) for each in callbacks) > 1:
            raise HoldfastError(
                "model.fit with two holdfast.keras.Callback: each would count the batches.\n"
                "Give it one."
            )
        number = _number_of_fit(run)
        records = self._driver.stored_with_position().setdefault("fits", [])
        self._is_resumed = number < len(records)
        if not self._is_resumed:
            for past in records:
                past["others"] = without_arrays(past.get("others", {}))
            records.append({"base": run.epoch, "stopped": False})
        self._record: dict[str, Any] = records[number]
        asked, self._initial = self._initial, self._record.setdefault("initial", self._initial)
        if asked != self._initial:
            say(
                f"initial_epoch={asked}: this fit began with {self._initial}, and the run knows "
                "its epoch. It goes on there."
            )
        self._is_past = number < len(records) - 1
        prepare(callbacks, is_resumed=self._is_resumed)
        self._others_list = [each for each in callbacks if not isinstance(each, Callback)]
        self._verbose = self._list.params.get("verbose")
        self._loop: Iterator[int] | None = None
        self._lap: Any = None
        self._phase: Any = None
        self._logs: dict[str, Any] = {}  # of the last batch, in this attempt or the previous one
        # The last one of the list: it is called after all others.
        self._last = keras.callbacks.LambdaCallback(
            on_train_begin=lambda _: self.begin(),
            on_epoch_begin=lambda *_: self.begin_epoch(),
            on_epoch_end=lambda epoch, logs: self.end_epoch(epoch, logs or {}),
            on_train_end=lambda _: self.end(),
        )
        self._last.async_safe = True
        callbacks.append(self._last)

    # -- the fit, from its beginning to its end ----------------------------------------

    def begin(self) -> None:
        """All other callbacks have begun, and have reset themselves."""
        run, record = self._run, self._record
        self._others = Others(self._others_list)
        planned = max(0, self._epochs - self._initial)
        made = run.epoch - record["base"]
        is_over = self._is_past or record["stopped"] or made >= planned or run.over is not None
        if self._is_resumed and is_over:
            self._pass_over(made)
            return
        self._data = FitData(run, self._source, record.get("data"), self._store)
        if self._is_resumed:
            self._recall()
        if planned == 0:
            self._store()
            return
        self._driver.stored_with_position()  # before the first boundary
        self._loop = run.epochs(record["base"] + planned)
        self._source._enumerate_iterator = self._batches  # what its __iter__ asks
        epoch = next(self._loop, None)
        if epoch is None:
            self._release()
            self._model._initial_epoch = self._epochs
            return
        if self._verbose:
            self._driver.hide_progress()  # Keras shows its own
        self._model._initial_epoch = (epoch - record["base"] + self._initial) or None

    def _pass_over(self, made: int) -> None:
        self._others.load(self._record.get("others", {}))
        self._driver.pass_over()
        folder = self._driver.folder
        say(f"{folder}: this fit was finished after {count(made, 'epoch')}; nothing left to fit.")
        self._model._initial_epoch = self._epochs

    def _recall(self) -> None:
        """Restore everything except what run.epochs restores."""
        if not is_whole(self._model):
            self._model._symbolic_build(data_batch=self._data.example())
        settle_waiting(self._model)
        record = self._record
        self._others.load(record.get("others", {}))
        self._logs = dict(record.get("logs") or {})
        if self._source._num_batches is None:  # else another batch size makes another number
            self._source._num_batches = record.get("num_batches")

    def begin_epoch(self) -> None:
        self._model._initial_epoch = None  # the next fit has its own

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._loop is None:
            return
        self._end_lap()
        self._data.end_epoch()
        # The values of the last batch are logged already: a rule would count them twice.
        new = {name: value for name, value in logs.items() if name not in self._logs}
        self._driver.log_numbers(new)
        self._logs = {}
        if self._model.stop_training or epoch + 1 >= self._epochs:
            return  # what follows belongs to the last epoch too
        self._store()
        if next(self._loop, None) is None:  # a rule ends the training
            self._model.stop_training = True
            self._release()

    def _release(self) -> None:
        self._loop = None
        del self._source._enumerate_iterator

    def end(self) -> None:
        """All other callbacks have ended: the weights are what the fit leaves."""
        self._model._initial_epoch = None
        self._frame = None  # type: ignore[assignment]  # the frame refers to us, too
        self._list.callbacks.remove(self._last)  # the list may be the user's own
        if self._loop is None:
            return
        run, loop = self._run, self._loop
        self._release()
        self._record["stopped"] = bool(self._model.stop_training)
        self._store()
        self._driver.end_epochs()
        if next(loop, None) is not None:
            loop.close()  # type: ignore[attr-defined]  # a generator
            run.finish()

    # -- an epoch ----------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[int, int, Any]]:
        """The iterations of the fit, in place of EpochIterator's own."""
        run, data, model = self._run, self._data, self._model
        size = self._source.steps_per_execution
        self._lap = run.batches(BatchCounter(data), accumulate=size)
        is_stopped = model.stop_training or self._record.pop("stop_training", False)
        model.stop_training = is_stopped
        data.begin_epoch(run.epoch - self._record["base"])
        begin, has_more = None, self._take()
        if is_stopped:
            self._lap, has_more = self._lap.close(), False
        if self._logs:
            yield self._repeat_logs(size)
        while has_more:
            if begin is None:
                begin = run.batch
            if run.completes_step:
                self._source._steps_seen = data.used + size
                yield begin, begin + size - 1, data.iterator
                self._log_batch()
                data.use(run.batch + 1 - begin)
                begin = None
            has_more = self._take()
        if run.over is not None:
            model.stop_training = True  # a rule ends the training
        self._lap = None
        data.end_lap()

    def _repeat_logs(self, size: int) -> tuple[int, int, Any]:
        """A step that trains nothing, and returns the last logs of the previous attempt.

        If no batch is left in the epoch, fit needs them to end the epoch.
        """
        logs, model, callbacks = dict(self._logs), self._model, self._list
        trains = model.train_function

        def step(*given: Any) -> Any:
            model.train_function = trains
            return logs if len(given) == 1 else (logs, given[0])  # on JAX, with the state

        model.train_function = step
        for name in ("on_train_batch_begin", "on_train_batch_end"):  # they were called already
            setattr(callbacks, name, lambda *_, name=name: callbacks.__dict__.pop(name))
        return 0, size - 1, iter([None] * size)

    def _take(self) -> bool:
        """Pass the boundary after the last batch; False if there is no other batch.

        Not inside the generator: run.batches warns of a generator, which may take batches early.
        """
        with self._data.lock:
            return next(self._lap, self) is not self

    def _end_lap(self) -> None:
        """Fit has left the batches: the data ended early, or a stop was asked for."""
        lap = self._lap
        if lap is None:
            return
        if self._model.stop_training:
            self._log_batch()
            self._data.use(self._source.steps_per_execution)
            self._take()
        else:
            self._data.end_pass()  # EpochIterator has ended the epoch
        self._lap = None
        lap.close()

    def begin_validation(self) -> None:
        if self._loop is None:
            return
        self._end_lap()
        self._phase = self._run.phase("eval")
        self._phase.__enter__()

    def end_validation(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    # -- what is logged and stored ------------------------------------------------------

    def _log_batch(self) -> None:
        logs = self._frame.f_locals.get("logs")
        if isinstance(logs, dict) and logs:
            self._logs = logs
            self._driver.log_numbers(logs)

    def _store(self) -> None:
        """Write the position into the record, which is part of every snapshot."""
        self._record.update(
            data=self._data.position(),
            others=self._others.state(),
            logs={name: float(v) for name, v in self._logs.items() if is_number(v)},
            stop_training=bool(self._model.stop_training),
            num_batches=self._source._num_batches,
        )


def _is_among(model: Any, values: list[Any]) -> bool:
    for value in values:
        if value is model:
            return True
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list | tuple) and _is_among(model, list(inner)):
            return True
    return False


def _find_fit(start: FrameType, model: Any) -> tuple[FrameType, dict[str, Any]]:
    """The frame of model.fit, and the objects in it that we need."""
    frame: FrameType | None = start
    asked_for = model._initial_epoch  # as fit itself reads it
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        known: dict[str, Any] = frame.f_locals
        sources = [v for v in known.values() if isinstance(v, EpochIterator)]
        lists = [v for v in known.values() if isinstance(v, keras.callbacks.CallbackList)]
        if known.get("self") is model and sources and lists:
            return frame, {
                "iterator": sources[0],
                "callbacks": lists[0],
                "epochs": known["epochs"],
                "initial_epoch": asked_for or known.get("initial_epoch", 0),
            }
        frame = frame.f_back
    raise HoldfastError(
        f"holdfast.keras.Callback: this is not the fit of Keras 3 ({keras.__version__}) that it "
        "knows.\nWrite the loop with `for epoch in run.epochs(n): for batch in run.batches(data):`."
    )


def _belongs_into_fit(method: str) -> HoldfastError:
    return HoldfastError(
        f"holdfast.keras.Callback among the callbacks of model.{method}(): it is for model.fit.\n"
        f"Leave it out; to let a stop leave at once, write `with run.phase({method!r}):` around."
    )


# -- The state of the other callbacks of a fit -----------------------------------------------
# Only what training has changed since the fit began is stored, not what the script has set: a
# patience that the user has raised between two attempts stays raised.


_NOT_KEPT = frozenset({"params", "model", "_model"})
_SKIP = object()


class Others:
    def __init__(self, callbacks: list[Any]) -> None:
        self._named = unique_names(
            (type(callback).__name__, callback)
            for callback in callbacks
            if not isinstance(callback, keras.callbacks.ProgbarLogger)  # it has no such state
        )
        self._first = {name: _noted(_plain_state(c)) for name, c in self._named.items()}

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, callback in self._named.items():
            if has_state(callback):
                found[name] = {"state": callback.state_dict()}
                continue
            now, first = _plain_state(callback), self._first[name]
            changed = {k: v for k, v in now.items() if k not in first or not _same(v, first[k])}
            found[name] = {
                "changed": changed,
                "compares": getattr(callback, "monitor_op", None) is not None,
            }
        return found

    def load(self, state: dict[str, Any]) -> None:
        for name, stored in state.items():
            callback = self._named.get(name)
            if callback is None:
                continue
            if has_state(callback):
                if "state" in stored:
                    callback.load_state_dict(stored["state"])
                continue
            if stored.get("compares") and getattr(callback, "monitor_op", 0) is None:
                # It decides once which way is better, and turns the sign of its margin then.
                callback._set_monitor_op()
            for key, item in stored.get("changed", {}).items():
                setattr(callback, key, item)


def prepare(callbacks: list[Any], *, is_resumed: bool) -> None:
    """Refuse a callback that resumes the fit too; make CSVLogger append to its file."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise HoldfastError(
                "BackupAndRestore and holdfast.keras.Callback in one fit: both would "
                "restore the model.\nTake BackupAndRestore out; holdfast keeps all that it keeps."
            )
        if is_resumed and isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def without_arrays(others: dict[str, Any]) -> dict[str, Any]:
    """The states after the end of a fit: without the weights that a callback has set aside."""
    light = {}
    for name, stored in others.items():
        changed = {k: v for k, v in stored.get("changed", {}).items() if not _has_arrays(v)}
        light[name] = {"changed": changed, "compares": stored.get("compares", False)}
    return light


def _plain_state(callback: Any) -> dict[str, Any]:
    found = {}
    for key, value in vars(callback).items():
        if key not in _NOT_KEPT and (plain := _plain(value)) is not _SKIP:
            found[key] = plain
    return found


def _plain(value: Any, depth: int = 0) -> Any:
    """The value, if it is made of numbers, strings and arrays alone."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    if isinstance(value, np.ndarray):
        return _SKIP if value.dtype.hasobject else value
    if depth > 8:
        return _SKIP
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_plain(item, depth + 1) for item in value]
        return _SKIP if any(item is _SKIP for item in items) else type(value)(items)
    if type(value) is dict:
        inner = {key: _plain(item, depth + 1) for key, item in value.items()}
        is_plain = all(isinstance(key, str | int) for key in inner)
        return inner if is_plain and not any(v is _SKIP for v in inner.values()) else _SKIP
    return _SKIP


def _noted(value: Any) -> Any:
    """A copy that `_same` can compare with later."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple):
        return type(value)(map(_noted, value))
    if isinstance(value, dict):
        return {key: _noted(item) for key, item in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _has_arrays(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | tuple | dict) and any(map(_has_arrays, items))
