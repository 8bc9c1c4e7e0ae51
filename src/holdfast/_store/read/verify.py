"""Read a checkpoint or a slot: every byte is read once and checked before it is used.

`find_damage` only checks, and names all that is wrong.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash

from holdfast._errors import CheckpointError, DamagedCheckpoint
from holdfast._store.folder.layout import MANIFEST
from holdfast._store.folder.plain_file import open_file
from holdfast._store.format import manifest
from holdfast._store.format.image import ImagePlan, TensorSpec, decode_scalars, parse_header
from holdfast._store.format.manifest import DataFile, Manifest, Part
from holdfast._store.format.schema import check_head
from holdfast._store.read.checked_copy import CheckedCopy, copy_checked
from holdfast._store.read.files import RankFiles, cannot_read, name_part, place_of


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

    def leave_host(self) -> object:
        """Return when the memory that they were sent from may be closed, except for a slot.

        A slot may be closed when the returned object is gone.
        """


class SendToDevice(Protocol):
    """Sends stored tensors to a device; None if it is missing or full. An adapter does it.

    A slot that they are in stays prepared for copies by the device.
    """

    def __call__(
        self,
        device: str,
        specs: Sequence[TensorSpec],
        views: Sequence[memoryview],
        *,
        hashed: bool,
        slot: memoryview | None = None,
    ) -> DeviceBatch | None: ...


class SentAhead:
    """The tensors of a state that are on their devices already, by their numbers.

    Objects copy from them and are compared with them, without a way back through the host.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Any] = {}
        self._batches: list[DeviceBatch] = []
        self._hosts: list[object] = []  # prepared memory of slots

    def send(
        self,
        send: SendToDevice,
        specs: Sequence[TensorSpec],
        views: Sequence[memoryview],
        *,
        hashed: bool,
        slot: memoryview | None = None,
    ) -> dict[int, bytes]:
        """Send what was on a device; with `hashed`, returns the digests of what was sent."""
        digests: dict[int, bytes] = {}
        for device in sorted({spec.device for spec in specs if spec.device}):
            numbers = [n for n, spec in enumerate(specs) if spec.device == device]
            of = [specs[n] for n in numbers], [views[n] for n in numbers]
            batch = send(device, *of, hashed=hashed, slot=slot)
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
        """Free their memory, and let go of that of the host."""
        self.tensors.clear()
        while self._batches:
            self._hosts.append(self._batches.pop().leave_host())


@dataclass(frozen=True)
class Placement:
    """Memory of live objects for some tensors of a state, chosen when the state is known to fit.

    It is filled while the bytes are checked. If one of them is wrong it is half filled, and only
    another state that fits the same objects may be used: it fills all of it.
    """

    views: Mapping[int, memoryview]  # to be filled, by number
    addresses: Mapping[int, int]  # of these
    tensors: Mapping[int, Any]  # that have this memory
    filled: frozenset[str]  # objects of which nothing more is to be loaded
    is_exact: bool  # no code of the script runs while the rest is loaded


class ChoosePlaces(Protocol):
    """Chooses the memory for a state whose header and scalars are checked; None for none."""

    def __call__(self, plan: ImagePlan, head: dict[str, Any]) -> Placement | None: ...


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
    placement: Placement | None = None
    # For tensors of which only the object has the bytes.
    read_again: Callable[[int], memoryview] | None = None

    def data(self, index: int) -> memoryview:
        """The bytes of tensor number `index`."""
        is_elsewhere = self.placement is not None and index in self.placement.views
        if self.read_again is not None and is_elsewhere:
            return self.read_again(index)
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
    choose: ChoosePlaces | None = None,
    *,
    is_slot: bool = False,
) -> Loaded:
    """Check an image that is in memory already against its digests.

    With `send`, tensors that were on a device are sent there meanwhile; with `choose`, others are
    copied to their places. `is_slot`: it has memory of its own, and may be written to later.
    """

    def complain(name: str, actual: bytes, expected: bytes) -> str:
        found, noted = actual.hex()[:8], expected.hex()[:8]
        return f"{where}: {name_part(name)} has checksum {found}…, {noted}… was noted."

    extents = plan.extents()
    views = [image[e.offset : e.offset + e.size_bytes] for e in extents]
    ends = (0, len(views) - 1)
    copy_checked([CheckedCopy(extents[n].name, views[n], None, digests[n]) for n in ends], complain)
    loaded = loaded_from(image, plan, digests, where)
    placement = None if choose is None else choose(plan, loaded.head)
    order = plan.order
    sent = SentAhead()
    known: dict[int, bytes] = {}
    if send is not None:
        specs = [spec for spec, _ in plan.in_file_order()]
        slot = image if is_slot else None
        known = sent.send(send, specs, views[1:-1], hashed=True, slot=slot)
    targets = {} if placement is None else placement.views
    copies = []
    try:
        for place, number in enumerate(order):
            extent, expected = extents[place + 1], digests[place + 1]
            if place not in known:
                target = targets.get(number)
                copies.append(CheckedCopy(extent.name, views[place + 1], target, expected))
            elif known[place] != expected:
                raise DamagedCheckpoint(complain(extent.name, known[place], expected))
        copy_checked(copies, complain)
    except BaseException:
        sent.clear()
        raise
    sent.renumber(order)
    return replace(loaded, sent=sent, placement=placement)


