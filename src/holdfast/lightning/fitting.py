"""One call of `trainer.fit` as a run.

Lightning runs its own loops. These methods of this one trainer's loops are replaced while it fits:

    trainer._run_stage           all of it, inside `with Run(…)`
    fit_loop.on_advance_start    the epoch begins: the boundary before it is passed
    epoch_loop.advance           a batch is trained: the boundary after it is passed
    val_loop.run                 a phase
    fit_loop.on_advance_end      the epoch ends

A boundary is between a batch and the validation that may follow it. A fit that resumes in the
middle of an epoch begins that epoch again, with its hooks. Its first `advance` trains nothing: it
restores the stored state. The validation that follows is made as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import subprocess
from collections.abc import Iterator
from typing import Any

from holdfast._errors import HoldfastError, Stopped
from holdfast._run.driver import LoopDriver, do_nothing, replace_method
from holdfast._run.run import Run
from holdfast._text import say
from holdfast.lightning.feeding import Fetcher, LengthOnly, LightningData
from holdfast.lightning.package import part_of
from holdfast.lightning.state import FitState, Schedulers

_ENDLESS = 1 << 30  # epochs, where only a step, a time or a rule ends the fit
_EXIT_SECONDS = 20.0


class Fit:
    _driver: LoopDriver  # of the run, once it is open

    def __init__(self, callback: Any, trainer: Any) -> None:
        self.run: Run | None = None
        self._callback = callback
        self._trainer = trainer
        self._loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._replaced = contextlib.ExitStack()
        self._state = FitState(trainer)
        self._schedulers = Schedulers(trainer)
        self._epochs: Iterator[int] | None = None
        self._lap: Any = None
        self._fetcher: Fetcher | None = None
        self._loaders: list[Any] = []  # those that Lightning has just asked for
        self._seen: dict[str, Any] = {}  # the logged values that the run has received
        self._steps = 0  # of all optimizers, in this batch
        self._stored: dict[str, Any] = {}  # the loops' counts at the stored position
        self._switch_off_signals()
        replace_method(self._replaced, trainer, "_run_stage", self._run_as_a_run)

    def release(self) -> None:
        """Restore Lightning's own methods."""
        self._replaced.close()

    def _switch_off_signals(self) -> None:
        """Keep Lightning from installing its handlers in this fit."""
        trainer, stack = self._trainer, self._replaced
        replace_method(stack, trainer._signal_connector, "register_signal_handlers", do_nothing)
        if hasattr(self._epoch_loop, "_broadcast_sigterm_tensor"):
            # A collective in each step, about a signal that Lightning does not receive here.
            replace_method(stack, self._epoch_loop, "_broadcast_sigterm_tensor", do_nothing)
        environment = trainer._accelerator_connector.cluster_environment
        slurm = part_of(trainer, "plugins.environments").SLURMEnvironment
        if isinstance(environment, slurm) and environment.auto_requeue:
            say(
                "SLURM: Lightning's own requeue and its handlers are switched off in this fit; "
                "holdfast handles the signals, saves and requeues.\n"
                "To silence this: Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])."
            )

    # -- the fit -----------------------------------------------------------------------

    def _run_as_a_run(self, run_stage: Any) -> Any:
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
            hook = optimizer.register_step_post_hook(self._count_step)
            self._replaced.callback(hook.remove)
        for place, name, ours in (
            (self._loop, "run", self._run_all),
            (self._loop, "setup_data", self._set_up_data),
            (self._loop, "_load_combined_loader_states", self._hide_loaders),
            (self._loop, "on_advance_start", self._begin_epoch),
            (self._loop, "on_advance_end", self._end_epoch),
            (self._epoch_loop, "advance", self._train_batch),
            (self._epoch_loop.val_loop, "run", self._run_validation),
        ):
            replace_method(self._replaced, place, name, ours)
        try:
            with self._callback.make_run(state) as self.run:
                return self._fit(self.run, run_stage)
        except Stopped:
            _release_children(trainer)
            raise
        finally:
            self.run = None
            self.release()  # another callback's on_exception may raise before ours is called

    def _fit(self, run: Run, run_stage: Any) -> Any:
        trainer, is_resumed = self._trainer, run.resumed_from is not None
        self._driver = LoopDriver(run)
        self._state.use_live_callbacks()
        path = trainer._checkpoint_connector._ckpt_path
        if path and is_resumed:
            say(
                f"Lightning has loaded {path} (ckpt_path); the run folder has something newer, and "
                "that counts.\nLeave ckpt_path out, or use a new folder to begin from that file."
            )
            _forget_restart(self._loop)
        elif path:
            say(f"the run begins with what Lightning has loaded from {path}.")
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
            trainer.num_sanity_val_steps = 0  # the first attempt has made them
        try:
            return run_stage()
        finally:
            trainer.num_sanity_val_steps = checks

    def _batches_behind(self) -> int:
        """The batches of this epoch that were used before Lightning's checkpoint was written."""
        ready: int = self._epoch_loop.batch_progress.current.completed
        if not self._loop.restarting or not ready:
            return 0
        if ready % self._trainer.accumulate_grad_batches:
            raise HoldfastError(
                f"Lightning's checkpoint was written after {ready} batches, in the middle of a "
                "step (accumulate_grad_batches): the step's gradients are not in it.\n"
                "Begin with one that was written after a whole step."
            )
        return ready

    def _run_all(self, run_loop: Any) -> None:
        """In place of the fit loop's run."""
        run = self.run
        if run is None or self._callback not in self._trainer.callbacks:
            run_loop()  # a fit inside this one, which searches for a learning rate
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
        self._state.restore_gradients()
        run_loop()
        # All hooks of the end have run: module and callbacks are what the fit leaves.
        epochs, self._epochs = self._epochs, None
        if epochs is None:
            return
        self._state.is_over = True
        driver.end_epochs()
        if next(epochs, None) is not None:
            epochs.close()  # type: ignore[attr-defined]  # a generator
            run.finish()

    def _is_over(self, run: Run) -> bool:
        if run.over is not None:
            return self._driver.was_ended_before()
        return self._state.is_over and bool(self._trainer.should_stop or self._loop.done)

    # -- data --------------------------------------------------------------------------

    def _set_up_data(self, setup_data: Any) -> None:
        self._loaders.clear()
        setup_data()
        combined = self._loop._combined_loader
        if not self._loaders or self.run is None:
            return
        fetchers = part_of(self._trainer, "loops.fetchers")
        if isinstance(self._loop._data_fetcher, fetchers._DataLoaderIterDataFetcher):
            raise HoldfastError(
                "training_step(dataloader_iter) takes its batches itself, so the position in the "
                "data is not known at a step.\nWrite training_step(batch, batch_idx)."
            )
        combined.flattened = list(self._loaders)
        length = self._loop.max_batches
        unflatten = part_of(self._trainer, "utilities.combined_loader").tree_unflatten
        length = None if math.isinf(length) else int(length)
        begins = self._state.first_epoch, self._state.behind
        data = LightningData(combined, length, unflatten, *begins)
        self._fetcher = self._loop._data_fetcher = Fetcher(
            data, self._driver.show_batch, lambda: (self._opened.epoch, self._opened.batch)
        )

    def _hide_loaders(self, _: Any) -> None:
        """Called when the loaders are known, before Lightning iterates over them."""
        combined = self._loop._combined_loader
        if self.run is None or combined is None:
            return
        self._loaders = list(combined.flattened)
        combined.flattened = [LengthOnly(each) for each in self._loaders]

    @property
    def _opened(self) -> Run:
        assert self.run is not None  # the loops' methods are replaced only while it is open
        return self.run

    # -- epochs and batches ------------------------------------------------------------

    def _begin_epoch(self, start_epoch: Any) -> None:
        run = self._opened
        is_first = self._epochs is None
        if self._epochs is None:
            self._epochs = run.epochs(self._count_epochs())
        if next(self._epochs, None) is None:
            self._epochs = None
            raise StopIteration  # a rule ends the training; the fit loop ends with it
        if is_first:
            most = self._loop.max_epochs
            if most is None or most < 0:
                self._driver.forget_epochs_total()
            if self._trainer.progress_bar_callback is not None:
                self._driver.hide_progress()  # Lightning shows its own
        if not self._state.is_on_the_way:
            self._state.top = self._state.counts()
        start_epoch()

    def _count_epochs(self) -> int:
        most, steps, batches = self._loop.max_epochs, self._loop.max_steps, self._loop.max_batches
        if most is not None and most >= 0:
            return int(max(0, most - self._state.first_epoch))
        if steps >= 0 and not math.isinf(batches):
            per_epoch: int = max(1, int(batches) // self._trainer.accumulate_grad_batches)
            return math.ceil(int(steps) / per_epoch) + 1
        return _ENDLESS

    def _train_batch(self, advance: Any, fetcher: Any) -> None:
        """In place of the epoch loop's advance."""
        if self.run is None or fetcher is not self._fetcher:
            advance(fetcher)
            return
        if self._lap is None and self._begin_lap(self.run):
            return
        self._steps = 0
        advance(fetcher)
        self._pass_boundary(self.run)

    def _begin_lap(self, run: Run) -> bool:
        """Begin the epoch's batches; True if that was in the middle, after a completed step."""
        assert self._fetcher is not None
        is_in_the_middle = self._state.is_on_the_way
        self._state.is_on_the_way = False
        self._schedulers.stop_waiting()
        data = self._fetcher.data
        accumulate = 1 if data.length is None else self._trainer.accumulate_grad_batches
        self._lap = run.batches(data, accumulate=max(1, min(accumulate, data.length or 1)))
        self._take()
        if is_in_the_middle:
            self._state.use_live_callbacks()
            self._seen = dict(self._trainer._logger_connector._callback_metrics)
            self._recount(data)
        return is_in_the_middle

    def _recount(self, data: LightningData) -> None:
        """With another number of ranks, another number of batches is left."""
        driver = self._driver
        length, position = driver.feed_length, driver.position
        if length is None or data.length is None:
            return
        behind = data.length - (length - position.batches)
        progress = self._epoch_loop.batch_progress.current
        if position.world != driver.context.world:
            progress.ready = progress.started = progress.processed = progress.completed = behind

    def _take(self) -> None:
        """Pass the boundary after the last batch, and take the promise of the next."""
        assert self._fetcher is not None
        self._fetcher.next = next(self._lap, None)

    def _pass_boundary(self, run: Run) -> None:
        completes = self._completes_step()
        self._driver.set_completes_step(completes)
        self._log()
        if completes and self._epoch_loop._should_check_val_fx(self._fetcher):
            self._driver.expect_phase()
        self._take()
        if run.over is not None:
            raise StopIteration  # a rule ends the training

    def _completes_step(self) -> bool:
        """True if the optimizer has stepped, so that no gradients are pending.

        In manual optimization the module decides.
        """
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return not self._loop._should_accumulate()
        return bool(self._steps) or all(p.grad is None for p in module.parameters())

    def _count_step(self, *_: Any) -> None:
        self._steps += 1

    def _run_validation(self, validate: Any) -> Any:
        if self.run is None or self._trainer.sanity_checking or self._epochs is None:
            return validate()
        with self.run.phase("eval"):
            found = validate()
        self._log()
        return found

    def _end_epoch(self, finish_epoch: Any) -> None:
        lap, self._lap = self._lap, None
        if lap is not None:
            lap.close()
        finish_epoch()
        self._log()

    def _log(self) -> None:
        """Log only the values that are new: a rule would count the others twice."""
        known = self._trainer._logger_connector._callback_metrics
        fresh = {name: v for name, v in known.items() if self._seen.get(name) is not v}
        self._seen = dict(known)
        self._driver.log_numbers(fresh)


def _forget_restart(loop: Any) -> None:
    """Make loops forget that they were to resume in Lightning's own way."""
    loop._restarting = loop._loaded_from_state_dict = False
    if hasattr(loop, "_resuming_from_checkpoint"):
        loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting") and hasattr(inner, "_loaded_from_state_dict"):
            _forget_restart(inner)


def _release_children(trainer: Any) -> None:
    """Let the ranks that Lightning has started exit with their status.

    Lightning's observer takes a status for a failure, and would kill this process too.
    """
    children = getattr(trainer.strategy.launcher, "procs", None)
    if children:
        atexit.register(_wait_for, list(children))
        children.clear()


def _wait_for(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_EXIT_SECONDS)
