"""Watches a training in torch from inside: each update, each batch, each file saved or loaded.

A sight is taken just before an optimizer's update: whatever decides that update is there then,
the weights, the gradients, the moments, the rate, the batches, the generators.
"""

from __future__ import annotations

import atexit
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

from holdfast._run.witness.eye import Eye
from holdfast._tools.prove.witness.arrive import SEEDS, note_fresh_generators, note_seeds
from holdfast._tools.prove.witness.telling import Teller, path_of
from holdfast._tools.prove.witness.torch_state import Sights
from holdfast._tools.prove.witness.variables import name_arguments, own_frames


def watch(eye: Eye) -> None:
    """Watch everything that this process trains with torch."""
    note_fresh_generators()
    sights = Sights(eye)
    watcher = _Watcher(eye, sights)
    register_optimizer_step_pre_hook(watcher.before_update)
    register_optimizer_step_post_hook(watcher.after_update)
    for kind in (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        _after_init(kind, sights.schedulers)
    _after_init(torch.amp.GradScaler, sights.scalers)
    _after_init(Optimizer, sights.optimizers)
    _watch_loaders(eye, watcher)
    _watch_modules(eye)
    # torch has no hook for files. Both names: scripts use the one, libraries the other.
    for module in (torch, torch.serialization):
        module.save = watcher.saving(torch.serialization.save)  # type: ignore[attr-defined]
        module.load = watcher.loading(torch.serialization.load)  # type: ignore[attr-defined]
    note_seeds(torch, "manual_seed", "torch")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        note_seeds(numpy.random, "seed", "numpy")
    sys.addaudithook(watcher.hear_renames)
    atexit.register(watcher.end)


def _after_init(kind: Any, registry: list[Any]) -> None:
    begin = kind.__init__

    @functools.wraps(begin)
    def begin_and_note(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        if not any(known is self for known in registry):
            registry.append(self)

    kind.__init__ = begin_and_note


class _Watcher(Teller):
    def __init__(self, eye: Eye, sights: Sights) -> None:
        super().__init__(eye)
        self._sights = sights

    # -- updates ----------------------------------------------------------------------

    def before_update(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if not self._eye.is_open:
            return
        self._amid = "update"
        frames = own_frames(sys._getframe(1))
        # A closure makes the gradients only now: those that are there are of the last step.
        has_closure = any(callable(word) for word in (*arguments[1:], *named.values()))
        sight = self._sights.take(optimizer, frames, has_gradients=not has_closure)
        self._eye.ask(
            "sight",
            number=self.updates,
            mark=self._eye.mark,
            batches=self.take_batches(),
            seeds=SEEDS if self.updates == 0 else {},
            **sight | {"items": sight["items"] | self._eye.take_inputs()},
        )
        self._eye.reach("gradient")

    def after_update(self, *_: Any) -> None:
        if self._eye.is_open:
            self.updates += 1
            self._amid = "after the update"
            self._eye.reach("update")

    def end(self) -> None:
        """The script is over: what it has in the end."""
        # Where another framework trains, its watch tells of the end.
        if self._eye.is_open and (self.updates or not self._eye.is_elsewhere_told):
            self._eye.tell("end", updates=self.updates, **self._sights.take_last())

    # -- files ------------------------------------------------------------------------

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def save_and_tell(obj: Any, f: Any, *more: Any, **named: Any) -> Any:
            return self.tell_save(
                path_of(f),
                lambda: save(obj, f, *more, **named),
                lambda: self._tear(save, obj, f, more, named),
            )

        return save_and_tell

    def _tear(self, save: Callable[..., Any], obj: Any, f: Any, more: Any, named: Any) -> None:
        """Write as torch does, but stop in the middle for whoever wants to kill just then."""
        whole = io.BytesIO()
        save(obj, whole, *more, **named)
        data = whole.getvalue()
        with contextlib.nullcontext(f) if hasattr(f, "write") else Path(f).open("wb") as stream:
            stream.write(data[: len(data) // 2])
            stream.flush()
            self._eye.reach("tear")
            stream.write(data[len(data) // 2 :])

    def loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_and_tell(f: Any, *more: Any, **named: Any) -> Any:
            return self.tell_load(path_of(f), lambda: load(f, *more, **named))

        return load_and_tell


def _watch_loaders(eye: Eye, watcher: _Watcher) -> None:
    kind: Any = dataloader._BaseDataLoaderIter
    begin, reset = kind.__init__, kind._reset
    next_batch, next_index = kind.__next__, kind._next_index

    def begin_noted(self: Any, loader: Any) -> None:
        _forget_pass(self, loader)
        begin(self, loader)

    def reset_noted(self: Any, loader: Any, first_iter: bool = False) -> None:
        _forget_pass(self, loader)
        reset(self, loader, first_iter)

    def next_index_noted(self: Any) -> Any:
        found = next_index(self)
        if eye.is_open:
            # A loader that was begun before it was watched has no list yet.
            self.__dict__.setdefault("_holdfast_indices", deque()).append(found)
        return found

    def next_batch_noted(self: Any) -> Any:
        batch = next_batch(self)
        if eye.is_open and not eye.run_tells_batches:
            indices = self.__dict__.get("_holdfast_indices") or deque([None])
            at = self.__dict__.get("_holdfast_at", 0)
            self._holdfast_at = at + 1
            of = self.__dict__.get("_holdfast_loader", 0)
            watcher.note_batch(of, at, indices.popleft(), batch, self._num_workers)
        return batch

    kind.__init__, kind._reset = begin_noted, reset_noted
    kind.__next__, kind._next_index = next_batch_noted, next_index_noted


def _watch_modules(eye: Eye) -> None:
    """Note what goes into the outermost module of each call: a script may hold it for later steps.

    When the update comes, the variable that held it may already hold the next one.
    """
    call = torch.nn.Module.__call__
    calls: list[Any] = []  # those under way

    @functools.wraps(call)
    def call_noted(module: Any, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or calls:
            return call(module, *arguments, **named)
        if eye.is_open and torch.is_grad_enabled():
            eye.note_inputs(name_arguments(arguments, named, own_frames(sys._getframe(1))))
        calls.append(module)
        try:
            return call(module, *arguments, **named)
        finally:
            calls.clear()

    torch.nn.Module.__call__ = call_noted  # type: ignore[method-assign]


def _forget_pass(iterator: Any, loader: Any) -> None:
    iterator._holdfast_loader = id(loader)
    iterator._holdfast_indices, iterator._holdfast_at = deque(), 0
