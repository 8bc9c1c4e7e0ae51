"""What fills a device when its memory has run out, by the names that the user knows.

The exception's frames still exist, and with them every tensor that they hold. What only graphs of
autograd hold has no Python object: it is the rest.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_SAID = {
    "tried": rf"Tried to allocate {_SIZE}",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "cached_free": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_DEVICE = re.compile(r"GPU (\d+)\b")
_MOST_SHOWN = 12
_MOST_ASKED = 3  # each one scans all objects
_OF_GRAPHS = "held by graphs of autograd"
_AT_ONCE = 4096  # objects between two checks of the clock


def describe(
    error: BaseException,
    views: list[View],
    of_user: list[View],
    state: Mapping[str, Any],
    counts: tuple[int, ...],
    until: float,
) -> dict[str, Any]:
    """The device's memory if it is in use, and graphs of autograd that the script keeps."""
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a failure must not hide the rest
        found["graphs"] = find_kept_graphs(of_user, counts, until)
    with contextlib.suppress(Exception):  # as above
        found["gpu"] = _of_device(error, views, state, until)
    return found


def said_sizes(message: str) -> dict[str, int]:
    """The sizes in torch's message that its memory has run out."""
    found = {}
    for name, pattern in _SAID.items():
        if (match := re.search(pattern, message)) is not None:
            found[name] = int(float(match[1]) * _UNITS[match[2]])
    if {"allocated", "cached_free"} <= found.keys():
        found["reserved"] = found["allocated"] + found["cached_free"]
    return found


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA out of memory" in str(error)


def _of_device(
    error: BaseException,
    views: list[View],
    state: Mapping[str, Any],
    until: float,
) -> dict[str, Any] | None:
    said = _DEVICE.search(str(error))
    if not torch.cuda.is_initialized():
        # A message from a worker or another library still has the sizes.
        sizes = said_sizes(str(error)) if is_out_of_memory(error) else {}
        return {"device": int(said[1]) if said else None, **sizes} if sizes else None
    index = int(said[1]) if said else torch.cuda.current_device()
    found: dict[str, Any] = {"device": index}
    with contextlib.suppress(Exception):  # after an error of the device any may fail
        found["model"] = torch.cuda.get_device_name(index)
    with contextlib.suppress(Exception):  # it fails after an error of the device
        found["free"], found["total"] = torch.cuda.mem_get_info(index)
    with contextlib.suppress(Exception):  # as above
        found.update(_figures(torch.cuda.memory_stats(index)))
    allocated_now = int(found.get("allocated", 0))
    if is_out_of_memory(error):
        # The sizes at that moment: some memory has been freed since.
        found.update(said_sizes(str(error)))
        with contextlib.suppress(Exception):  # as above
            largest, seen = largest_tensors(torch.device("cuda", index), views, state, until)
            found.update(largest=largest, unseen=max(0, allocated_now - seen))
    return found


