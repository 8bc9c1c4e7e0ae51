"""The states of an export: every tensor under its plain name, or all as plain containers.

A tensor that the state has under two names is stored once; here it has both names. Sharded
tensors are put together for readers outside of the run.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import HoldfastError, StateMismatch, install_command
from holdfast._state.restore import Assembler, kind_of
from holdfast._store.format.image import TensorSpec
from holdfast._store.format.tree import Pairs, TreeVisitor, tensor_leaves
from holdfast._store.read.verify import Loaded

_MOST_BITS = 2032  # what torch.load(…, weights_only=True) can read
_NOT_FOR_TORCH = (
    ", which torch does not load.\nExport to a .safetensors file, which has it as JSON."
)


@dataclass(frozen=True)
class ExportRequest:
    out: Path
    step: int | None = None
    only: tuple[str, ...] = ()
    strip: bool = False
    force: bool = False
    to: str | None = None  # the format; else the ending of `out` says it
    config: Path | None = None  # of the model, for a Hugging Face folder


@dataclass(frozen=True)
class Selected:
    """The states to be written, with every checksum verified and every tensor whole."""

    loaded: Loaded
    names: list[str]

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.loaded.head["tree"]["state"]
        return {name: found[name] for name in self.names}


class NamedTensors(TreeVisitor):
    """Puts names in the place of the tensors' numbers; `names` has the number of each."""

    def __init__(self, specs: Sequence[TensorSpec], prefix: str = "") -> None:
        self._specs = specs
        self._prefix = prefix  # dropped from every name
        self.names: dict[str, int] = {}

    def tensor(self, number: int, path: str) -> dict[str, str]:
        stored = self._specs[number].name
        # Two paths can read alike (`a.b` as a key, and `b` in `a`); the stored names differ.
        # Another path to this tensor gets a name of its own.
        is_own = stored == path or stored.startswith(f"{path}~")
        wanted = (stored if is_own else path).removeprefix(self._prefix)
        name, count = wanted, 1
        while name == "__metadata__" or self.names.get(name, number) != number:
            count += 1
            name = f"{wanted}~{count}"
        self.names[name] = number
        return {"$t": name}


def to_plain(encoded: Any, tensor: Callable[[int], Any]) -> Any:
    """The tree as dicts, lists, tuples, sets and values that torch loads without running code."""
    return _TorchValues(tensor).visit(encoded, "")


class _TorchValues(TreeVisitor):
    def __init__(self, read: Callable[[int], Any]) -> None:
        self._read = read

    def tensor(self, number: int, _: str) -> Any:
        return self._read(number)

    def mapping(self, encoded: dict[str, Any], pairs: Pairs) -> Any:
        decoded = [(_hashable(self.visit(key, "")), item) for key, item in pairs]
        if "$dict" in encoded:
            return dict(decoded)
        ordered = OrderedDict(decoded)
        if "$metadata" in encoded:  # the versions of a module's state
            metadata = self.visit(encoded["$metadata"], "")
            ordered._metadata = metadata  # type: ignore[attr-defined]  # torch's own
        return ordered

    def container(self, tag: str, inner: Any) -> Any:
        if tag == "$tuple":
            return tuple(inner)
        if tag in ("$set", "$frozenset"):  # torch loads no frozenset
            return {_hashable(item) for item in inner}
        return inner

    def scalar(self, tag: str, inner: Any) -> Any:
        if tag == "$float":
            return float(inner)
        if tag == "$int":
            value = int(inner, 16)
            if value.bit_length() > _MOST_BITS:
                bits = value.bit_length()
                raise HoldfastError(f"the state has a number of {bits} bits{_NOT_FOR_TORCH}")
            return value
        if tag in ("$bytes", "$bytearray"):
            return {"$bytes": bytes, "$bytearray": bytearray}[tag](base64.b64decode(inner))
        if tag == "$complex":
            return complex(float(inner[0]), float(inner[1]))
        if tag.startswith("$torch."):
            return adapter_of("torch").decode_other(tag, inner)
        raise StateMismatch(
            f"the checkpoint holds a value of kind {tag}, which this holdfast lacks.\n"
            "Use the version of holdfast that wrote it."
        )


def _hashable(found: Any) -> Any:
    try:
        hash(found)
    except TypeError as error:
        what = "the state has a frozenset as a key or in a set"
        raise HoldfastError(f"{what}{_NOT_FOR_TORCH}") from error
    return found


# -- sharded tensors --------------------------------------------------------------


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
    whole = {name: joiner.visit(states[name], name) for name in names}
    tree = {**loaded.head["tree"], "state": {**states, **whole}}
    return replace(
        loaded,
        plan=replace(loaded.plan, specs=(*loaded.plan.specs, *joiner.specs)),
        head={**loaded.head, "tree": tree},
        tensors=(*loaded.tensors, *joiner.views),
    )


class _Joiner(TreeVisitor):
    """Makes whole tensors, with numbers after those of the stored ones."""

    def __init__(self, loaded: Loaded) -> None:
        self._assembler = Assembler(loaded)
        self._first = len(loaded.plan.specs)
        self._known: dict[int, int] = {}  # the number of a whole tensor, by that of rank 0's part
        self.specs: list[TensorSpec] = []
        self.views: list[memoryview] = []

    def shard(self, shard: dict[str, Any], path: str) -> dict[str, int]:
        part = shard["t"]
        if part in self._known:  # tied weights stay one tensor
            return {"$t": self._known[part]}
        number = self._first + len(self.specs)
        if kind_of(shard) == "torch":
            adapter = adapter_of("torch")
            value = self._assembler.value({"$shard": shard}, None, path)
            spec, view = adapter.spec(path, value), adapter.bytes_of(value)
        else:
            spec, view = self._assembler.whole_bytes(shard, path)
        self.specs.append(spec)
        self.views.append(view)
        if part is not None:
            self._known[part] = number
        return {"$t": number}
