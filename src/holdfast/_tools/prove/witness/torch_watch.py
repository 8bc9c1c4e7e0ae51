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
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, Dataset, Sampler, dataloader

from holdfast._run.witness.observer import Observer, leaf_of, whole_leaf
from holdfast._tools.prove.witness.bootstrap import record_fresh_generators
from holdfast._tools.prove.witness.recorder import (
    MOST_VALUES,
    Items,
    ScriptRecorder,
    StateReader,
    generator_state,
    intercept,
    is_numpy_leaf,
    is_own_class,
    name_arguments,
    own_frames,
    path_of,
)
from holdfast.torch.adapter import ADAPTER


def watch(observer: Observer) -> None:
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
        if self not in instances:
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

    torch.nn.Module.__call__ = call_recorded  # type: ignore[method-assign]  # wrapped


class TorchStateReader(StateReader):
    def __init__(self, observer: Observer) -> None:
        super().__init__(observer, _is_leaf, _is_closed)
        self.schedulers: list[Any] = []
        self.scalers: list[Any] = []
        self.optimizers: list[Optimizer] = []
        self._stepped: list[Optimizer] = []

    def read(
        self, optimizer: Optimizer, frames: list[FrameType], *, has_gradients: bool
    ) -> dict[str, Any]:
        for known in (self.optimizers, self._stepped):
            if optimizer not in known:  # of the first: made before the watch began
                known.append(optimizer)
        counters = self.find(frames)
        number = self.optimizers.index(optimizer)
        for path, value in self._found.items():
            if isinstance(value, torch.nn.Module):
                counters |= _numbers_of(path, value)
        items = self._around([optimizer]) | _items_of(optimizer, number)
        if has_gradients:
            # Without those of zeros, which zero_grad(set_to_none=False) leaves.
            gradients = [
                (index, parameter.grad)
                for index, parameter in enumerate(_parameters(optimizer))
                if parameter.grad is not None and bool(ADAPTER.part_here(parameter.grad).any())
            ]
            items[f"gradient/{number}"] = whole_leaf(gradients)
        names = self.changed_names(self._names())
        return {"optimizer": number, "items": items, "counters": counters, "names": names}

    def read_last(self) -> dict[str, Any]:
        """The state when the script is over, of all that it has trained."""
        if self._frames:
            self.find(self._frames)
        items = self._around(self._stepped)
        for number, optimizer in enumerate(self.optimizers):
            if optimizer in self._stepped:
                items |= _items_of(optimizer, number)
        parameters = [p for optimizer in self._stepped for p in _parameters(optimizer)]
        if parameters:
            self.dump(
                sum(p.numel() for p in parameters),
                lambda: [ADAPTER.part_here(p).detach().double().cpu().numpy() for p in parameters],
            )
        return {"items": items}

    def _around(self, optimizers: list[Optimizer]) -> Items:
        """All but the optimizers: schedulers, scalers, generators, other modules and tensors."""
        items: Items = {}
        for optimizer in optimizers:
            items |= self._schedules_of(optimizer)
        for number, scaler in enumerate(self.scalers):
            for key, value in scaler.state_dict().items():
                items[f"scaler/{number}/{key}"] = leaf_of(value)
        items |= self.global_generators()
        trained = {id(p) for optimizer in optimizers for p in _parameters(optimizer)}
        for path, value in self._found.items():
            if isinstance(value, torch.nn.Module):
                for kind, name, tensor in _tensors_of(value):
                    if id(tensor) not in trained:
                        items.setdefault(f"{kind}/{path}.{name}", leaf_of(tensor))
            elif isinstance(value, torch.Generator):
                items[f"generator/{path}"] = leaf_of(value.get_state())
            elif (state := generator_state(value)) is not None:
                items[f"generator/{path}"] = state
            elif id(value) not in trained:
                is_tensor = isinstance(value, torch.Tensor)
                is_real = value.is_floating_point() if is_tensor else value.dtype.kind == "f"
                items[f"{'value' if is_real else 'index'}/{path}"] = leaf_of(value)
        return items

    def _schedules_of(self, optimizer: Optimizer) -> Items:
        """Its schedulers, by its number: a restart may not make those of an earlier stage."""
        number = self.optimizers.index(optimizer)
        own = [s for s in self.schedulers if getattr(s, "optimizer", None) is optimizer]
        return {
            f"scheduler/{number}/{index}/{key}": leaf_of(value)
            for index, scheduler in enumerate(own)
            for key, value in vars(scheduler).items()
            if not key.startswith("_") and _is_plain(value)
        }

    def _names(self) -> dict[str, str]:
        called: dict[int, str] = {}
        for path, value in self._found.items():
            if isinstance(value, torch.nn.Module):
                for name, tensor in value.named_parameters(remove_duplicate=False):
                    called.setdefault(id(tensor), f"{path.split('.')[-1]}.{name}")
        return {
            f"{number}/{index}": called[id(parameter)]
            for number, optimizer in enumerate(self.optimizers)
            for index, parameter in enumerate(_parameters(optimizer))
            if id(parameter) in called
        }


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _items_of(optimizer: Optimizer, number: int) -> Items:
    items: Items = {}
    index = 0
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                items[f"setting/{number}/{place}/{key}"] = leaf_of(value)
        for parameter in group["params"]:
            items[f"weight/{number}/{index}"] = leaf_of(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                items[f"moment/{number}/{index}/{key}"] = leaf_of(value)
            index += 1
    return items


def _tensors_of(module: torch.nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    found: list[tuple[str, str, torch.Tensor]]
    found = [("module", name, p) for name, p in module.named_parameters()]
    found += [("buffer", name, b) for name, b in module.named_buffers()]
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor):  # not in a state_dict
                found.append(("value", f"{prefix}.{key}" if prefix else key, value))
    return found


def _numbers_of(path: str, module: torch.nn.Module) -> dict[str, int | float]:
    """The plain numbers that modules of the script's own classes hold: no state_dict has them."""
    return {
        f"{path}.{prefix}.{key}" if prefix else f"{path}.{key}": value
        for prefix, part in module.named_modules()
        if is_own_class(part.__class__)
        for key, value in vars(part).items()
        if isinstance(value, int | float) and type(value) is not bool
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int | float) for item in value)
    return isinstance(value, int | float)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return (
            value.layout is torch.strided
            and not value.is_meta
            and value.dtype is not torch.bool
            and value.grad_fn is None  # else it is a result of this step
            and 0 < value.numel() <= MOST_VALUES
        )
    return isinstance(value, torch.nn.Module | torch.Generator) or is_numpy_leaf(value)


_CLOSED = (
    *(torch.nn.Module, torch.Tensor, Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(torch.amp.GradScaler, DataLoader, Dataset, Sampler, dataloader._BaseDataLoaderIter),
)


def _is_closed(value: Any) -> bool:
    return isinstance(value, _CLOSED)
