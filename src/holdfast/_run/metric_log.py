"""What `run.log` is given, and who gets it: rules, the keeper, loggers.

Loggers run in processes of their own. At the end they are told first, all of them, and then waited
for one by one: so they write what is left at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from holdfast._adapters.metrics import Metrics, without_devices
from holdfast._keeper.metric_batches import Logged
from holdfast.rules._judge import Judge

Listener = Callable[[int, dict[str, Any]], None]  # appends and returns


class MetricLog:
    def __init__(self, metrics: Metrics, judge: Judge) -> None:
        self.metrics = metrics
        self._judge = judge
        self.keeper_log: Logged | None = None  # while a keeper takes it
        self._listeners: list[Listener] = []
        # Loggers, by hand_over() before a snapshot; at the end begin_end(status), wait_for_end().
        self.sinks: tuple[Any, ...] = ()

    def record(self, step: int, values: dict[str, Any]) -> bool:
        """Distribute values of a step; True if the best checkpoint is to be saved."""
        metrics, judge = self.metrics, self._judge
        is_best = metrics.note(values)
        if self.keeper_log is not None:
            numbers = values if metrics.are_numbers else without_devices(values)
            self.keeper_log.append((step, numbers))
        for listen in self._listeners:
            listen(step, values)
        if judge.is_there:
            for name in values:
                judge.note(name, metrics.held(name))
        return is_best

    # -- loggers ----------------------------------------------------------------------

    def add(self, sink: Any, listener: Listener) -> None:
        self._listeners.append(listener)
        self.sinks = (*self.sinks, sink)

    def replace(self, listener: Listener, other: Listener) -> None:
        self._listeners[self._listeners.index(listener)] = other

    def remove(self, sink: Any, listener: Listener) -> None:
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)
        self.sinks = tuple(each for each in self.sinks if each is not sink)

    def flush(self) -> None:
        """Send everything to the loggers' processes before a snapshot."""
        for sink in self.sinks:
            sink.hand_over()

    def end(self, status: int) -> None:
        sinks = list(self.sinks)
        for sink in sinks:
            with contextlib.suppress(Exception):  # the state is durable: a curve may be cut
                sink.begin_end(status)
        for sink in sinks:
            with contextlib.suppress(Exception):
                sink.wait_for_end()
