"""A state of several ranks: each stored its own values, and a share of those that are equal.

In the tree of a rank `{"$r": name}` stands for a tensor that is the same on every rank and that
another rank stored. Of a sharded tensor each rank has a part.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast._errors import DamagedCheckpoint
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import ImagePlan
from holdfast._store.format.manifest import DataFile
from holdfast._store.format.tree import replace_tag, tensor_leaves
from holdfast._store.read.files import name_part, open_file, place_of, read_range
from holdfast._store.read.verify import (
    ChoosePlaces,
    Loaded,
    StoredShard,
    parse_head,
    parse_plan,
    read_manifest,
    read_state,
)


class FileSource:
    """One rank's file; only what is needed is read, and checked."""

    def __init__(self, folder: Path, file: DataFile) -> None:
        self._folder = folder
        self._path = folder / file.name
        self._sizes = dict(file.all_files)
        self._parts = {part.name: part for part in file.parts}
        self.digests = {part.name: bytes.fromhex(part.checksum) for part in file.parts}

    @functools.cached_property
    def plan(self) -> ImagePlan:
        return parse_plan(self._read("header"), self._path)

    @functools.cached_property
    def head(self) -> dict[str, Any]:
        return parse_head(self._read(self.plan.scalars.name), self.plan, self._path)

    def data(self, index: int) -> memoryview:
        return self._read(self.plan.specs[index].name)

    def _read(self, name: str) -> memoryview:
        part = self._parts.get(name)
        if part is None:
            raise DamagedCheckpoint(f"{self._path}: {name_part(name)} is missing.")
        path = place_of(self._folder, part.file or self._path.name)
        view = memoryview(bytearray(part.size_bytes))
        descriptor = open_file(path, self._sizes[path.name])
        try:
            read_range(descriptor, view, part.offset, path)
        finally:
            os.close(descriptor)
        if digest(view).hex() != part.checksum:
            raise DamagedCheckpoint(f"{path}: {name_part(name)} is damaged.")
        return view


RankState = FileSource | Loaded  # what one rank stored


def read_checkpoint(folder: Path, rank: int = 0, choose: ChoosePlaces | None = None) -> Loaded:
    """Read a rank's state from a checkpoint, with every checksum verified.

    A rank that did not exist then gets the state of one that did. With `choose`, the state of a
    single rank is read into its places.
    """
    found = read_manifest(folder)
    if not found.files:
        raise DamagedCheckpoint(f"{folder}: the manifest names no file.")
    own = found.files[rank % len(found.files)]
    loaded = read_state(folder, own, choose if len(found.files) == 1 else None)
    if len(found.files) == 1:
        return join([loaded], 0, [folder / own.name])
    sources: list[RankState] = [FileSource(folder, file) for file in found.files]
    sources[rank % len(sources)] = loaded
    return join(sources, rank % len(sources), [folder / file.name for file in found.files])


def join(sources: Sequence[RankState], own: int, places: Sequence[Any]) -> Loaded:
    """The state of one rank, with what other ranks stored for it."""
    loaded = sources[own]
    assert isinstance(loaded, Loaded)
    wanted: dict[str, int] = {}
    first = len(loaded.plan.specs)
    tree = loaded.head["tree"]
    if len(sources) > 1 or loaded.head.get("world", 1) > 1:
        # A number behind the rank's own tensors for each tensor that another rank stored.
        tree = replace_tag(
            tree, "$r", lambda name: {"$t": wanted.setdefault(name, first + len(wanted))}
        )
    specs, views, digests = list(loaded.plan.specs), [], dict(loaded.digests)
    numbers = functools.cache(lambda rank: _numbers_of(sources[rank]))
    for name in wanted:
        # The rank that stored a tensor which is the same on all.
        have_it = (n for n, each in enumerate(sources) if name in each.digests)
        rank = next((n for n in have_it if name in numbers(n)), None)
        if rank is None:
            raise DamagedCheckpoint(
                f"{places[own]}: {name} was to be stored by another rank, and is not there."
            )
        index = numbers(rank)[name]
        view = sources[rank].data(index)
        if digest(view) != sources[rank].digests[name]:
            raise DamagedCheckpoint(f"{places[rank]}: {name_part(name)} is damaged.")
        specs.append(sources[rank].plan.specs[index])
        views.append(view)
        digests[name] = sources[rank].digests[name]
    return replace(
        loaded,
        plan=replace(loaded.plan, specs=tuple(specs)),
        head={**loaded.head, "tree": tree},
        digests=digests,
        tensors=(*loaded.tensors, *views),
        memory=(*loaded.memory, *(view for view in views if view.nbytes)),
        find_shards=_shards_of(sources),
        world=len(sources),
    )


def _numbers_of(source: RankState) -> dict[str, int]:
    return {spec.name: number for number, spec in enumerate(source.plan.specs)}


def _shards_of(sources: Sequence[RankState]) -> Callable[[str], list[StoredShard]]:
    """Finds the parts of sharded tensors; reads the trees of the other ranks once."""

    @functools.cache
    def leaves() -> list[dict[str, Any]]:
        return [
            {
                path: leaf["$shard"]
                for name, encoded in source.head["tree"]["state"].items()
                for path, leaf in tensor_leaves(encoded, name)
                if "$shard" in leaf
            }
            for source in sources
        ]

    def find(path: str) -> list[StoredShard]:
        found = []
        for source, of_rank in zip(sources, leaves(), strict=True):
            description = of_rank.get(path)
            if description is not None and (number := description["t"]) is not None:
                read = functools.partial(source.data, number)
                found.append(StoredShard(description, source.plan.specs[number], read))
        return found

    return find


def read_world(folder: Path) -> int:
    return len(read_manifest(folder).files)
