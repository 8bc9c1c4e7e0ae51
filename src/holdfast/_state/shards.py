"""Sharded tensors are restored: from stored parts to what the live objects hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast._adapters.adapter import Adapter, StoredArray
from holdfast._adapters.registry import adapter_of, adapters
from holdfast._state.capture import Captured
from holdfast._store.format.checksum import digest, digest_all
from holdfast._store.format.image import STORED_AS, TensorSpec
from holdfast._store.format.tree import tensor_leaves
from holdfast._store.read.verify import Loaded


@dataclass(frozen=True)
class _RankPart:
    description: dict[str, Any]
    spec: TensorSpec
    data: memoryview


@dataclass(frozen=True)
class _Expected:
    """What this rank must hold of a tensor once it is loaded."""

    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def kind_of(description: dict[str, Any]) -> str:
    """The framework of a sharded tensor; those of torch do not name it."""
    return str(description.get("kind", "torch"))


class Assembler:
    """Makes the tensor to be loaded if the stored one, or the live one, is sharded."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._expected: dict[str, _Expected] = {}
        self.numbers: set[int] = set()  # of the stored tensors that went into a sharded one

    def value(self, encoded: Any, near: object, path: str) -> Any:
        """The tensor to be loaded where `near` is now; None if nothing here is sharded."""
        tag = next(iter(encoded), "")
        if tag == "$shard":
            return self._assemble(*self._in_parts(encoded[tag], path), near, path)
        if tag != "$t":
            return None
        spec = self._loaded.plan.specs[encoded[tag]]
        if spec.kind == "jax":
            placed = adapter_of("jax").made_like(spec, self._loaded.data(encoded[tag]), near)
            if placed is not None:
                return placed
        if not _may_be_sharded(near):
            return None
        found = self._assemble(*self._whole(encoded[tag]), near, path)
        if found is not None:
            self.numbers.add(encoded[tag])
        return found

    def load_in_place(self, live: object, value: Any) -> bool:
        """Copy what was made for `live` into it, if possible."""
        adapter = next(each for each in adapters() if each.is_array(value))
        return adapter.sharding().load_in_place(live, value)

    def _in_parts(self, description: dict[str, Any], path: str) -> tuple[Adapter, StoredArray]:
        number = description["t"]
        own = None if number is None else self._own(description, number)
        adapter = adapter_of(kind_of(description))
        return adapter, StoredArray(
            description, own, lambda: self._loaded.shards(path), is_whole=False
        )

    def _whole(self, number: int) -> tuple[Adapter, StoredArray]:
        spec = self._loaded.plan.specs[number]
        shape, corner = list(spec.shape), [0] * len(spec.shape)
        place: dict[str, Any] = {"size": shape, "dtype": spec.dtype}
        if spec.kind == "jax":
            place |= {"boxes": [[corner, shape]], "item_bytes": spec.item_bytes}
            place["where"] = spec.device
        else:
            place |= {"offsets": corner, "sizes": shape}
        own = self._own(place, number)
        adapter = adapter_of("jax" if spec.kind == "jax" else "torch")
        return adapter, StoredArray(place, own, lambda: [own], is_whole=True)

    def _own(self, description: dict[str, Any], number: int) -> _RankPart:
        return _RankPart(description, self._loaded.plan.specs[number], self._loaded.data(number))

    def _assemble(self, adapter: Adapter, stored: StoredArray, near: object, path: str) -> Any:
        found = adapter.sharding().assemble(stored, near, path)
        if found is None:
            return None
        value, part = found
        # Now: the object that gets it may change it.
        known = digest(adapter.bytes_of(part))
        self._expected[path] = _Expected(stored.description["dtype"], tuple(part.shape), known)
        return value

    def whole_bytes(self, description: dict[str, Any], path: str) -> tuple[TensorSpec, memoryview]:
        """A whole array of JAX that is stored in parts, without JAX."""
        from holdfast._adapters import shared  # with NumPy, which is rarely needed here

        number = description["t"]
        own = None if number is None else self._own(description, number)
        parts = StoredArray(description, own, lambda: self._loaded.shards(path), is_whole=False)
        shape = shared.shape_of(parts)
        joined = shared.read_box(parts, shared.whole_box(shape), path)
        spec = TensorSpec(
            name=path,
            kind=kind_of(description),
            dtype=description["dtype"],
            stored_as=STORED_AS.get(description["dtype"], "U8"),
            shape=shape,
            strides=None,
            item_bytes=shared.item_bytes_of(parts),
            size_bytes=joined.nbytes,
        )
        return spec, shared.as_bytes(joined)

    def differing(self, captured: Captured) -> list[str]:
        """Assembled tensors that are lost, or whose type or values differ now."""
        now = {
            path: leaf.get("$t", leaf.get("$shard", {}).get("t"))
            for name, encoded in captured.tree["state"].items()
            for path, leaf in tensor_leaves(encoded, name)
        }
        found: list[str] = []
        views: list[memoryview] = []
        hashed: list[str] = []
        for path, then in self._expected.items():
            if path not in now:
                found.append(f"{path} (lost)")
                continue
            number = now[path]
            if number is None and 0 in then.shape:
                continue  # empty then and now
            spec = None if number is None else captured.specs[number]
            if spec is None or (spec.dtype, spec.shape) != (then.dtype, then.shape):
                found.append(f"{path} (stored as {then.dtype}, now of another type or sharding)")
                continue
            views.append(adapter_of(spec.kind).bytes_of(captured.values[number]))
            hashed.append(path)
        for path, actual in zip(hashed, digest_all(views), strict=True):
            if actual != self._expected[path].digest:
                found.append(f"{path} (other values)")
        return found


def _may_be_sharded(near: object) -> bool:
    """Whether a live tensor is sharded, or the parameter that an optimizer's entry is for."""
    candidates = (near, getattr(near, "parameter", None))
    return any(adapter.is_sharded(each) for adapter in adapters() for each in candidates)
