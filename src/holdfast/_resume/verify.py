"""Reading a checkpoint or a slot: every byte is read once and checked before it is used."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._errors import DamagedCheckpoint, UnreadableCheckpoint
from holdfast._record import manifest
from holdfast._record.checksum import digest, digest_all, for_each
from holdfast._record.image import ImagePlan, TensorSpec, decode_scalars, parse_header
from holdfast._record.layout import MANIFEST
from holdfast._record.manifest import DataFile, Manifest

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class StoredShard:
    """What one rank stored of a sharded tensor."""

    description: dict[str, Any]
    spec: TensorSpec
    read: Callable[[], memoryview]

    @property
    def data(self) -> memoryview:
        """Its bytes: read only by whoever needs this part."""
        return self.read()


@dataclass(frozen=True)
class Loaded:
    """A verified state in memory: the image of one rank, and what others hold for it."""

    plan: ImagePlan  # its specs go on behind those of the image with what others hold
    image: memoryview
    head: dict[str, Any]  # the scalars: step, tree, metrics, …
    digests: dict[str, bytes]  # of each tensor, by name
    elsewhere: tuple[memoryview, ...] = ()  # the tensors that the images of others hold
    find_shards: Callable[[str], list[StoredShard]] | None = None
    world: int = 1  # the ranks that stored it

    def data(self, index: int) -> memoryview:
        """The bytes of tensor number `index`."""
        own = len(self.plan.offsets)
        if index >= own:
            return self.elsewhere[index - own]
        start = self.plan.offsets[index]
        return self.image[start : start + self.plan.specs[index].size_bytes]

    def shards(self, path: str) -> list[StoredShard]:
        """The parts of the sharded tensor at a path, of all ranks that stored one."""
        return [] if self.find_shards is None else self.find_shards(path)

    def memory(self) -> list[memoryview]:
        """All that tensors may borrow from."""
        return [self.image, *(view for view in self.elsewhere if view.nbytes)]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; DamagedCheckpoint if it is missing or wrong."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{folder}: the manifest is missing.") from error
    except OSError as error:
        raise cannot_read(folder / MANIFEST, error) from error
    return manifest.parse(data, str(folder))


def read_image(path: Path, file: DataFile) -> memoryview:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path}: is missing.") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != file.size_bytes:
            raise DamagedCheckpoint(
                f"{path}: has {size} bytes, the manifest says {file.size_bytes}."
            )
        image = memoryview(mmap.mmap(-1, max(size, 1)))

        def check(index: int) -> None:
            part = file.parts[index]
            view = image[part.offset : part.offset + part.size_bytes]
            read_range(descriptor, view, part.offset, path)
            actual = digest(view).hex()
            if actual != part.checksum:
                raise DamagedCheckpoint(
                    f"{path}: {name_part(part.name)} has checksum {actual[:8]}…, "
                    f"the manifest says {part.checksum[:8]}…."
                )

        for_each(check, [part.size_bytes for part in file.parts])
    finally:
        os.close(descriptor)
    return image


def cannot_read(path: Path, error: OSError) -> DamagedCheckpoint | UnreadableCheckpoint:
    """A bad block is damage; a mount, a permission or a limit may be right again tomorrow."""
    if error.errno == errno.EIO:
        return DamagedCheckpoint(f"{path}: cannot be read ({error.strerror}).")
    return UnreadableCheckpoint(
        f"{path}: cannot be read ({error.strerror}).\nNothing was changed; make it readable first."
    )


def name_part(name: str) -> str:
    """What an error calls a byte range."""
    return "the header" if name == "header" else f"tensor {name}"


def read_range(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < view.nbytes:
        piece = view[done : done + _CHUNK_BYTES]
        try:
            if hasattr(os, "preadv"):
                count = os.preadv(descriptor, [piece], offset + done)
            else:  # Windows
                with path.open("rb", buffering=0) as file:
                    file.seek(offset + done)
                    count = file.readinto(piece) or 0
        except OSError as error:
            raise cannot_read(path, error) from error
        if count == 0:
            raise DamagedCheckpoint(f"{path}: ends early.")
        done += count


def verify_image(image: memoryview, plan: ImagePlan, digests: list[bytes], where: str) -> Loaded:
    """Check an image that is in memory already against its digests."""
    extents = plan.extents()
    views = [image[e.offset : e.offset + e.size_bytes] for e in extents]
    for extent, expected, actual in zip(extents, digests, digest_all(views), strict=True):
        if expected != actual:
            raise DamagedCheckpoint(
                f"{where}: {name_part(extent.name)} has checksum {actual.hex()[:8]}…, "
                f"{expected.hex()[:8]}… was noted."
            )
    names = (extent.name for extent in extents)
    return loaded_from(image, dict(zip(names, digests, strict=True)), where)


def slot_source(arena: Any, record: Any, where: str) -> Loaded:
    """A slot of another rank as it is in memory; its tensors are checked when they are used."""
    try:
        plan = arena.plan(record.slot)
    except ValueError as error:
        raise DamagedCheckpoint(f"{where}: {error}.") from error
    names = (extent.name for extent in plan.extents())
    digests = dict(zip(names, arena.digests(record.slot), strict=True))
    return loaded_from(arena.image(record.slot), digests, where)


def check_head(head: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError if the scalars are not those of a state."""
    if not isinstance(head["tree"]["state"], dict) or type(head["step"]) is not int:
        raise ValueError("its tree is none")


def loaded_from(image: memoryview, digests: dict[str, bytes], where: Path | str) -> Loaded:
    try:
        length = 8 + int.from_bytes(image[:8], "little")
        plan = parse_header(bytes(image[:length]))
        place = plan.scalars
        head = decode_scalars(image[place.offset : place.offset + place.size_bytes])
        check_head(head)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedCheckpoint(f"{where}: is not a state of holdfast ({error}).") from error
    return Loaded(plan, image, head, digests)
