"""Graphs of autograd that somebody keeps: a list of losses, a sum that was never detached.

Each keeps what its backward pass would need: the activations of a whole step.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from holdfast.torch.names import View

_FEW = 8  # graphs that a single step may well keep
_LONG_SUM = 1000  # additions that no single step makes
_MOST_ITEMS = 100_000
_MOST_ATTRIBUTES = 1000
_MOST_SHOWN = 8
_MOST_NODES = 50_000
_CONTAINERS = (list, tuple, set, deque, dict)
_OURS = "holdfast."


def find_kept_graphs(
    views: list[View], counts: tuple[int, ...], until: float
) -> list[dict[str, Any]]:
    """The variables of the user's frames that keep many graphs, most first.

    `counts` are the steps that a sum over all of them would have as many terms as.
    """
    found: dict[int, dict[str, Any]] = {}
    looked_at: set[int] = set()
    for code, line, variables, others in reversed(views):
        for name, value, is_global in _all_of(code, variables, others):
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
    return sorted(found.values(), key=lambda each: -int(each["count"]))[:_MOST_SHOWN]


def _all_of(
    code: CodeType, variables: dict[str, Any], others: dict[str, Any]
) -> Iterator[tuple[str, Any, bool]]:
    for name, value in variables.items():
        yield name, value, False
    if code.co_name != "<module>":  # whose variables these are already
        for name, value in list(others.items()):
            if not name.startswith("__"):
                yield name, value, True


def _one_level(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A container or a tensor as it is; of another object those in its attributes."""
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
    """How many graphs are kept, if they are more than one step has use for; else 0."""
    with contextlib.suppress(Exception):  # a container may change while we look
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
    """The tensors of a container, and of the containers in it."""
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
    """How long the sum is whose end a node is: `total += loss` makes each term the last."""
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
    """Whether a backward pass has given back what the graphs held; None if it cannot be told."""
    with contextlib.suppress(Exception):  # a private part of torch, which may change
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
    """The line that fills the holder, if the source shows it; else where the function was."""
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
