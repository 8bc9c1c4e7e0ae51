"""Sharded tensors of a stored state, made whole for whoever reads it outside of its run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import HoldfastError, install_command
from holdfast._state.shards import Assembler, kind_of
from holdfast._store.format.image import TensorSpec
from holdfast._store.format.tree import tensor_leaves
from holdfast._store.read.verify import Loaded


def put_together(loaded: Loaded, names: Collection[str]) -> Loaded:
    """The same state, with whole tensors where the ranks have stored parts of them."""
    states = loaded.head["tree"]["state"]
    sharded = [
        (path, kind_of(leaf["$shard"]))
        for name in names
        for path, leaf in tensor_leaves(states[name], name)
        if "$shard" in leaf
    ]
    if not sharded:
        return loaded
    of_torch = [path for path, kind in sharded if kind == "torch"]
    try:
        if of_torch:
            adapter_of("torch")
    except ImportError as error:
        reason = error.__cause__ or error  # of the framework itself, in one line
        raise HoldfastError(
            f"{of_torch[0]} is sharded, and putting it together needs PyTorch, which cannot be "
            f"imported here ({reason}).\n"
            f"{install_command('torch')}, or export the states that are not: --only NAME."
        ) from error
    joiner = _Joiner(loaded)
    whole = {name: joiner.walk(states[name], name) for name in names}
    tree = {**loaded.head["tree"], "state": {**states, **whole}}
    return replace(
        loaded,
        plan=replace(loaded.plan, specs=(*loaded.plan.specs, *joiner.specs)),
        head={**loaded.head, "tree": tree},
        tensors=(*loaded.tensors, *joiner.views),
    )


class _Joiner:
    """Makes whole tensors, and numbers them behind those that are whole already."""

    def __init__(self, loaded: Loaded) -> None:
        self._assembler = Assembler(loaded)
        self._first = len(loaded.plan.specs)
        self._known: dict[int, int] = {}  # the number of a whole tensor, by that of rank 0's part
        self.specs: list[TensorSpec] = []
        self.views: list[memoryview] = []

    def walk(self, encoded: Any, path: str) -> Any:
        """The tree with a number for each sharded tensor; paths are as they were captured."""
        if isinstance(encoded, list):
            return [self.walk(item, f"{path}.{i}") for i, item in enumerate(encoded)]
        if not isinstance(encoded, dict):
            return encoded
        tag = next(iter(encoded), "")
        if tag == "$shard":
            return {"$t": self._whole(encoded, path)}
        if tag in ("$dict", "$odict"):
            pairs = [[key, self.walk(item, f"{path}.{_key(key)}")] for key, item in encoded[tag]]
            return {**encoded, tag: pairs}
        if tag in ("$state", "$generator", "$tuple", "$set", "$frozenset", "$node"):
            return {tag: self.walk(encoded[tag], path)}
        if tag.startswith("$"):
            return encoded
        return {key: self.walk(item, f"{path}.{key}") for key, item in encoded.items()}

    def _whole(self, encoded: dict[str, Any], path: str) -> int:
        part = encoded["$shard"]["t"]
        if part in self._known:  # tied weights stay one tensor
            return self._known[part]
        number = self._first + len(self.specs)
        if kind_of(encoded["$shard"]) == "torch":
            adapter = adapter_of("torch")
            value = self._assembler.value(encoded, None, path)
            spec, view = adapter.spec(path, value), adapter.bytes_of(value)
        else:
            spec, view = self._assembler.whole_bytes(encoded["$shard"], path)
        self.specs.append(spec)
        self.views.append(view)
        if part is not None:
            self._known[part] = number
        return number


def _key(encoded: Any) -> str:
    if isinstance(encoded, dict) and "$tuple" in encoded:
        return str(tuple(encoded["$tuple"]))
    return str(encoded)
