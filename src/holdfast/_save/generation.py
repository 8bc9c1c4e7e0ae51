"""An arena for one layout of the state, and the ways by which tensors get into its slots."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from holdfast._record.image import ImagePlan, TensorSpec
from holdfast._save.arena import Arena
from holdfast._save.backing import Backing
from holdfast._save.capture import Captured, adapter_of
from holdfast._save.flight import DeviceCopies, Flight
from holdfast._save.raw_copies import RawCopies


@dataclass(frozen=True)
class _Ways:
    """How the tensors get into one slot."""

    addresses: list[int] | None  # as the capture knew them
    raw: RawCopies  # of all that is bytes at a known address
    others: list[tuple[str, list[int], list[Any]]]  # kind, which, and where they go


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
        self.specs_seen: list[TensorSpec] | None = None  # known to be those of the plan
        self._ways: dict[int, _Ways] = {}  # by slot
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

    def begin(self, slot: int, captured: Captured, *, careful: bool) -> Flight | None:
        """Begin to copy what is on a device; what it still has to copy is returned."""
        if self._copies is None:
            return None
        on_device = [captured.values[i] for i in self._on_device]
        return self._copies.begin(slot, on_device, careful=careful)

    def fill(self, slot: int, captured: Captured, scalars: bytes) -> None:
        """Copy everything else."""
        values = captured.values
        ways = self._ways.get(slot)
        if ways is None or ways.addresses is not captured.addresses:
            ways = self._ways[slot] = self._prepare(slot, captured.addresses)
        ways.raw.run()
        for kind, indices, targets in ways.others:
            adapter_of(kind).copy_all(targets, [values[i] for i in indices])
        start = self.arena.slot_offset(slot) + self.plan.scalars.offset
        capacity = self.plan.scalars.size_bytes
        self.arena.mapped[start : start + capacity] = scalars.ljust(capacity)

    def _prepare(self, slot: int, addresses: list[int] | None) -> _Ways:
        """How each tensor gets into a slot, as long as none of them moves."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.arena.mapped))
        start += self.arena.slot_offset(slot)
        plan, known = self.plan, addresses or [0] * len(self.plan.specs)
        moves = [
            (start + plan.offsets[i], known[i], plan.specs[i].size_bytes)
            for indices in self._indices.values()
            for i in indices
            if known[i]
        ]
        others = []
        for kind, indices in self._indices.items():
            left = [i for i in indices if not known[i]]
            if left:
                targets = adapter_of(kind).destinations(
                    self.arena.mapped,
                    [(plan.specs[i], plan.offsets[i]) for i in left],
                    self.arena.slot_offset(slot),
                )
                others.append((kind, left, targets))
        return _Ways(addresses, RawCopies(moves), others)

    @property
    def device_seconds(self) -> float:
        """What a snapshot is known to keep the device from its work."""
        return 0.0 if self._copies is None else self._copies.cost_seconds

    @property
    def hides_the_processor(self) -> bool:
        """Whether what the processor did for the last snapshot cost training nothing."""
        return self._copies is not None and self._copies.is_ahead

    def close(self) -> None:
        self._ways.clear()
        if self._copies is not None:
            self._copies.close()
        self.arena.close()
