"""Watches a training in torch from inside: each update, each batch, each file saved or loaded.

The state is read just before an optimizer's update. Everything that decides the update is there
then: the weights, the gradients, the moments, the rate, the batches, the generators.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from holdfast._run.witness.observer import Observer
from holdfast._tools.prove.witness.bootstrap import record_fresh_generators
from holdfast._tools.prove.witness.recorder import ScriptRecorder, intercept, path_of
from holdfast._tools.prove.witness.state_reader import name_arguments, own_frames
from holdfast._tools.prove.witness.torch_state import TorchStateReader


def watch(observer: Observer) -> None:
    """Watch everything that this process trains with torch."""
    record_fresh_generators()
    reader = TorchStateReader(observer)
    recorder = _TorchRecorder(observer, reader)
    register_optimizer_step_pre_hook(recorder.before_update)
    register_optimizer_step_post_hook(recorder.after_update)
    for kind in (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        _collect(kind, reader.schedulers)
    _collect(torch.amp.GradScaler, reader.scalers)
    _collect(Optimizer, reader.optimizers)
    _watch_loaders(observer, recorder)
    _watch_modules(observer)
    # torch has no hook for files. Both names: scripts use the one, libraries the other.
    for module in (torch, torch.serialization):
        intercept(module, "save", recorder.save)
        intercept(module, "load", recorder.load)
    recorder.install(torch, "manual_seed", "torch")


def _collect(kind: Any, instances: list[Any]) -> None:
    def collect(begin: Any, self: Any, /, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        if not any(known is self for known in instances):
            instances.append(self)

    intercept(kind, "__init__", collect)


class _TorchRecorder(ScriptRecorder):
    def __init__(self, observer: Observer, reader: TorchStateReader) -> None:
        super().__init__(observer)
        self._reader = reader

    def before_update(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if not self._observer.is_open:
            return
        frames = own_frames(sys._getframe(1))
        # A closure makes the gradients only now: the present ones are of the last step.
        has_closure = any(callable(word) for word in (*arguments[1:], *named.values()))
        state = self._reader.read(optimizer, frames, has_gradients=not has_closure)
        state["items"] |= self._observer.take_inputs()
        self.ask_update(self.take_batches(), state)
        self._observer.reach("gradient")

    def after_update(self, *_: Any) -> None:
        if self._observer.is_open:
            self.count_update()
            self._observer.reach("update")

    def end(self) -> None:
        # Where another framework trains, its watch sends the end.
        if self._observer.is_open and (self.updates or not self._observer.other_framework_trains):
            self._observer.send("end", updates=self.updates, **self._reader.read_last())

    def save(self, save: Callable[..., Any], /, obj: Any, f: Any, *more: Any, **named: Any) -> Any:
        def tear() -> None:
            whole = io.BytesIO()
            save(obj, whole, *more, **named)
            data = whole.getvalue()
            with contextlib.nullcontext(f) if hasattr(f, "write") else Path(f).open("wb") as stream:
                stream.write(data[: len(data) // 2])
                stream.flush()
                self._observer.reach("tear")
                stream.write(data[len(data) // 2 :])

        return self.record_save(path_of(f), lambda: save(obj, f, *more, **named), tear)

    def load(self, load: Callable[..., Any], /, f: Any, *more: Any, **named: Any) -> Any:
        return self.record_load(path_of(f), lambda: load(f, *more, **named))


def _watch_loaders(observer: Observer, recorder: _TorchRecorder) -> None:
    def begin_pass(begin: Any, self: Any, loader: Any, *more: Any, **named: Any) -> None:
        self._holdfast_loader = id(loader)
        self._holdfast_indices, self._holdfast_at = deque(), 0
        begin(self, loader, *more, **named)

    def next_index(take: Any, self: Any) -> Any:
        found = take(self)
        if observer.is_open:
            # A pass that began before the watch has no list yet.
            self.__dict__.setdefault("_holdfast_indices", deque()).append(found)
        return found

    def next_batch(take: Any, self: Any) -> Any:
        batch = take(self)
        if observer.is_open and not observer.run_sends_batches:
            indices = self.__dict__.get("_holdfast_indices") or deque([None])
            at = self.__dict__.get("_holdfast_at", 0)
            self._holdfast_at = at + 1
            of = self.__dict__.get("_holdfast_loader", 0)
            recorder.record_batch(of, at, indices.popleft(), batch, self._num_workers)
        return batch

    kind: Any = dataloader._BaseDataLoaderIter
    intercept(kind, "__init__", begin_pass)
    intercept(kind, "_reset", begin_pass)
    intercept(kind, "__next__", next_batch)
    intercept(kind, "_next_index", next_index)


def _watch_modules(observer: Observer) -> None:
    """Record the inputs of the outermost module of each call: a script may keep them for later.

    When the update comes, the variable that held an input may already hold the next one.
    """
    call = torch.nn.Module.__call__
    calls: list[Any] = []  # those under way

    @functools.wraps(call)
    def call_recorded(module: Any, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or calls:
            return call(module, *arguments, **named)
        if observer.is_open and torch.is_grad_enabled():
            observer.record_inputs(name_arguments(arguments, named, own_frames(sys._getframe(1))))
        calls.append(module)
        try:
            return call(module, *arguments, **named)
        finally:
            calls.clear()

    torch.nn.Module.__call__ = call_recorded  # type: ignore[method-assign]
