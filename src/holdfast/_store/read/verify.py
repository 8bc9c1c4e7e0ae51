"""Read a checkpoint or a slot: every byte is read once and checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from holdfast._errors import DamagedCheckpoint
from holdfast._store.folder.layout import MANIFEST
from holdfast._store.format import manifest
from holdfast._store.format.checksum import digest_all
from holdfast._store.format.image import (
    ImagePlan,
    TensorSpec,
    decode_scalars,
    header_bytes,
    parse_header,
)
from holdfast._store.format.manifest import DataFile, Manifest
from holdfast._store.format.schema import check_head
from holdfast._store.read.files import cannot_read, name_part, read_parts


@dataclass(frozen=True)
class StoredShard:
    """What one rank stored of a sharded tensor."""

    description: dict[str, Any]
    spec: TensorSpec
    read: Callable[[], memoryview]

    @property
    def data(self) -> memoryview:
        """Its bytes, read on demand."""
        return self.read()


class DeviceBatch(Protocol):
    """Stored tensors on the device that they were on: only to be copied from."""

    digests: list[bytes]  # of each; empty if they were not asked for
    tensors: list[Any]

    @property
    def is_untouched(self) -> bool:
        """Whether the tensors have not been written to."""

    @property
    def memory(self) -> tuple[int, int]:
        """Their addresses on the device, from the first to behind the last."""


class SendToDevice(Protocol):
    """Sends stored tensors to a device; None if it is missing or full. An adapter does it."""

    def __call__(
        self,
        device: str,
        specs: Sequence[TensorSpec],
        views: Sequence[memoryview],
        *,
        hashed: bool,
    ) -> DeviceBatch | None: ...


class SentAhead:
    """The tensors of a state that are on their devices already, by their numbers.

    Objects copy from them and are compared with them, without a way back through the host.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Any] = {}
        self._batches: list[DeviceBatch] = []

    def send(
        self,
        send: SendToDevice,
        specs: Sequence[TensorSpec],
        views: Sequence[memoryview],
        *,
        hashed: bool,
    ) -> dict[int, bytes]:
        """Send what was on a device; with `hashed`, returns the digests of what was sent."""
        digests: dict[int, bytes] = {}
        for device in sorted({spec.device for spec in specs if spec.device}):
            numbers = [n for n, spec in enumerate(specs) if spec.device == device]
            batch = send(
                device, [specs[n] for n in numbers], [views[n] for n in numbers], hashed=hashed
            )
            if batch is not None:
                self._batches.append(batch)
                self.tensors.update(zip(numbers, batch.tensors, strict=True))
                if hashed:
                    digests.update(zip(numbers, batch.digests, strict=True))
        return digests

    def renumber(self, numbers: Sequence[int]) -> None:
        """They were sent in another order than that of their specs."""
        self.tensors = {numbers[number]: tensor for number, tensor in self.tensors.items()}

    @property
    def is_untouched(self) -> bool:
        return all(batch.is_untouched for batch in self._batches)

    @property
    def memory(self) -> list[tuple[int, int]]:
        return [batch.memory for batch in self._batches]

    def clear(self) -> None:
        """Free their memory."""
        self.tensors.clear()
        self._batches.clear()


