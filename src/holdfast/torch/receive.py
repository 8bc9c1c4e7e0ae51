"""A stored state taken in by all cores: into memory made ahead, or onto the device it was on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast import torch as adapter
from holdfast._store.format.image import TensorSpec
from holdfast.torch.upload import Sent, upload

_SPARE_BYTES = 256 << 20


class OnDevice:
    """Tensors as they were stored, on their device: only to be copied from."""

    def __init__(self, sent: Sent, specs: Sequence[TensorSpec]) -> None:
        self._whole = sent.whole
        self.digests = sent.digests
        self.tensors = [_typed(raw, spec) for raw, spec in zip(sent.raw, specs, strict=True)]
        # Whoever writes into one of them moves its version on.
        self._versions = [(each, each._version) for each in (sent.whole, *self.tensors)]

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has changed what was only to be copied from."""
        return all(each._version == version for each, version in self._versions)

    @property
    def memory(self) -> tuple[int, int]:
        """The addresses, of the device, where they begin and end."""
        return self._whole.data_ptr(), self._whole.data_ptr() + self._whole.nbytes


def _typed(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if raw.nbytes and raw.data_ptr() % spec.item_bytes:
        raw = raw.clone()  # in a file of several checkpoints it may stand at any byte
    return adapter._typed(raw, spec)


def send(
    name: str, specs: Sequence[TensorSpec], views: Sequence[memoryview], *, hashed: bool
) -> OnDevice | None:
    """Send tensors to the device that they were on; None if it is not there, or has no room."""
    device = _device(name)
    size_bytes = sum(spec.size_bytes for spec in specs)
    # Beside them there must be room for those that an optimizer is going to keep.
    if device is None or _room(device) < 2 * size_bytes + _SPARE_BYTES:
        return None
    try:
        return OnDevice(upload(views, device, hashed=hashed), specs)
    except torch.cuda.OutOfMemoryError:
        return None


def _device(name: str) -> torch.device | None:
    if not name.startswith("cuda") or not torch.cuda.is_available():
        return None
    device = torch.device(name)
    return device if (device.index or 0) < torch.cuda.device_count() else None


def _room(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def own_of(stored: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor of its own with the values and the layout of one that is on its device."""
    if spec.strides is None:
        return stored.clone()
    for axis in adapter._repeated(spec.shape, spec.strides):
        stored = stored.narrow(axis, 0, 1)
    fresh = torch.empty_strided(
        stored.shape, spec.strides, dtype=stored.dtype, device=stored.device
    )
    return fresh.copy_(stored).expand(spec.shape)


@torch.no_grad()
def copy_in(live: Any, stored: torch.Tensor) -> bool:
    """Copy into a tensor that is there, if it is alike and on the same device."""
    if not is_comparable(live, stored) or adapter._repeated(live.shape, live.stride()):
        return False
    live.detach().copy_(stored)
    return True


def fresh(spec: TensorSpec) -> torch.Tensor | None:
    """Memory for a stored tensor; None if more than its bytes have to be looked at."""
    if spec.device or spec.strides is not None or not spec.size_bytes:
        return None
    return torch.empty(spec.shape, dtype=adapter._dtype(spec.dtype))


def is_comparable(live: Any, stored: torch.Tensor) -> bool:
    """Whether the two can be compared where they are."""
    return (
        isinstance(live, torch.Tensor)
        and not adapter.is_sharded(live)
        and live.device == stored.device
        and (live.dtype, live.shape) == (stored.dtype, stored.shape)
    )


@torch.no_grad()
def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Of each pair, whether any bit differs; found on the device, and asked for once."""
    found = [_differ(_bits(live), _bits(stored)) for live, stored in pairs]
    by_device: dict[torch.device, list[int]] = {}
    for number, flag in enumerate(found):
        by_device.setdefault(flag.device, []).append(number)
    answers = [False] * len(found)
    for numbers in by_device.values():
        flags = torch.stack([found[number] for number in numbers]).tolist()
        for number, flag in zip(numbers, flags, strict=True):
            answers[number] = flag
    return answers


def _bits(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return (
        plain.view(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0).view(torch.uint8)
    )


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    for wide in (torch.int64, torch.int32):
        size = wide.itemsize
        if not (one.nbytes % size or one.data_ptr() % size or other.data_ptr() % size):
            return torch.ne(one.view(wide), other.view(wide)).any()
    return torch.ne(one, other).any()
