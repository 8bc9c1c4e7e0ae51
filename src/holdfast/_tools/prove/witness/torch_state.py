"""All that decides an optimizer's update, as fingerprints by name."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast._run.witness.eye import Eye
from holdfast._run.witness.leaves import Leaf, leaf_of, whole_leaf
from holdfast._state.capture import capture_generators
from holdfast._tools.prove.witness.arrive import FRESH
from holdfast._tools.prove.witness.variables import Finder, is_own_class
from holdfast.torch.adapter import ADAPTER

_MOST_VALUES = 4 << 20  # elements: whatever is larger is data
_MOST_DUMPED = 1 << 28
UNTOUCHED: Leaf = ("untouched", None, 1)
Items = dict[str, Leaf]


class Sights:
    """Takes them, and keeps hold of what it saw until the script is over."""

    def __init__(self, eye: Eye) -> None:
        self._eye = eye
        self.schedulers: list[Any] = []
        self.scalers: list[Any] = []
        self.optimizers: list[Optimizer] = []
        self._finder = Finder(_is_leaf, _is_closed)
        self._stepped: list[Optimizer] = []
        self._found: dict[str, Any] = {}
        self._frames: list[FrameType] = []  # a frame keeps its variables when its function is over
        self._named: dict[str, str] = {}

    def take(
        self, optimizer: Optimizer, frames: list[FrameType], *, has_gradients: bool
    ) -> dict[str, Any]:
        """The state before this optimizer's update."""
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)  # made before it was watched
        if not any(known is optimizer for known in self._stepped):
            self._stepped.append(optimizer)
        self._frames = frames
        self._found, counters = self._finder.find(frames)
        number = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
        for path, value in self._found.items():
            if isinstance(value, torch.nn.Module):
                counters |= _numbers_of(path, value)
        items = self._around([optimizer]) | _items_of(optimizer, number)
        if has_gradients:
            items[f"gradient/{number}"] = whole_leaf(_gradients(optimizer))
        names = self._names()
        fresh, self._named = {k: v for k, v in names.items() if self._named.get(k) != v}, names
        return {"optimizer": number, "items": items, "counters": counters, "names": fresh}

    def take_last(self) -> dict[str, Any]:
        """The state when the script is over, of all that it has trained."""
        if self._frames:
            self._found, _ = self._finder.find(self._frames)
        items = self._around(self._stepped)
        for number, optimizer in enumerate(self.optimizers):
            if any(known is optimizer for known in self._stepped):
                items |= _items_of(optimizer, number)
        self._dump()
        return {"items": items}

    def _around(self, optimizers: list[Optimizer]) -> Items:
        """All but the optimizers: schedulers, scalers, generators, other modules and tensors."""
        items: Items = {}
        for optimizer in optimizers:
            items |= self._schedules_of(optimizer)
        for number, scaler in enumerate(self.scalers):
            for key, value in scaler.state_dict().items():
                items[f"scaler/{number}/{key}"] = leaf_of(value)
        for name, state in capture_generators().items():
            leaf = whole_leaf(state)
            items[f"generator/{name}"] = UNTOUCHED if leaf[0] == FRESH.get(name) else leaf
        trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        for path, value in self._found.items():
            if isinstance(value, torch.nn.Module):
                for kind, name, tensor in _tensors_of(value):
                    if id(tensor) not in trained:
                        items.setdefault(f"{kind}/{path}.{name}", leaf_of(tensor))
            elif isinstance(value, torch.Tensor):
                if id(value) not in trained:
                    kind = "value" if value.is_floating_point() else "index"
                    items[f"{kind}/{path}"] = leaf_of(value)
            elif isinstance(value, torch.Generator):
                items[f"generator/{path}"] = leaf_of(value.get_state())
            elif isinstance(value, random.Random):
                items[f"generator/{path}"] = whole_leaf(value.getstate())
            elif hasattr(value, "bit_generator"):
                items[f"generator/{path}"] = whole_leaf(value.bit_generator.state)
            else:
                items[f"{'value' if value.dtype.kind == 'f' else 'index'}/{path}"] = leaf_of(value)
        return items

    def _schedules_of(self, optimizer: Optimizer) -> Items:
        """Its schedulers, by its number: a life may never make those of an earlier stage."""
        number = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
        own = [s for s in self.schedulers if getattr(s, "optimizer", None) is optimizer]
        return {
            f"scheduler/{number}/{index}/{key}": leaf_of(value)
            for index, scheduler in enumerate(own)
            for key, value in vars(scheduler).items()
            if not key.startswith("_") and _is_plain(value)
        }

    def _names(self) -> dict[str, str]:
        """What the trained parameters are called in the script."""
        called: dict[int, str] = {}
        for path, value in self._found.items():
            if isinstance(value, torch.nn.Module):
                for name, tensor in value.named_parameters(remove_duplicate=False):
                    called.setdefault(id(tensor), f"{path.split('.')[-1]}.{name}")
        names = {}
        for number, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(parameters):
                if id(parameter) in called:
                    names[f"{number}/{index}"] = called[id(parameter)]
        return names

    def _dump(self) -> None:
        """The weights themselves, so that it can be said how far apart two ends are."""
        import numpy as np

        groups = [group for optimizer in self._stepped for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        if not parameters or sum(p.numel() for p in parameters) > _MOST_DUMPED:
            return
        folder = Path(self._eye.errand.end)
        flat = [ADAPTER.part_here(p).detach().double().cpu().numpy().ravel() for p in parameters]
        np.concatenate(flat).tofile(folder / f"{self._eye.rank}.float64")


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
            if isinstance(value, torch.Tensor):  # neither parameter nor buffer: nobody saves it
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


def _gradients(optimizer: Optimizer) -> list[Any]:
    """All that are there; one of zeros is none, as after zero_grad(set_to_none=False)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        (index, parameter.grad)
        for index, parameter in enumerate(parameters)
        if parameter.grad is not None and bool(ADAPTER.part_here(parameter.grad).any())
    ]


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
            and 0 < value.numel() <= _MOST_VALUES
        )
    if isinstance(value, torch.nn.Module | torch.Generator):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return isinstance(value, numpy.random.Generator)
    return (
        isinstance(value, numpy.ndarray)
        and value.dtype.kind in "fiu"
        and value.size <= _MOST_VALUES
    )


def _is_closed(value: Any) -> bool:
    """Whether what is inside is not looked at: data, and what is told in another way."""
    return isinstance(
        value,
        torch.nn.Module
        | torch.Tensor
        | Optimizer
        | DataLoader
        | Dataset
        | Sampler
        | _BaseDataLoaderIter
        | torch.optim.lr_scheduler.LRScheduler
        | torch.amp.GradScaler,
    )