@dataclass(frozen=True)
class Loaded:
    """A verified state in memory: the image of one rank, and what others stored for it."""

    plan: ImagePlan  # the specs of the image, then those of tensors that others stored
    tensors: tuple[memoryview, ...]  # the bytes of each
    memory: tuple[memoryview, ...]  # all memory that contains them
    head: dict[str, Any]  # the scalars: step, tree, metrics, …
    digests: dict[str, bytes]  # of each tensor, by name
    find_shards: Callable[[str], list[StoredShard]] | None = None
    world: int = 1  # the ranks that stored it
    sent: SentAhead = field(default_factory=SentAhead)

    def data(self, index: int) -> memoryview:
        """The bytes of tensor number `index`."""
        return self.tensors[index]

    def shards(self, path: str) -> list[StoredShard]:
        """The parts of the sharded tensor at a path, of all ranks that stored one."""
        return [] if self.find_shards is None else self.find_shards(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; DamagedCheckpoint if it is missing or wrong."""
    try:
        return manifest.read(folder)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{folder}: the manifest is missing.") from error
    except OSError as error:
        raise cannot_read(folder / MANIFEST, error) from error


def verify_image(
    image: memoryview,
    plan: ImagePlan,
    digests: list[bytes],
    where: str,
    send: SendToDevice | None = None,
) -> Loaded:
    """Check an image that is in memory already against its digests.

    With `send`, tensors that were on a device are sent there meanwhile.
    """
    extents = plan.extents()
    views = [image[e.offset : e.offset + e.size_bytes] for e in extents]
    sent = SentAhead()
    known: dict[int, bytes] = {}
    if send is not None:
        specs = [spec for spec, _ in plan.in_file_order()]
        known = sent.send(send, specs, views[1:-1], hashed=True)
    rest = [n for n in range(len(views)) if n - 1 not in known]
    found = dict(zip(rest, digest_all([views[n] for n in rest]), strict=True))
    found.update((n + 1, digest) for n, digest in known.items())
    for number, (extent, expected) in enumerate(zip(extents, digests, strict=True)):
        if expected != found[number]:
            raise DamagedCheckpoint(
                f"{where}: {name_part(extent.name)} has checksum {found[number].hex()[:8]}…, "
                f"{expected.hex()[:8]}… was noted."
            )
    names = (extent.name for extent in extents)
    loaded = loaded_of(plan, views, (image,), dict(zip(names, digests, strict=True)), where)
    sent.renumber(file_order(plan))
    return replace(loaded, sent=sent)


def slot_source(arena: Any, record: Any, where: str) -> Loaded:
    """A slot of another rank in memory; its tensors are checked when they are used."""
    try:
        plan = arena.plan(record.slot)
    except ValueError as error:
        raise DamagedCheckpoint(f"{where}: {error}.") from error
    names = (extent.name for extent in plan.extents())
    digests = dict(zip(names, arena.digests(record.slot), strict=True))
    return loaded_from(arena.image(record.slot), digests, where)


def loaded_from(image: memoryview, digests: dict[str, bytes], where: Path | str) -> Loaded:
    """The state in an image that is contiguous in memory."""
    plan = _parsed(image[: header_bytes(image[:8])], where)
    views = [image[e.offset : e.offset + e.size_bytes] for e in plan.extents()]
    return loaded_of(plan, views, (image,), digests, where)


def loaded_of(
    plan: ImagePlan,
    views: Sequence[memoryview],
    memory: Sequence[memoryview],
    digests: dict[str, bytes],
    where: Path | str,
) -> Loaded:
    """The state in the parts of an image: header, tensors in file order, scalars."""
    tensors = dict(zip(file_order(plan), views[1:-1], strict=True))
    try:
        head = decode_scalars(views[-1])
        check_head(head, plan.specs)
    except ValueError as error:
        raise _no_state(where, error) from error
    by_number = tuple(tensors[number] for number in range(len(plan.specs)))
    return Loaded(plan, by_number, tuple(memory), head, digests)


def read_state(folder: Path, file: DataFile) -> Loaded:
    """One rank's state from its files, with every checksum verified."""
    where = folder / file.name
    views, memory = read_parts(folder, file)
    if len(views) < 2:
        raise _no_state(where, "it has neither header nor scalars")
    plan = _parsed(views[0], where)
    names = [(extent.name, extent.size_bytes) for extent in plan.extents()]
    if names != [(part.name, part.size_bytes) for part in file.parts]:
        raise _no_state(where, "its header tells of other parts than the manifest")
    digests = {part.name: bytes.fromhex(part.checksum) for part in file.parts}
    return loaded_of(plan, views, memory, digests, where)


def file_order(plan: ImagePlan) -> list[int]:
    """The numbers of the tensors in the order in which they are stored."""
    places = [(at, spec.size_bytes) for at, spec in zip(plan.offsets, plan.specs, strict=True)]
    return sorted(range(len(places)), key=places.__getitem__)


def _parsed(header: memoryview, where: Path | str) -> ImagePlan:
    try:
        return parse_header(bytes(header))
    except (ValueError, IndexError) as error:
        raise _no_state(where, error) from error


def _no_state(where: Path | str, why: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{where}: is not a state of holdfast ({why}).")