def loaded_from(
    image: memoryview, plan: ImagePlan, digests: Sequence[bytes], where: Path | str
) -> Loaded:
    """The state in an image in memory; its tensors are not checked yet."""
    extents = plan.extents()
    views = [image[e.offset : e.offset + e.size_bytes] for e in extents]
    tensors = dict(zip(plan.order, views[1:-1], strict=True))
    by_number = tuple(tensors[number] for number in range(len(plan.specs)))
    by_name = dict(zip((extent.name for extent in extents), digests, strict=True))
    return Loaded(plan, by_number, (image,), parse_head(views[-1], plan, where), by_name)


def read_state(folder: Path, file: DataFile, choose: ChoosePlaces | None = None) -> Loaded:
    """One rank's state from its files, with every checksum verified.

    With `choose`, tensors are read into their places, and no other copy of them is made.
    """
    where = folder / file.name
    files = RankFiles(folder, file)
    files.check_wrapper()
    last = len(file.parts) - 1
    plan, head = parse_ends(file.parts, lambda: files.read([0, last]), where)
    placement = None if choose is None else choose(plan, head)
    order = plan.order
    targets = {}
    if placement is not None:
        targets = {
            n + 1: v for n, i in enumerate(order) if (v := placement.views.get(i)) is not None
        }
    views = files.read(range(1, last), targets)
    tensors = [memoryview(b"")] * len(order)
    for view, number in zip(views, order, strict=True):
        tensors[number] = view
    parts = {number: place + 1 for place, number in enumerate(order)}
    return Loaded(
        plan,
        tuple(tensors),
        tuple(files.memory),
        head,
        {part.name: bytes.fromhex(part.checksum) for part in file.parts},
        placement=placement,
        read_again=lambda number: files.read_again(parts[number]),
    )


def parse_ends(
    parts: Sequence[Part], read: Callable[[], Sequence[memoryview]], where: Path | str
) -> tuple[ImagePlan, dict[str, Any]]:
    """The plan and the scalars of a state with these parts; `read` gives the first and the last."""
    if len(parts) < 2:
        raise _no_state(where, "it has neither header nor scalars")
    header, scalars = read()
    plan = parse_plan(header, where)
    names = [(extent.name, extent.size_bytes) for extent in plan.extents()]
    if names != [(part.name, part.size_bytes) for part in parts]:
        raise _no_state(where, "its header tells of other parts than the manifest")
    return plan, parse_head(scalars, plan, where)


def parse_head(scalars: memoryview, plan: ImagePlan, where: Path | str) -> dict[str, Any]:
    try:
        head = decode_scalars(scalars)
        check_head(head, plan.specs)
    except ValueError as error:
        raise _no_state(where, error) from error
    return head


def parse_plan(header: memoryview, where: Path | str) -> ImagePlan:
    try:
        return parse_header(bytes(header))
    except (ValueError, IndexError) as error:
        raise _no_state(where, error) from error


def _no_state(where: Path | str, why: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{where}: is not a state of holdfast ({why}).")


# -- All damage of a checkpoint, found in little memory --------------------------------------------
# Resuming stops at the first wrong byte and holds the whole image. `holdfast verify` names every
# damaged tensor, and may run while a training needs the memory.

_CHUNK_BYTES = 16 << 20


def find_damage(folder: Path) -> list[str]:
    """One line for each damage; none if every byte is as it was written."""
    try:
        found = read_manifest(folder)
    except CheckpointError as error:
        return [_within(folder, error)]
    lines: list[str] = []
    for file in found.files:
        try:
            damage = check_file(folder, file)
        except OSError as error:
            missing = Path(error.filename or file.name).name
            damage = [f"{missing}: {error.strerror}"]
        except CheckpointError as error:
            damage = [_within(folder, error)]
        # A tensor's name may be in the files of several ranks.
        is_named = len(found.files) == 1
        lines += (
            line if is_named or line.startswith(file.name) else f"{file.name}: {line}"
            for line in damage
        )
    return lines


def _within(folder: Path, error: CheckpointError) -> str:
    """The text of an error, with names relative to the checkpoint."""
    return str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}/").rstrip(".")


def check_file(
    folder: Path, file: DataFile, get_on: Callable[[], None] = lambda: None
) -> list[str]:
    """The damage of a rank's state, in its own file and in linked ones.

    `get_on` is called meanwhile.
    """
    with contextlib.ExitStack() as stack:
        opened: dict[str, IO[bytes]] = {}
        for name, size_bytes in file.all_files:
            data = stack.enter_context(open_file(place_of(folder, name)))
            size = os.fstat(data.fileno()).st_size
            if size != size_bytes:
                return [f"{name} has {size} bytes, the manifest says {size_bytes}"]
            opened["" if name == file.name else name] = data
        lines = []
        for part in file.all_parts:
            if not _is_whole(opened[part.file], part, get_on):
                within = f" (in {part.file})" if part.file else ""
                lines.append(f"{name_part(part.name)} is damaged{within}")
        if not lines:
            # Intact bytes must also be a valid state: resuming requires the same.
            ends = [*file.parts[:1], *file.parts[-1:]]
            where = folder / file.name
            parse_ends(file.parts, lambda: [_read(opened, part) for part in ends], where)
        return lines


def _is_whole(data: IO[bytes], part: Part, get_on: Callable[[], None]) -> bool:
    hasher = xxhash.xxh3_128()
    data.seek(part.offset)
    left = part.size_bytes
    while left:
        chunk = data.read(min(left, _CHUNK_BYTES))
        if not chunk:
            return False
        hasher.update(chunk)
        left -= len(chunk)
        get_on()
    return bool(hasher.hexdigest() == part.checksum)


def _read(opened: dict[str, IO[bytes]], part: Part) -> memoryview:
    opened[part.file].seek(part.offset)
    return memoryview(opened[part.file].read(part.size_bytes))
