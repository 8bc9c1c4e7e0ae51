"""What fills a device when its memory has run out, by the names that the user knows it by.

The exception's frames are still there, and with them every tensor that they hold. What only
the graphs of autograd hold has no Python object: it is what is left over.
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from holdfast.torch.graphs import find_kept_graphs
from holdfast.torch.names import StorageNames, View

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_SAID = {
    "tried": re.compile(rf"Tried to allocate {_SIZE}"),
    "total": re.compile(rf"total capacity of {_SIZE}|; {_SIZE} total capacity"),
    "free": re.compile(rf"of which {_SIZE} is free|; {_SIZE} free"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch|; {_SIZE} already allocated"),
    "cached_free": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{_SIZE} reserved in total by PyTorch"),
}
_DEVICE = re.compile(r"GPU (\d+)\b")
_MOST_SHOWN = 12
_MOST_ASKED = 3  # each question goes through every object that there is
_OF_GRAPHS = "held by graphs of autograd"
_AT_ONCE = 4096  # objects between two looks at the clock


def describe(
    error: BaseException,
    views: list[View],
    of_user: list[View],
    state: Mapping[str, Any],
    counts: tuple[int, ...],
    until: float,
) -> dict[str, Any]:
    """The device's memory if it is in use, and graphs of autograd that the user's code keeps."""
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # what fails here hides none of the rest
        found["graphs"] = find_kept_graphs(of_user, counts, until)
    with contextlib.suppress(Exception):  # as above
        found["gpu"] = _of_device(error, views, state, until)
    return found


def said_sizes(message: str) -> dict[str, int]:
    """The sizes in a message about memory that has run out, of any version of torch."""
    found = {}
    for name, pattern in _SAID.items():
        match = pattern.search(message)
        if match is not None:
            number, unit = (part for part in match.groups() if part is not None)
            found[name] = int(float(number) * _UNITS[unit])
    # Either is said, and the other follows.
    if {"allocated", "cached_free"} <= found.keys():
        found["reserved"] = found["allocated"] + found["cached_free"]
    elif {"allocated", "reserved"} <= found.keys():
        found["cached_free"] = found["reserved"] - found["allocated"]
    return found


def is_out_of_memory(error: BaseException) -> bool:
    kind = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError
    return isinstance(error, kind) or "CUDA out of memory" in str(error)


def _of_device(
    error: BaseException,
    views: list[View],
    state: Mapping[str, Any],
    until: float,
) -> dict[str, Any] | None:
    said = _DEVICE.search(str(error))
    if not torch.cuda.is_initialized():
        # A message that was handed on, by a worker or another library, still has its sizes.
        sizes = said_sizes(str(error)) if is_out_of_memory(error) else {}
        return {"device": int(said[1]) if said else None, **sizes} if sizes else None
    index = int(said[1]) if said else torch.cuda.current_device()
    found: dict[str, Any] = {"device": index}
    with contextlib.suppress(Exception):  # after an error of the device any may fail
        found["model"] = torch.cuda.get_device_name(index)
    with contextlib.suppress(Exception):  # it fails for ever after an error of the device
        found["free"], found["total"] = torch.cuda.mem_get_info(index)
    with contextlib.suppress(Exception):  # as above
        found.update(_figures(torch.cuda.memory_stats(index)))
    allocated_now = int(found.get("allocated", 0))
    if is_out_of_memory(error):
        # As it was in that moment: on the way here some of it has been given back.
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
        # In blocks that are partly in use: what larger requests cannot have.
        "split": stats.get("inactive_split_bytes.all.current", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }


def largest_tensors(
    device: torch.device,
    views: list[View],
    state: Mapping[str, Any],
    until: float,
) -> tuple[list[dict[str, Any]], int]:
    """What holds most of a device's memory, the largest first, and all that was seen."""
    names = StorageNames(device)
    names.learn_state(state)
    names.learn_frames(views)
    groups: dict[Any, dict[str, Any]] = {}
    storages: set[int] = set()
    seen = 0
    tensors = [*names.tensors, *_live_tensors(until)]
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
            group, name = names.of(storage._cdata)
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
        if time.monotonic() < until and _is_held_by_nobody(entry["one"], (tensors, entry)):
            entry["name"] = _OF_GRAPHS
    return [_shown(entry) for entry in ordered], seen


def _is_held_by_nobody(tensor: torch.Tensor, ours: tuple[object, ...]) -> bool:
    """Whether no Python object refers to a tensor: then a graph of autograd does."""
    referrers = gc.get_referrers(tensor)
    return all(isinstance(each, FrameType) or any(each is o for o in ours) for each in referrers)


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    name, group = entry["name"], entry["group"]
    if group is not None and entry["count"] > 1:
        name = group if name is None else f"{group}, the largest {name}"
    return {**{key: entry[key] for key in ("bytes", "shape", "dtype", "count")}, "name": name}


def _live_tensors(until: float) -> list[torch.Tensor]:
    """Every tensor that Python knows of, as far as the time goes."""
    kinds: dict[type, bool] = {}
    found = []
    objects = gc.get_objects()
    for number, each in enumerate(objects):
        kind = type(each)  # not isinstance, which asks the object itself
        is_tensor = kinds.get(kind)
        if is_tensor is None:
            is_tensor = kinds[kind] = issubclass(kind, torch.Tensor)
        if is_tensor:
            found.append(each)
        if number % _AT_ONCE == 0 and time.monotonic() > until:
            break
    return found
