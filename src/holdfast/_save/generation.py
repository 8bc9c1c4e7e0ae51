"""An arena for one layout of the state, and the ways by which tensors get into its slots."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from holdfast._record.image import ImagePlan, TensorSpec
from holdfast._save.arena import Arena
from holdfast._save.backing import Backing
from holdfast._save.capture import Captured, adapter_of
from holdfast._save.flight import DeviceCopies, Flight
from holdfast._save.raw_copies import RawCopies


@dataclass(frozen=True)
class _Raw:
    """The copies into one slot of all tensors that are bytes at a known address."""

    addresses: list[int]
    copies: RawCopies
    left: dict[str, list[int]]  # by kind, the places of those that are not


class Generation:
    """An arena for one layout of the state, with the views that snapshots are copied into."""

    def __init__(self, arena: Arena, backing: Backing, plan: ImagePlan) -> None:
        self.arena = arena
        self.backing = backing
        self.plan = plan
        places: dict[str, list[int]] = {}
        on_device: dict[str, list[int]] = {}
        for index, spec in enumerate(plan.specs):
            copies = getattr(adapter_of(spec.kind), "copies_by_itself", lambda _: False)(spec)
            (on_device if copies else places).setdefault(spec.kind, []).append(index)
        self._indices = places
        self._targets = {
            (slot, kind): adapter_of(kind).destinations(
                arena.mapped,
                [(plan.specs[i], plan.offsets[i]) for i in indices],
                arena.slot_offset(slot),
            )
            for slot in range(arena.slots)
            for kind, indices in places.items()
        }
        self.specs_seen: list[TensorSpec] | None = None  # known to be those of the plan
        self._seen: list[int] | None = None  # the addresses of the snapshot before
        self._raw: dict[int, _Raw] = {}  # by slot
        self._on_device: list[int] = []
        self._copies: DeviceCopies | None = None
        for kind, indices in on_device.items():  # of one framework: no other does it yet
            self._on_device = indices
            self._copies = adapter_of(kind).device_copies(
                arena.mapped,
                [(plan.specs[i], plan.offsets[i]) for i in indices],
                [arena.slot_offset(slot) for slot in range(arena.slots)],
            )

    def fits(self, captured: Captured, scalars_bytes: int) -> bool:
        """Whether a state has the layout that this arena was made for."""
        if scalars_bytes > self.plan.scalars.size_bytes:
            return False
        if captured.specs is not self.specs_seen:
            if list(self.plan.specs) != captured.specs:
                return False
            self.specs_seen = captured.specs
        return True

    def fill(
        self, slot: int, captured: Captured, scalars: bytes, *, careful: bool
    ) -> Flight | None:
        """Copy everything, or begin to; what a device still has to copy is returned."""
        values = captured.values
        flight = None
        if self._copies is not None:
            on_device = [values[i] for i in self._on_device]
            flight = self._copies.begin(slot, on_device, careful=careful)
        raw = self._raw_for(slot, captured.addresses)
        if raw is not None:
            raw.copies.run()
        for kind, indices in self._indices.items():
            targets = self._targets[slot, kind]
            if raw is not None:
                left = raw.left[kind]
                targets, indices = [targets[i] for i in left], [indices[i] for i in left]
            if indices:
                adapter_of(kind).copy_all(targets, [values[i] for i in indices])
        start = self.arena.slot_offset(slot) + self.plan.scalars.offset
        capacity = self.plan.scalars.size_bytes
        self.arena.mapped[start : start + capacity] = scalars.ljust(capacity)
        return flight

    def _raw_for(self, slot: int, addresses: list[int] | None) -> _Raw | None:
        """The copies of what stays where it is, prepared when it was there the second time."""
        was_there, self._seen = addresses is self._seen, addresses
        if addresses is None:
            return None
        known = self._raw.get(slot)
        if known is not None and known.addresses is addresses:
            return known
        self._raw.pop(slot, None)
        if was_there:
            self._raw[slot] = self._prepare(slot, addresses)
        return self._raw.get(slot)

    def _prepare(self, slot: int, addresses: list[int]) -> _Raw:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.arena.mapped))
        start += self.arena.slot_offset(slot)
        moves = [
            (start + self.plan.offsets[i], addresses[i], self.plan.specs[i].size_bytes)
            for indices in self._indices.values()
            for i in indices
            if addresses[i]
        ]
        left = {
            kind: [place for place, i in enumerate(indices) if not addresses[i]]
            for kind, indices in self._indices.items()
        }
        return _Raw(addresses, RawCopies(moves), left)

    @property
    def device_seconds(self) -> float:
        """What a snapshot is known to keep the device from its work."""
        return 0.0 if self._copies is None else self._copies.cost_seconds

    def close(self) -> None:
        self._targets.clear()
        if self._copies is not None:
            self._copies.close()
        self.arena.close()
