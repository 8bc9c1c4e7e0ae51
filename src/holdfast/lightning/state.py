"""The state of a fit besides module and optimizers: loops, callbacks, and logged values.

At a boundary in the middle of an epoch Lightning has counted, averaged and logged since the epoch
began. Its own checkpoints hold only the counts. Here the rest is stored too.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from typing import Any

from holdfast.lightning.package import package_of, part_of

_PLAIN = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_RESULTS = "trainer.connectors.logger_connector.result"
_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class FitState:
    """All of it, as one object in the run's state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logged = LoggedValues(trainer)
        self.top: dict[str, Any] = {}  # the counts when the epoch began
        # Where the run began: a checkpoint of Lightning may be from the middle of an epoch.
        self.first_epoch = 0
        self.behind = 0  # batches of that epoch
        self.is_over = False
        self._gradients: dict[str, Any] = {}
        # The loaded states of callbacks: some report them only after they have begun.
        self._given: dict[str, Any] | None = None
        self.is_on_the_way = False  # the epoch runs again, up to where it was interrupted

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loop, datamodule = trainer.fit_loop, trainer.datamodule
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        states = ((callback.state_key, callback.state_dict()) for callback in trainer.callbacks)
        callbacks = {key: dict(state) for key, state in states if state}
        return {
            "loops": self.counts(),
            "top": self.top,
            "begins": [self.first_epoch, self.behind],
            "over": self.is_over,
            "on_the_way": self.is_on_the_way,
            "should_stop": bool(trainer.should_stop),
            "reloaded": [
                loop._last_train_dl_reload_epoch,
                loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
            ],
            "logged": self._logged.state(),
            "gradients": self._pending_gradients(),
            # A scaler is a state of the run by itself.
            "precision": {} if scaler is not None else dict(trainer.precision_plugin.state_dict()),
            "callbacks": callbacks if self._given is None else self._given,
            "datamodule": {} if datamodule is None else dict(datamodule.state_dict()),
            "checkpoint": self._from_hooks(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        loop = trainer.fit_loop
        self.top = state["top"]
        self.first_epoch, self.behind = state["begins"]
        self.is_over, self.is_on_the_way = state["over"], state["on_the_way"]
        trainer.should_stop = state["should_stop"]
        # None in states of older versions.
        reloaded = [float("-inf") if each is None else each for each in state["reloaded"]]
        loop._last_train_dl_reload_epoch = reloaded[0]
        loop.epoch_loop.val_loop._last_val_dl_reload_epoch = reloaded[1]
        self.set_counts(state["loops"])
        self._logged.load(state["logged"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        self._load_by_hooks(state)
        self._given = state["callbacks"]
        self._gradients = state["gradients"]
        self.restore_gradients()

    def use_live_callbacks(self) -> None:
        """The state is loaded and compared: from now on callbacks report their own states."""
        self._given = None

    # -- gradients ---------------------------------------------------------------------

    def _pending_gradients(self) -> dict[str, Any]:
        """In manual optimization a module may keep gradients over several batches or epochs."""
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return {}
        return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    def restore_gradients(self) -> None:
        """Also called when Lightning has cleared them, before its loops begin."""
        if not self._gradients:
            return
        for name, parameter in self._trainer.lightning_module.named_parameters():
            parameter.grad = self._gradients.get(name)

    # -- loops -------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
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

    def _from_hooks(self) -> dict[str, Any]:
        """What callbacks and the module add to a checkpoint of Lightning."""
        owners = _overriding(self._trainer, "on_save_checkpoint")
        if not owners:
            return {}
        checkpoint = self._make_checkpoint()
        before = dict(checkpoint)
        _call(self._trainer, owners, "on_save_checkpoint", checkpoint)
        return {
            key: value
            for key, value in checkpoint.items()
            if key not in before or value is not before[key]
        }

    def _load_by_hooks(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        checkpoint = {**self._make_checkpoint(), "callbacks": state["callbacks"]}
        checkpoint |= state["checkpoint"]
        # In Lightning's order: the module's hook, the callbacks' hooks, the callbacks' states.
        owners = _overriding(trainer, "on_load_checkpoint")
        owners.sort(key=lambda each: each is not trainer.lightning_module)
        _call(trainer, owners, "on_load_checkpoint", checkpoint)
        for callback in trainer.callbacks:
            known = state["callbacks"].get(callback.state_key)
            if known:
                callback.load_state_dict(known)

    def _make_checkpoint(self) -> dict[str, Any]:
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
    """The schedulers of a fit at the moment: callbacks may replace them."""

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
            self._waiting = stored  # until a callback makes them when the epoch begins
            return
        self._waiting = None
        for scheduler, each in zip(found, stored, strict=True):
            scheduler.load_state_dict(each["state"])

    def stop_waiting(self) -> None:
        self._waiting = None


class LoggedValues:
    """The results of the epoch so far, the newest values, and the metrics of the module.

    Lightning keeps them only in memory. Early stopping, a plateau scheduler and ModelCheckpoint
    use the epoch's means.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state(self) -> dict[str, Any]:
        trainer = self._trainer
        connector = trainer._logger_connector
        results = trainer.fit_loop.epoch_loop._results
        return {
            "results": {key: self._result_state(each) for key, each in results.items()},
            "metrics": {
                path: {
                    "values": {name: getattr(metric, name) for name in metric._defaults},
                    "updates": metric._update_count,
                }
                for path, metric in self._metrics().items()
            },
            "shown": {name: dict(getattr(connector, name)) for name in _SHOWN},
            "first_iteration": connector._first_loop_iter,
            "within": connector._current_fx,
        }

    def load(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        metrics = self._metrics()
        for path, stored in state["metrics"].items():
            metric = metrics.get(path)
            if metric is None:
                continue
            for name, value in stored["values"].items():
                setattr(metric, name, value)
            metric._update_count = stored["updates"]
            metric._computed = None
        results = trainer.fit_loop.epoch_loop._results
        results.clear()
        for key, stored in state["results"].items():
            results[key] = self._result_from(stored, metrics)
        connector = trainer._logger_connector
        for name, values in state["shown"].items():
            setattr(connector, name, dict(values))
        connector._first_loop_iter = state["first_iteration"]
        connector._current_fx = state["within"]

    def _metrics(self) -> dict[str, Any]:
        """The metrics of torchmetrics in the module, whose sums are in no state_dict."""
        known = sys.modules.get("torchmetrics")
        if known is None:
            return {}
        found = dict(self._trainer.lightning_module.named_modules())
        for module in found.values():
            if isinstance(module, known.MetricCollection):
                # Metrics of a group share their sums; only one has them until the others are used.
                module._compute_groups_create_state_ref()
        return {path: each for path, each in found.items() if isinstance(each, known.Metric)}

    def _result_state(self, result: Any) -> dict[str, Any]:
        meta = result.meta
        state: dict[str, Any] = {name: getattr(meta, name) for name in _PLAIN}
        state["reduce"] = [meta.reduce_fx.__name__, meta.reduce_fx.__module__ == "builtins"]
        state["sync"] = [meta.sync.should, meta.sync.op, meta.sync.rank_zero_only]
        state["is_tensor"] = result.is_tensor
        state["is_reset"] = result.has_reset
        state["updates"] = result._update_count
        cache = result._forward_cache
        state["has_cache"] = cache is not None
        if result.is_tensor:
            state["value"] = result.value
            if meta.is_mean_reduction:
                state["size"] = result.cumulated_batch_size
            # The layout of the state must not change with every epoch: that would cost memory.
            cache = result.value.new_zeros(()) if cache is None else cache
        state["cache"] = cache
        return state

    def _result_from(self, stored: dict[str, Any], metrics: dict[str, Any]) -> Any:
        module = part_of(self._trainer, _RESULTS)
        name, is_builtin = stored["reduce"]
        should, op, rank_zero_only = stored["sync"]
        plain = {key: stored[key] for key in _PLAIN}
        reduce_fx = getattr(builtins if is_builtin else sys.modules["torch"], name)
        meta = module._Metadata(reduce_fx=reduce_fx, **plain)
        reduce = self._trainer.strategy.reduce
        meta.sync = module._Sync(
            fn=reduce, _should=should, rank_zero_only=rank_zero_only, _op=op, _group=None
        )
        result = module._ResultMetric(meta, stored["is_tensor"])
        if stored["is_tensor"]:
            result.value = stored["value"]
            if meta.is_mean_reduction:
                result.cumulated_batch_size = stored["size"]
        else:
            result.value = metrics[stored["metric_attribute"]]
        result._forward_cache = stored["cache"] if stored["has_cache"] else None
        result._update_count = stored["updates"]
        result.has_reset = stored["is_reset"]
        return result


def _progress(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The progress counters of the loops of a fit, by their paths."""
    kinds = part_of(trainer, "loops.progress")._BaseProgress
    loops = part_of(trainer, "loops.loop")._Loop

    def walk(loop: Any, path: str) -> Iterator[tuple[str, Any]]:
        for name, value in vars(loop).items():
            if isinstance(value, kinds):
                yield f"{path}{name}", value
            elif isinstance(value, loops):
                yield from walk(value, f"{path}{name}.")

    return walk(trainer.fit_loop, "")


def _overriding(trainer: Any, name: str) -> list[Any]:
    """The callbacks and the module that define this hook; Lightning's own do nothing."""
    found = []
    for each in (*trainer.callbacks, trainer.lightning_module):
        place = getattr(getattr(type(each), name), "__module__", "")
        if "lightning" not in place or not place.endswith((".callbacks.callback", ".core.hooks")):
            found.append(each)
    return found


def _call(trainer: Any, owners: list[Any], hook: str, checkpoint: dict[str, Any]) -> None:
    module = trainer.lightning_module
    for each in owners:
        if each is module:
            getattr(each, hook)(checkpoint)
        else:
            getattr(each, hook)(trainer, module, checkpoint)
