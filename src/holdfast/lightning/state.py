"""What a fit is, beside the module and its optimizers: loops, callbacks, and what was logged.

At a boundary in the middle of an epoch Lightning has counted, averaged and logged since the epoch
began. Its own checkpoints hold the counts only; here the rest is kept too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from holdfast.lightning.logged import LoggedValues
from holdfast.lightning.package import package_of, part_of


class FitState:
    """All of it, as one object of the run's state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logged = LoggedValues(trainer)
        self.top: dict[str, Any] = {}  # the counts when the epoch began
        self.first_epoch = 0  # and behind how many of its batches the run began, which a
        self.behind = 0  # checkpoint of Lightning's may have left in the middle
        self.is_over = False
        self._gradients: dict[str, Any] = {}
        # What callbacks were given: some show it only when they have begun to work with it.
        self._given: dict[str, Any] | None = None
        self.is_on_the_way = False  # the epoch runs again, up to where it was interrupted

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loop = trainer.fit_loop
        return {
            "loops": self.counts(),
            "top": self.top,
            "begins": [self.first_epoch, self.behind],
            "over": self.is_over,
            "on_the_way": self.is_on_the_way,
            "should_stop": bool(trainer.should_stop),
            "reloaded": [
                _finite(loop._last_train_dl_reload_epoch),
                _finite(loop.epoch_loop.val_loop._last_val_dl_reload_epoch),
            ],
            "logged": self._logged.state(),
            "gradients": self._gradients_on_their_way(),
            "precision": _precision_state(trainer),
            "callbacks": _states_of_callbacks(trainer) if self._given is None else self._given,
            "datamodule": _state_of_datamodule(trainer),
            "checkpoint": self._by_hooks(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        loop = trainer.fit_loop
        self.top = state["top"]
        self.first_epoch, self.behind = state["begins"]
        self.is_over, self.is_on_the_way = state["over"], state["on_the_way"]
        trainer.should_stop = state["should_stop"]
        reloaded = [float("-inf") if each is None else each for each in state["reloaded"]]
        loop._last_train_dl_reload_epoch = reloaded[0]
        loop.epoch_loop.val_loop._last_val_dl_reload_epoch = reloaded[1]
        self.set_counts(state["loops"])
        self._logged.load(state["logged"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        self._give_to_hooks(state)
        self._given = state["callbacks"]
        self._gradients = state["gradients"]
        self.give_gradients()

    def settle(self) -> None:
        """It is loaded and compared: from now on callbacks say themselves what they keep."""
        self._given = None

    # -- gradients ---------------------------------------------------------------------

    def _gradients_on_their_way(self) -> dict[str, Any]:
        """In manual optimization they may be kept from one batch, or epoch, to the next."""
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return {}
        return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    def give_gradients(self) -> None:
        """Give them back; once more when Lightning has cleared them, before its loops begin."""
        if not self._gradients:
            return
        for name, parameter in self._trainer.lightning_module.named_parameters():
            parameter.grad = self._gradients.get(name)

    # -- loops -------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        """What the loops have counted."""
        found = {path: progress.state_dict() for path, progress in _progress(self._trainer)}
        found["_batches_that_stepped"] = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        return found

    def set_counts(self, counts: dict[str, Any]) -> None:
        for path, progress in _progress(self._trainer):
            if path in counts:
                progress.load_state_dict(counts[path])
        loop = self._trainer.fit_loop.epoch_loop
        loop._batches_that_stepped = counts["_batches_that_stepped"]

    # -- hooks that add to a checkpoint ------------------------------------------------

    def _by_hooks(self) -> dict[str, Any]:
        """What callbacks and the module put into a checkpoint of Lightning's, if they do."""
        givers = _overriding(self._trainer, "on_save_checkpoint")
        if not givers:
            return {}
        checkpoint = self._like_a_checkpoint()
        before = dict(checkpoint)
        _call(self._trainer, givers, "on_save_checkpoint", checkpoint)
        return {
            key: value
            for key, value in checkpoint.items()
            if key not in before or value is not before[key]
        }

    def _give_to_hooks(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        checkpoint = {**self._like_a_checkpoint(), "callbacks": state["callbacks"]}
        checkpoint |= state["checkpoint"]
        takers = _overriding(trainer, "on_load_checkpoint")
        of_module = [each for each in takers if each is trainer.lightning_module]
        # As Lightning does: first the module, then callbacks, then what they keep themselves.
        _call(trainer, of_module, "on_load_checkpoint", checkpoint)
        others = [each for each in takers if each is not trainer.lightning_module]
        _call(trainer, others, "on_load_checkpoint", checkpoint)
        for callback in trainer.callbacks:
            known = state["callbacks"].get(callback.state_key)
            if known:
                callback.load_state_dict(known)

    def _like_a_checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": sys.modules[package_of(trainer)].__version__,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {"fit_loop": {}},
            "callbacks": {},
            "optimizer_states": [each.state_dict() for each in trainer.optimizers],
            "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        }


class Schedulers:
    """Those of a fit, whichever they are by now: callbacks may put others in their place."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._waiting: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._waiting is not None:
            return {"each": self._waiting}
        found = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return {"each": [{"of": type(s).__name__, "state": s.state_dict()} for s in found]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        stored = state["each"]
        if [type(s).__name__ for s in found] != [each["of"] for each in stored]:
            self._waiting = stored  # until a callback has made them, at the top of the epoch
            return
        self._waiting = None
        for scheduler, each in zip(found, stored, strict=True):
            scheduler.load_state_dict(each["state"])

    def stop_waiting(self) -> None:
        self._waiting = None


def _progress(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Everything in which the loops of a fit count, by its path."""
    kinds = part_of(trainer, "loops.progress")._BaseProgress
    loops = part_of(trainer, "loops.loop")._Loop

    def walk(loop: Any, path: str) -> Iterator[tuple[str, Any]]:
        for name, value in vars(loop).items():
            if isinstance(value, kinds):
                yield f"{path}{name}", value
            elif isinstance(value, loops):
                yield from walk(value, f"{path}{name}.")

    return walk(trainer.fit_loop, "")


def _precision_state(trainer: Any) -> dict[str, Any]:
    """Of a precision that has no scaler: that one is part of the run by itself."""
    plugin = trainer.precision_plugin
    return {} if getattr(plugin, "scaler", None) is not None else dict(plugin.state_dict())


def _states_of_callbacks(trainer: Any) -> dict[str, Any]:
    states = ((callback.state_key, callback.state_dict()) for callback in trainer.callbacks)
    return {key: dict(state) for key, state in states if state}


def _state_of_datamodule(trainer: Any) -> dict[str, Any]:
    return {} if trainer.datamodule is None else dict(trainer.datamodule.state_dict())


def _overriding(trainer: Any, name: str) -> list[Any]:
    """The callbacks and the module that have written this hook; most have not."""
    found = [*trainer.callbacks, trainer.lightning_module]
    return [each for each in found if not _is_idle(getattr(type(each), name))]


def _is_idle(method: Any) -> bool:
    """Whether a hook is the one of Lightning's base classes, which does nothing."""
    place = getattr(method, "__module__", "")
    return "lightning" in place and place.endswith((".callbacks.callback", ".core.hooks"))


def _call(trainer: Any, takers: list[Any], hook: str, checkpoint: dict[str, Any]) -> None:
    module = trainer.lightning_module
    for each in takers:
        if each is module:
            getattr(each, hook)(checkpoint)
        else:
            getattr(each, hook)(trainer, module, checkpoint)


def _finite(epoch: float) -> float | None:
    return None if epoch == float("-inf") else epoch
