"""Deduplication: tensors that the previous checkpoint has are linked, not written again.

A tensor with the same checksum is the same. The file that has it is hard-linked into the folder of
the new checkpoint, which stays complete by itself: removing the old one removes a name, and the
bytes go with the last name. A few spots of the image show whether it is worth knowing the checksums
before anything is written: in most trainings everything changes, and then hashing runs during
the writing.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from holdfast._errors import CheckpointError
from holdfast._store.commit.source import Ranges, Source
from holdfast._store.folder.layout import RunLayout, linked_file, rank_file
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.folder.plain_file import open_file
from holdfast._store.format import manifest
from holdfast._store.format.checksum import digest
from holdfast._store.format.manifest import DataFile, Linked

_SPOTS, _SPOT_BYTES = 64, 4096
_ALIKE = 0.4  # of the spots must be unchanged for hashing first
_LEAST_SAVED = 0.25  # of the image
_MOST_LINKS = 3
_REST = 8  # checkpoints: if a little of every tensor changes, hashing first is lost time

_Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Spot:
    """A few bytes of one range, to find out cheaply whether it has changed."""

    index: int
    offset: int
    checksum: bytes


@dataclass(frozen=True)
class Sharing:
    """Which files of the previous checkpoint the new one links, and for which ranges."""

    sources: Mapping[str, Path]  # by the name in the new folder
    linked: tuple[Linked, ...]
    files: list[str]  # the linked file of each range; "": it is to be written
    offsets: list[int]  # there


class PreviousCheckpoint:
    """One rank's part of a committed checkpoint."""

    def __init__(
        self,
        folder: Path,
        file: DataFile,
        ranges: Ranges,
        digests: Sequence[bytes],
        spots: Sequence[Spot],
        identities: Mapping[str, _Identity],
    ) -> None:
        self.folder = folder
        self._name = file.name
        self._sizes = {"": file.size_bytes, **{each.name: each.size_bytes for each in file.linked}}
        self._ranges = ranges
        self._digests = digests
        # There may be a hundred thousand parts: keep only what differs from the plain case.
        self._offsets = [part.offset for part in file.parts]
        self._files = [part.file for part in file.parts] if file.linked else None
        self._spots = spots
        self._identities = identities
        self.was_in_vain = False  # its checksums were compared, and little was shared
        self.rest = 0  # checkpoints that skip the comparison

    @property
    def own_bytes(self) -> int:
        return self._sizes[""]

    @classmethod
    def written(
        cls,
        folder: Path,
        partial: Path,
        file: DataFile,
        source: Source,
        before: PreviousCheckpoint | None,
    ) -> PreviousCheckpoint:
        """What was just written as `partial`, and will be named `folder`."""
        found = source.hashing.digests()
        spots = [
            Spot(index, offset, digest(source.view(index)[offset : offset + size]))
            for index, offset, size in _places(source.ranges)
        ]
        identities = _identities_in(partial, file)
        former = cls(folder, file, source.ranges, found, spots, identities)
        if before is not None:
            former.rest = _REST if before.was_in_vain else max(0, before.rest - 1)
        return former

    @classmethod
    def read(cls, folder: Path, rank: int) -> PreviousCheckpoint | None:
        """What an earlier attempt has written; None if that cannot be read."""
        with contextlib.suppress(OSError, CheckpointError, StopIteration):
            files = manifest.read(folder).files
            file = next(each for each in files if each.name == rank_file(rank) and each.parts)
            sizes = [part.size_bytes for part in file.parts]
            starts = list(accumulate(sizes, initial=0))[:-1]
            digests = [bytes.fromhex(part.checksum) for part in file.parts]
            ranges = Ranges([part.name for part in file.parts], starts, sizes, [])
            spots = []
            for index, offset, size in _places(ranges):
                part = file.parts[index]
                with open_file(folder / (part.file or file.name)) as stored:
                    stored.seek(part.offset + offset)
                    spots.append(Spot(index, offset, digest(stored.read(size))))
            return cls(folder, file, ranges, digests, spots, _identities_in(folder, file))
        return None

    def resembles(self, source: Source) -> bool:
        """Whether much of it seems to be unchanged in the new image."""
        if self.rest:
            return False
        new = source.ranges
        places = None
        if new.names is not self._ranges.names and new.names != self._ranges.names:
            places = {name: index for index, name in enumerate(new.names)}
        same = 0
        for spot in self._spots:
            index = spot.index if places is None else places.get(self._ranges.names[spot.index])
            if index is not None and new.sizes[index] == self._ranges.sizes[spot.index]:
                view = source.view(index)[spot.offset : spot.offset + _SPOT_BYTES]
                same += digest(view) == spot.checksum
        return same >= _ALIKE * max(1, len(self._spots))

    def share_with(self, source: Source) -> Sharing | None:
        """What the new image shares with it, by the checksums; None if that is little."""
        at = self._unchanged(source)
        in_file = self._files or [""] * len(self._offsets)
        needed = Counter[str]()
        for old, size in zip(at, source.ranges.sizes, strict=True):
            if old is not None:
                needed[in_file[old]] += size
        chosen = [name for name, size in needed.most_common() if 2 * size >= self._sizes[name]]
        chosen = chosen[:_MOST_LINKS]
        if sum(needed[name] for name in chosen) < _LEAST_SAVED * source.size_bytes:
            self.was_in_vain = True
            return None
        names = {name: name or linked_file(self._name, self.folder) for name in chosen}
        return Sharing(
            {new: self.folder / (name or self._name) for name, new in names.items()},
            tuple(Linked(new, self._sizes[name]) for name, new in names.items()),
            ["" if old is None else names.get(in_file[old], "") for old in at],
            [0 if old is None else self._offsets[old] for old in at],
        )

    def link(self, sharing: Sharing, partial: Path) -> bool:
        """Make the links; False if that is not possible, or a file was replaced."""
        made = []
        try:
            for name, source in sharing.sources.items():
                (partial / name).unlink(missing_ok=True)  # left by a keeper that was killed here
                os.link(source, partial / name)
                made.append(partial / name)
                if _identity(partial / name) != self._identities.get(source.name):
                    raise OSError("another file")
        except (OSError, NotImplementedError):
            for path in made:
                path.unlink(missing_ok=True)
            return False
        return True

    def _unchanged(self, source: Source) -> list[int | None]:
        """For each range of the new image the same one here, except for header and scalars."""
        new, old = source.ranges, self._ranges
        digests = source.hashing.digests()
        at: list[int | None] = list(range(len(new.names)))
        if new.names is not old.names:
            places = {name: index for index, name in enumerate(old.names)}
            at = [places.get(name) for name in new.names]
        for index, found in enumerate(at):
            is_same = found is not None and (
                new.sizes[index] == old.sizes[found] and digests[index] == self._digests[found]
            )
            at[index] = found if is_same else None
        at[0] = at[-1] = None
        return at


def newest_former(
    layout: RunLayout, line: Mapping[int, int | None], rank: int
) -> PreviousCheckpoint | None:
    """This rank's part of the newest checkpoint on the run's lineage."""
    for step, attempt, folder in reversed(layout.checkpoint_folders()):
        if is_on_line(line, attempt, step):
            return PreviousCheckpoint.read(folder, rank)
    return None


def _places(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Spots all over the image: the range, the offset in it, and the size."""
    total = ranges.offsets[-1] + ranges.sizes[-1]
    found = []
    for number in range(_SPOTS):
        at = (2 * number + 1) * total // (2 * _SPOTS)
        index = bisect_right(ranges.offsets, at) - 1
        offset = max(0, min(at - ranges.offsets[index], ranges.sizes[index] - _SPOT_BYTES))
        found.append((index, offset, min(_SPOT_BYTES, ranges.sizes[index])))
    return list(dict.fromkeys(found))


def _identities_in(folder: Path, file: DataFile) -> dict[str, _Identity]:
    found = {}
    for name, _ in file.all_files:
        with contextlib.suppress(OSError):  # then it is not linked
            found[name] = _identity(folder / name)
    return found


def _identity(path: Path) -> _Identity:
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
