"""What a module has logged in an epoch so far: sums that Lightning keeps nowhere but in memory.

They decide: early stopping, a plateau scheduler and ModelCheckpoint look at the epoch's means.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

from holdfast.lightning.package import part_of

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


class LoggedValues:
    """The results of the epoch, the newest values, and the metrics that the module holds."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state(self) -> dict[str, Any]:
        trainer = self._trainer
        connector = trainer._logger_connector
        results = trainer.fit_loop.epoch_loop._results
        return {
            "results": {key: self._result_state(each) for key, each in results.items()},
            "metrics": {path: _metric_state(each) for path, each in self._metrics().items()},
            "shown": {name: dict(getattr(connector, name)) for name in _SHOWN},
            "first_iteration": connector._first_loop_iter,
            "within": connector._current_fx,
        }

    def load(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        metrics = self._metrics()
        for path, stored in state["metrics"].items():
            if path in metrics:
                _load_metric(metrics[path], stored)
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
                # Of several that share their sums, only one has them until the others are asked.
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
            # A form that changes with every epoch would cost memory.
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


def _metric_state(metric: Any) -> dict[str, Any]:
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {"values": values, "updates": metric._update_count}


def _load_metric(metric: Any, stored: dict[str, Any]) -> None:
    for name, value in stored["values"].items():
        setattr(metric, name, value)
    metric._update_count = stored["updates"]
    metric._computed = None
