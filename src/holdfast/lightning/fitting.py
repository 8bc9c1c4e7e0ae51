"""One call of `trainer.fit` as a run.

Lightning's loops are its own; methods of this one trainer's loops are ours while it fits:

    fit_loop.on_advance_start    the epoch begins: the turn before it is passed
    epoch_loop.advance           a batch is trained: the boundary behind it is passed
    val_loop.run                 a phase
    fit_loop.on_advance_end      the epoch ends
    trainer._run_stage           all of it, inside `with Run(…)`

A boundary stands between a batch and the validation that may follow it. A fit that goes on in
the middle of an epoch begins that epoch anew, with its hooks; its first `advance` trains nothing
but puts everything to what was stored, and the validation that follows is made as ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from holdfast._errors import HoldfastError, Stopped
from holdfast._run.driver import LoopDriver
from holdfast._run.run import Run
from holdfast._text import say
from holdfast.lightning.feeding import Fetcher, LightningData, Promise, Stand
from holdfast.lightning.package import part_of
from holdfast.lightning.state import FitState, Schedulers
from holdfast.lightning.yielding import (
    LightningPatches,
    release_children,
    yield_resume,
    yield_signals,
)

_ENDLESS = 1 << 30  # epochs, where only a step, a time or a rule ends the fit


class Fit:
    """What a callback does in one call of `trainer.fit`."""

    _driver: LoopDriver  # of the run, once it is open

    def __init__(self, callback: Any, trainer: Any) -> None:
        self.run: Run | None = None
        self._callback = callback
        self._trainer = trainer
        self._loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._patches = LightningPatches()
        self._state = FitState(trainer)
        self._schedulers = Schedulers(trainer)
        self._epochs: Iterator[int] | None = None
        self._lap: Any = None
        self._fetcher: Fetcher | None = None
        self._loaders: list[Any] = []  # those that Lightning has just asked for
        self._seen: dict[str, Any] = {}  # of what the module logs, the values that were given on
        self._steps = 0  # of all optimizers, in this batch
        self._stored: dict[str, Any] = {}  # what the loops had counted where the run was left
        self._hooks: list[Any] = []
        yield_signals(trainer, self._patches)
        self._run_stage = self._patches.put(trainer, "_run_stage", self._run_as_a_run)

    def let_go(self) -> None:
        """Let the trainer be Lightning's own again."""
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- the fit -----------------------------------------------------------------------

    def _run_as_a_run(self) -> Any:
        trainer = self._trainer
        state: dict[str, Any] = {"module": trainer.lightning_module}
        optimizers = list(trainer.optimizers)
        state["optimizers" if len(optimizers) > 1 else "optimizer"] = (
            optimizers if len(optimizers) != 1 else optimizers[0]
        )
        state["schedulers"] = self._schedulers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        state["fit"] = self._state
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._count_step))
        self._take_over()
        try:
            with self._callback.make_run(state) as self.run:
                return self._fit(self.run)
        except Stopped:
            release_children(trainer)
            raise
        finally:
            self.run = None
            self.let_go()  # also where another callback's on_exception raises before ours is told

    def _fit(self, run: Run) -> Any:
        trainer, is_resumed = self._trainer, run.resumed_from is not None
        self._driver = LoopDriver(run)
        self._state.settle()
        yield_resume(trainer, is_resumed=is_resumed)
        if not is_resumed:
            self._state.first_epoch = self._loop.epoch_progress.current.processed
            self._state.behind = self._batches_behind()
        elif self._driver.is_on_the_way:
            self._stored = self._state.counts()
            self._state.set_counts(self._state.top)
            self._state.is_on_the_way = True
        self._seen = dict(trainer._logger_connector._callback_metrics)
        checks = trainer.num_sanity_val_steps
        if is_resumed:
            trainer.num_sanity_val_steps = 0  # it was made when the run began
        try:
            return self._run_stage()
        finally:
            trainer.num_sanity_val_steps = checks

    def _batches_behind(self) -> int:
        """The batches of this epoch that were used before Lightning's checkpoint was written."""
        ready: int = self._epoch_loop.batch_progress.current.completed
        if not self._loop.restarting or not ready:
            return 0
        if ready % self._trainer.accumulate_grad_batches:
            raise HoldfastError(
                f"Lightning's checkpoint was written behind {ready} batches, amid those of one "
                "step (accumulate_grad_batches): their gradients are not in it.\n"
                "Begin with one that was written behind a step."
            )
        return ready

    def _take_over(self) -> None:
        put, loop, epoch_loop = self._patches.put, self._loop, self._epoch_loop
        self._run_loop = put(loop, "run", self._run_all)
        self._setup_data = put(loop, "setup_data", self._set_up_data)
        put(loop, "_load_combined_loader_states", self._stand_in)
        self._start_epoch = put(loop, "on_advance_start", self._begin_epoch)
        self._finish_epoch = put(loop, "on_advance_end", self._end_epoch)
        self._advance = put(epoch_loop, "advance", self._train_batch)
        self._validate = put(epoch_loop.val_loop, "run", self._run_validation)

    def _run_all(self) -> None:
        """In place of the fit loop's run."""
        run = self.run
        if run is None or self._callback not in self._trainer.callbacks:
            self._run_loop()  # a fit inside this one, which looks for a learning rate
            return
        driver = self._driver
        if self._is_over(run):
            driver.pass_over()
            if run.over is None:
                epochs = self._loop.epoch_progress.current.processed
                say(
                    f"{driver.folder}: this fit was finished after {epochs} epochs, at step "
                    f"{run.step}; nothing left to fit."
                )
            return
        if self._state.is_on_the_way and self._loop.done:
            self._state.set_counts(self._stored)
            say(
                f"{driver.folder}: this fit ends before step {run.step}, where the run is; nothing "
                "is trained.\nTo go on from there: more max_epochs, or max_steps."
            )
            return
        self._state.is_over = False
        self._state.give_gradients()
        self._run_loop()
        self._end(run)

    def _is_over(self, run: Run) -> bool:
        if run.over is not None:
            return self._driver.was_ended_before()
        if not self._state.is_over:
            return False
        return bool(self._trainer.should_stop or self._loop.done)

    def _end(self, run: Run) -> None:
        """All hooks of the end have run: module and callbacks are what the fit leaves."""
        epochs, self._epochs = self._epochs, None
        if epochs is None:
            return
        self._state.is_over = True
        self._driver.end_epochs()
        if next(epochs, None) is not None:
            epochs.close()  # type: ignore[attr-defined]  # a generator
            run.finish()

    # -- data --------------------------------------------------------------------------

    def _set_up_data(self) -> None:
        self._loaders.clear()
        self._setup_data()
        combined = self._loop._combined_loader
        if not self._loaders or self.run is None:
            return
        fetchers = part_of(self._trainer, "loops.fetchers")
        if isinstance(self._loop._data_fetcher, fetchers._DataLoaderIterDataFetcher):
            raise HoldfastError(
                "training_step(dataloader_iter) takes its batches itself, so nobody could say "
                "where in the data a step is.\nWrite training_step(batch, batch_idx)."
            )
        combined.flattened = list(self._loaders)
        length = self._loop.max_batches
        unflatten = part_of(self._trainer, "utilities.combined_loader").tree_unflatten
        data = LightningData(combined, None if math.isinf(length) else int(length), unflatten)
        data.first_epoch, data.behind = self._state.first_epoch, self._state.behind
        self._fetcher = self._loop._data_fetcher = Fetcher(data)
        self._fetcher.note = self._show_batch
        self._fetcher.place = lambda: (self._opened.epoch, self._opened.batch)

    def _stand_in(self) -> None:
        """Called when the loaders are known, before Lightning begins to go through them."""
        combined = self._loop._combined_loader
        if self.run is None or combined is None:
            return
        self._loaders = list(combined.flattened)
        combined.flattened = [Stand(each) for each in self._loaders]

    def _show_batch(self, batch: Any) -> None:
        self._driver.show_batch(batch)

    @property
    def _opened(self) -> Run:
        assert self.run is not None  # the loops are ours only while it is open
        return self.run

    # -- epochs and batches ------------------------------------------------------------

    def _begin_epoch(self) -> None:
        run = self._opened
        is_first = self._epochs is None
        if self._epochs is None:
            self._epochs = run.epochs(self._count_epochs())
        if next(self._epochs, None) is None:
            self._epochs = None
            raise StopIteration  # a rule has found that this is enough; the fit loop ends with it
        if is_first:
            self._tell_total()
        if not self._state.is_on_the_way:
            self._state.top = self._state.counts()
        self._start_epoch()

    def _count_epochs(self) -> int:
        most, steps, batches = self._loop.max_epochs, self._loop.max_steps, self._loop.max_batches
        if most is not None and most >= 0:
            return int(max(0, most - self._state.first_epoch))
        if steps >= 0 and not math.isinf(batches):
            per_epoch: int = max(1, int(batches) // self._trainer.accumulate_grad_batches)
            return math.ceil(int(steps) / per_epoch) + 1
        return _ENDLESS

    def _tell_total(self) -> None:
        most = self._loop.max_epochs
        if most is None or most < 0:
            self._driver.forget_epochs_total()
        if self._trainer.progress_bar_callback is not None:
            self._driver.hide_progress()  # Lightning shows its own

    def _train_batch(self, fetcher: Any) -> None:
        """In place of the epoch loop's advance."""
        if self.run is None or fetcher is not self._fetcher:
            self._advance(fetcher)
            return
        if self._lap is None and self._begin_lap(self.run):
            return
        self._steps = 0
        self._advance(fetcher)
        self._pass_boundary(self.run)

    def _begin_lap(self, run: Run) -> bool:
        """Begin the epoch's batches; True if that was in the middle, behind a step that is made."""
        assert self._fetcher is not None
        is_in_the_middle = self._state.is_on_the_way
        self._state.is_on_the_way = False
        self._schedulers.stop_waiting()
        data = self._fetcher.data
        accumulate = 1 if data.length is None else self._trainer.accumulate_grad_batches
        self._lap = run.batches(data, accumulate=max(1, min(accumulate, data.length or 1)))
        self._take()
        if is_in_the_middle:
            self._state.settle()
            self._seen = dict(self._trainer._logger_connector._callback_metrics)
            self._count_anew(data)
        return is_in_the_middle

    def _count_anew(self, data: LightningData) -> None:
        """With another number of ranks, as many batches are left as there are now."""
        driver = self._driver
        length, position = driver.feed_length, driver.position
        if length is None or data.length is None:
            return
        behind = data.length - (length - position.batches)
        progress = self._epoch_loop.batch_progress.current
        if position.world != driver.kit.world:
            progress.ready = progress.started = progress.processed = progress.completed = behind

    def _take(self) -> None:
        """Pass the boundary behind the last batch, and have the promise of the next."""
        assert self._fetcher is not None
        found = next(self._lap, None)
        assert found is None or isinstance(found, Promise)
        self._fetcher.next = found

    def _pass_boundary(self, run: Run) -> None:
        completes = self._completes_step()
        self._driver.set_completes_step(completes)
        self._log()
        if completes and self._epoch_loop._should_check_val_fx(self._fetcher):
            self._driver.expect_phase()
        self._take()
        if run.over is not None:
            raise StopIteration  # a rule has found that this is enough

    def _completes_step(self) -> bool:
        """Whether the optimizer has stepped, so that no gradients are on their way.

        In manual optimization the module decides.
        """
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return not self._loop._should_accumulate()
        return bool(self._steps) or all(p.grad is None for p in module.parameters())

    def _count_step(self, *_: Any) -> None:
        self._steps += 1

    def _run_validation(self) -> Any:
        if self.run is None or self._trainer.sanity_checking or self._epochs is None:
            return self._validate()
        with self.run.phase("eval"):
            found = self._validate()
        self._log()
        return found

    def _end_epoch(self) -> None:
        lap, self._lap = self._lap, None
        if lap is not None:
            lap.close()
        self._finish_epoch()
        self._log()

    def _log(self) -> None:
        """Give on what was logged since the last time: a rule would count it twice."""
        known = self._trainer._logger_connector._callback_metrics
        fresh = {name: v for name, v in known.items() if self._seen.get(name) is not v}
        self._seen = dict(known)
        numbers = {name: v for name, v in fresh.items() if tuple(getattr(v, "shape", ())) == ()}
        if numbers:
            self._opened.log(**numbers)  # not read before somebody asks for it