def _figures(stats: Mapping[str, int]) -> dict[str, int]:
    allocated = stats.get("allocated_bytes.all.current", 0)
    reserved = stats.get("reserved_bytes.all.current", 0)
    return {
        "allocated": allocated,
        "reserved": reserved,
        "cached_free": reserved - allocated,
        "peak": stats.get("allocated_bytes.all.peak", 0),
        # In blocks that are partly in use: not available to larger requests.
        "split": stats.get("inactive_split_bytes.all.current", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }


def largest_tensors(
    device: torch.device,
    views: list[View],
    state: Mapping[str, Any],
    until: float,
) -> tuple[list[dict[str, Any]], int]:
    """What holds most of a device's memory, the largest first, and the total found."""
    names, tensors = _storage_names(device, views, state)
    groups: dict[Any, dict[str, Any]] = {}
    storages: set[int] = set()
    seen = 0
    tensors += _live_tensors(until)
    for tensor in tensors:
        with contextlib.suppress(Exception):  # some kinds of tensors have no storage
            if tensor.device != device:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in storages:
                continue
            storages.add(storage._cdata)
            size_bytes = storage.nbytes()
            seen += size_bytes
            group, name = names.get(storage._cdata, (None, None))
            shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            entry = groups.setdefault(
                group or (tuple(shape), dtype),
                {"bytes": 0, "shape": shape, "dtype": dtype, "name": name, "count": 0, "most": 0},
            )
            entry["bytes"] += size_bytes
            entry["count"] += 1
            entry["group"] = group
            if size_bytes > entry["most"]:
                entry.update(most=size_bytes, shape=shape, dtype=dtype, name=name, one=tensor)
    ordered = sorted(groups.values(), key=lambda entry: -int(entry["bytes"]))[:_MOST_SHOWN]
    for entry in [each for each in ordered if each["group"] is None][:_MOST_ASKED]:
        if time.monotonic() < until and _is_held_by_graph(entry["one"], (tensors, entry)):
            entry["name"] = _OF_GRAPHS
    shown = []
    for entry in ordered:
        name, group = entry["name"], entry["group"]
        if group is not None and entry["count"] > 1:
            name = group if name is None else f"{group}, the largest {name}"
        known = {key: entry[key] for key in ("bytes", "shape", "dtype", "count")}
        shown.append({**known, "name": name})
    return shown, seen


def _is_held_by_graph(tensor: torch.Tensor, ours: tuple[object, ...]) -> bool:
    """Whether no Python object refers to a tensor: then a graph of autograd holds it."""
    referrers = gc.get_referrers(tensor)
    return all(isinstance(each, FrameType) or any(each is o for o in ours) for each in referrers)


def _live_tensors(until: float) -> list[torch.Tensor]:
    """Every tensor that Python knows, as far as the time allows."""
    found, objects = [], gc.get_objects()
    # Not isinstance, which calls the object.
    kinds = {kind for kind in set(map(type, objects)) if torch.Tensor in kind.__mro__}
    for number, each in enumerate(objects):
        if type(each) in kinds:
            found.append(each)
        if number % _AT_ONCE == 0 and time.monotonic() > until:
            break
    return found


# -- Names for memory: whose parameter, gradient or moment, or which variable ---------------


_MOST_NAMED = 10_000
View = tuple[CodeType, int, dict[str, Any], dict[str, Any]]  # see _run/exit/leaving.py
Named = tuple[str, str | None, Any]  # its group, its own name, the tensor


def _storage_names(
    device: torch.device, views: list[View], state: Mapping[str, Any]
) -> tuple[dict[int, tuple[str, str | None]], list[torch.Tensor]]:
    """The group and the name of each known storage of a device, and the tensors with one.

    Names in the run's state come first, then variables on the way to the exception, the innermost
    first.
    """
    named = [_of_value(name, value, "") for name, value in state.items()]
    for code, line, variables, _ in reversed(views):
        place = f" ({Path(code.co_filename).name}:{line} in {code.co_name})"
        named += [_of_value(name, value, place) for name, value in variables.items()]
    names: dict[int, tuple[str, str | None]] = {}
    tensors = []
    for each in named:
        with contextlib.suppress(Exception):  # objects of any kind are inspected
            for group, name, tensor in each:
                with contextlib.suppress(Exception):  # continue with the others
                    if tensor.device == device:
                        names.setdefault(tensor.untyped_storage()._cdata, (group, name))
                        tensors.append(tensor)
    return names, tensors


def _of_value(name: str, value: Any, place: str) -> Iterator[Named]:
    if isinstance(value, torch.Tensor):
        yield f"{name}{place}", f"{name}{place}", value
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad{place}", f"{name}.grad{place}", value.grad
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(name, value)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _of_optimizer(name, value)
    elif isinstance(value, dict | list | tuple | set | deque):
        items = value.values() if isinstance(value, dict) else value
        for item, _ in zip(list(items), range(_MOST_NAMED), strict=False):
            if isinstance(item, torch.Tensor):
                yield f"{name}[…]{place}", None, item


def _of_module(name: str, module: torch.nn.Module) -> Iterator[Named]:
    for path, parameter in module.named_parameters():
        yield f"parameters of {name}", f"{name}.{path}", parameter
        if parameter.grad is not None:
            yield f"gradients of {name}", f"{name}.{path}.grad", parameter.grad
    for path, buffer in module.named_buffers():
        yield f"buffers of {name}", f"{name}.{path}", buffer


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[Named]:
    for moments in list(optimizer.state.values()):
        for key, value in list(moments.items()) if isinstance(moments, dict) else ():
            if isinstance(value, torch.Tensor):
                yield f"{name} {key}", None, value
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # If the module is not known, the optimizer's parameters are.
            yield f"parameters of {name}", None, parameter
            if parameter.grad is not None:
                yield f"gradients of {name}", None, parameter.grad


# -- Graphs of autograd that a script keeps: a list of losses, a sum that was never detached -----
# Each keeps what its backward pass would need: the activations of a whole step.


_FEW = 8  # graphs that one step may keep
_LONG_SUM = 1000  # more additions than one step makes
_MOST_ITEMS = 100_000
_MOST_ATTRIBUTES = 1000
_MOST_HOLDERS = 8
_MOST_NODES = 50_000
_CONTAINERS = (list, tuple, set, deque, dict)
_OURS = "holdfast."


def find_kept_graphs(
    views: list[View], counts: tuple[int, ...], until: float
) -> list[dict[str, Any]]:
    """The variables of the user's frames that keep many graphs, most first.

    `counts` are numbers of steps: a sum over all steps has as many terms.
    """
    found: dict[int, dict[str, Any]] = {}
    looked_at: set[int] = set()
    for code, line, variables, others in reversed(views):
        # The variables of a module are its globals.
        globals_ = {} if code.co_name == "<module>" else dict(others)
        public = {name: value for name, value in globals_.items() if not name.startswith("__")}
        all_of = [(*item, False) for item in variables.items()]
        all_of += [(*item, True) for item in public.items()]
        for name, value, is_global in all_of:
            if time.monotonic() > until:
                break
            if id(value) in looked_at:
                continue
            looked_at.add(id(value))
            for holder, held in _one_level(name, value):
                count = _count_graphs(held, counts)
                if count and id(held) not in found:
                    where = _place(holder, code, line, is_global)
                    known = {"holder": holder, "where": where, "count": count}
                    found[id(held)] = {**known, "freed": _is_freed(held)}
    return sorted(found.values(), key=lambda each: -int(each["count"]))[:_MOST_HOLDERS]


def _one_level(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A container or a tensor itself; of another object those in its attributes."""
    if isinstance(value, (*_CONTAINERS, torch.Tensor)):
        yield name, value
        return
    kind = type(value)
    if isinstance(value, type | ModuleType | FunctionType) or kind.__module__.startswith(_OURS):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and len(attributes) <= _MOST_ATTRIBUTES:
        for attribute, held in list(attributes.items()):
            if isinstance(held, (*_CONTAINERS, torch.Tensor)):
                yield f"{name}.{attribute}", held


def _count_graphs(held: Any, counts: tuple[int, ...]) -> int:
    """How many graphs are kept, if one step does not need that many; else 0."""
    with contextlib.suppress(Exception):  # a container may change meanwhile
        if isinstance(held, torch.Tensor):
            if held.dim() or held.grad_fn is None:
                return 0
            terms = _terms(held.grad_fn)
            is_one_a_step = terms > _FEW and any(abs(terms - count) <= 1 for count in counts)
            return terms if terms > _LONG_SUM or is_one_a_step else 0
        count = sum(1 for tensor in _tensors_in(held) if tensor.grad_fn is not None)
        return count if count > _FEW else 0
    return 0


def _tensors_in(held: Any) -> Iterator[torch.Tensor]:
    items = held.values() if isinstance(held, dict) else held
    for item, _ in zip(list(items), range(_MOST_ITEMS), strict=False):
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict | list | tuple):
            inner = item.values() if isinstance(item, dict) else item
            for each, _ in zip(list(inner), range(_MOST_ITEMS), strict=False):
                if isinstance(each, torch.Tensor):
                    yield each


def _terms(node: Any) -> int:
    """The number of terms of the sum that ends in a node, as `total += loss` makes it."""
    terms, seen = 0, 0
    level = {node} if _adds(node) else set()
    while level and seen < _MOST_NODES:
        terms += 1
        seen += len(level)
        level = {n for each in level for n, _ in each.next_functions if _adds(n)}
    return terms


def _adds(node: Any) -> bool:
    return node is not None and str(node.name()).startswith("AddBackward")


def _is_freed(held: Any) -> bool | None:
    """Whether a backward pass has freed what the graphs held; None if unknown."""
    with contextlib.suppress(Exception):  # private to torch, which may change it
        tensors = [held] if isinstance(held, torch.Tensor) else _tensors_in(held)
        first = next(tensor for tensor in tensors if tensor.grad_fn is not None)
        nodes, seen = deque([first.grad_fn]), 0
        while nodes and seen < _LONG_SUM:
            node: Any = nodes.popleft()
            seen += 1
            for name in dir(node):
                if name.startswith("_saved_"):
                    try:
                        if isinstance(getattr(node, name), torch.Tensor):
                            return False
                    except RuntimeError:
                        return True
            nodes.extend(following for following, _ in node.next_functions if following is not None)
    return None


def _place(holder: str, code: CodeType, line: int, is_global: bool) -> str:
    """The line that fills the holder, if the source shows it; else the function's current line."""
    name = Path(code.co_filename).name
    own = {number for _, _, number in code.co_lines() if number is not None}
    last = re.escape(holder.rpartition(".")[2])
    grows = re.compile(
        rf"\b{last}\s*(\.(append|appendleft|extend|insert|add|update|setdefault)\(|\+=|\[.*\]\s*=[^=])"
        rf"|\b{last}\s*=\s*.*\b{last}\s*\+"
    )
    lines = linecache.getlines(code.co_filename)
    matches = [number for number, text in enumerate(lines, 1) if grows.search(text)]
    inside = [number for number in matches if number in own]
    if inside:
        return f"{name}:{inside[0]} in {code.co_name}"
    if matches and ("." in holder or is_global):
        return f"{name}:{matches[0]}"
    return name if is_global else f"{name}:{line} in {code.co_name}"
