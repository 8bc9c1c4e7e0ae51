"""From an image in memory to a committed checkpoint.

The order is the invariant: data and manifest, fsync of both and of their folder, rename, fsync of
the parent folder. A checkpoint has its final name only when every byte of it is on the disk, so a
kill or a power cut at any stage leaves either nothing that counts or a complete checkpoint. What
the first flush makes durable is flushed at once: a file system commits it together, and for a small
state the flushes are most of the time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._errors import SaveFailed
from holdfast._store.commit.chunks import Labour
from holdfast._store.commit.dedup import Former, Sharing
from holdfast._store.commit.direct_io import write_file
from holdfast._store.commit.fault_points import pass_point
from holdfast._store.commit.source import Source, threads_for
from holdfast._store.commit.write_queue import Turns
from holdfast._store.folder.atomic import (
    publish_folder,
    remove_folder,
    sync_folder,
    sync_together,
)
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.invalid import is_void, set_aside_void, void_steps
from holdfast._store.folder.layout import MANIFEST, RunLayout, rank_file
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import wrap_header
from holdfast._store.format.manifest import DataFile, Manifest, Part
from holdfast._store.memory.control import mark_of


class Fenced(SaveFailed):
    """A newer attempt has taken the run: this one may not commit any more."""


@dataclass(frozen=True)
class CheckpointCommit:
    """What is to be committed, and by which attempt."""

    layout: RunLayout
    run_id: str
    attempt: int  # the attempt that trained this state
    writer_attempt: int  # the attempt that writes it
    step: int
    at_turn: bool  # at the end of an epoch, not at the boundary of the step
    reason: str
    metrics: dict[str, float | None]
    version: str
    origin: tuple[int, int] | None = None
    turns: Turns = field(default_factory=Turns)  # the order in which checkpoints get their names

    @property
    def key(self) -> tuple[int, int]:
        """The greater one is the newer state."""
        return self.attempt, mark_of(self.step, self.at_turn)

    @property
    def final(self) -> Path:
        """Its final path."""
        return self.layout.checkpoint(self.step, self.attempt, self.at_turn)


def commit_checkpoint(
    commit: CheckpointCommit, source: Source, labour: Labour, former: Former | None = None
) -> Former:
    """Make an image durable as a checkpoint; returns what the next one may share with it."""
    layout = commit.layout
    partial = None
    unsynced: list[int] = []
    try:
        partial = begin_checkpoint(layout, commit.final)
        file = write_part(partial, 0, source, labour, former, unsynced)
        written = Former.written(commit.final, partial, file, source, former)
        close_checkpoint(commit, partial, [file], unsynced)
    except OSError as error:
        raise SaveFailed(explain(layout, error, source.size_bytes)) from error
    finally:
        for descriptor in unsynced:
            os.close(descriptor)
        if partial is not None:
            remove_folder(partial)  # by now it has its final name, or is useless
    return written


def begin_checkpoint(layout: RunLayout, final: Path) -> Path:
    """The folder in which a checkpoint is put together."""
    for stale in layout.stale_partials(final, os.getpid()):
        remove_folder(stale)  # a keeper was killed in this commit, or in an older one
    partial = layout.partial(final, os.getpid())
    partial.mkdir()
    pass_point("begun")
    return partial


def write_part(
    partial: Path,
    rank: int,
    source: Source,
    labour: Labour,
    former: Former | None = None,
    unsynced: list[int] | None = None,
) -> DataFile:
    """Make the file of one rank durable; returns what the manifest says of it.

    What `former` has is linked instead, if it is much. With `unsynced` the file is left open
    there, and the caller flushes it.
    """
    data = partial / rank_file(rank)
    hashing = source.hashing
    labour.put_to(hashing, threads_for(source.ranges.sizes))
    sharing = None
    if former is not None and former.resembles(source):
        hashing.finish()
        sharing = former.share_with(source)
    if former is not None and sharing is not None and former.link(sharing, partial):
        return _write_changed(data, source, labour, sharing, unsynced)
    try:
        size = write_file(data, source.views, labour, unsynced)
    finally:
        hashing.finish()  # also if the disk is full: it holds the memory
    if unsynced is None:
        pass_point("synced")
    rows = zip(source.ranges.names, source.ranges.offsets, source.ranges.sizes, strict=True)
    checksums = _in_hex(hashing.digests())
    parts = tuple(Part(*row, checksum) for row, checksum in zip(rows, checksums, strict=True))
    return DataFile(data.name, size, parts)


def _write_changed(
    data: Path, source: Source, labour: Labour, sharing: Sharing, unsynced: list[int] | None
) -> DataFile:
    """Write what the linked files lack, as a valid safetensors file."""
    ranges = source.ranges
    own = [index for index, file in enumerate(sharing.files) if not file]
    wrapper = wrap_header(bytes(source.view(0)), [ranges.names[index] for index in own[1:]])
    size = write_file(data, [memoryview(wrapper), *map(source.view, own)], labour, unsynced)
    if unsynced is None:
        pass_point("synced")
    offsets = list(sharing.offsets)
    position = len(wrapper)
    for index in own:
        offsets[index] = position
        position += ranges.sizes[index]
    checksums = _in_hex(source.hashing.digests())
    rows = zip(ranges.names, offsets, ranges.sizes, checksums, sharing.files, strict=True)
    top = Part("wrapper", 0, len(wrapper), digest(wrapper).hex())
    return DataFile(data.name, size, tuple(map(Part._make, rows)), sharing.linked, top)


def _in_hex(digests: Sequence[bytes]) -> list[str]:
    return [each.hex() for each in digests]


def close_checkpoint(
    commit: CheckpointCommit,
    partial: Path,
    files: Sequence[DataFile],
    unsynced: Sequence[int] = (),
) -> None:
    """All parts are written: write the manifest, and give the checkpoint its name.

    Parts that are not durable yet are open as `unsynced`.
    """
    manifest = Manifest(
        run_id=commit.run_id,
        attempt=commit.attempt,
        step=commit.step,
        reason=commit.reason,
        saved_at=time.time(),
        files=tuple(files),
        origin=commit.origin,
        metrics=commit.metrics,
        holdfast=commit.version,
    )
    _write_synced(partial / MANIFEST, manifest.to_bytes(), unsynced)
    if unsynced:
        pass_point("synced")
    pass_point("manifest-written")
    sync_folder(partial)
    pass_point("before-publish")
    refuse_if_replaced(commit.layout, commit.run_id)
    _refuse_if_fenced(commit)
    _refuse_if_void(commit)
    with commit.turns.take_name(commit.key):
        # False is ignored: another process has published the same state.
        publish_folder(partial, commit.final, durable=False)
    sync_folder(commit.layout.checkpoints)
    pass_point("published")
    try:
        _refuse_if_void(commit)
    except SaveFailed:
        # A rule has called it bad since the last check, perhaps before it had its name.
        set_aside_void(commit.layout)
        raise


def is_replaced(layout: RunLayout, run_id: str) -> bool:
    """Whether the folder was removed and then made again, by another run."""
    return bool(read_json(layout.identity).get("run_id", run_id) != run_id)


def refuse_if_replaced(layout: RunLayout, run_id: str) -> None:
    """The other run would resume from what is written there."""
    if is_replaced(layout, run_id):
        raise SaveFailed(f"{layout.folder} was removed, and is the folder of another run now")


def _refuse_if_fenced(commit: CheckpointCommit) -> None:
    newest = commit.layout.attempt_numbers()[-1:]
    if newest and newest[0] > commit.writer_attempt:
        raise Fenced(
            f"attempt {newest[0]} has taken over this run; "
            f"attempt {commit.writer_attempt} writes nothing any more."
        )


def _refuse_if_void(commit: CheckpointCommit) -> None:
    """A rule may have called the state bad while it was being written."""
    if is_void(void_steps(commit.layout), commit.attempt, commit.step):
        raise SaveFailed(f"a rule has called step {commit.step} bad")


def explain(layout: RunLayout, error: OSError, wanted: int) -> str:
    """Why a checkpoint of so many bytes could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError, AttributeError):
            room = os.statvfs(layout.folder)
            free = room.f_bavail * room.f_frsize
            return (
                f"the disk is full ({wanted / 1e6:.1f} MB wanted, {free / 1e6:.1f} MB free "
                f"at {layout.folder})"
            )
    return f"{error.strerror or error} ({layout.folder})"


def _write_synced(path: Path, data: bytes, unsynced: Sequence[int]) -> None:
    """Write a file, and flush it and other open ones at once."""
    with os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)
        file.flush()
        sync_together([*unsynced, file.fileno()])
