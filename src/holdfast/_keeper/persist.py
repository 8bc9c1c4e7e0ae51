"""From an image in memory to a committed checkpoint.

The order is the invariant: data, fsync, manifest, fsync, folder, rename, fsync
of the folder above. A checkpoint has its final name only when every byte of it
is on the disk, so a kill or a power cut at any stage leaves either nothing that
counts or the whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._errors import SaveFailed
from holdfast._record.atomic import publish_folder, remove_folder, sync_folder
from holdfast._record.faults import pass_point
from holdfast._record.image import PAGE, Extent
from holdfast._record.layout import MANIFEST, RunLayout, rank_file
from holdfast._record.manifest import DataFile, Manifest, Part
from holdfast._record.void import is_void, void_steps

_CHUNK_BYTES = 32 << 20


class Fenced(SaveFailed):
    """A newer attempt has taken the run: this one may not commit any more."""


@dataclass(frozen=True)
class Commit:
    """What is to be committed, and by whom."""

    layout: RunLayout
    run_id: str
    attempt: int  # the attempt that trained this state
    writer_attempt: int  # the attempt that writes it
    step: int
    at_turn: bool  # of an epoch, and not at the boundary of the step
    reason: str
    metrics: dict[str, float | None]
    version: str
    origin: tuple[int, int] | None = None

    @property
    def final(self) -> Path:
        """Where it will be."""
        return self.layout.checkpoint(self.step, self.attempt, self.at_turn)


def commit_checkpoint(
    commit: Commit,
    views: Sequence[memoryview],
    extents: Sequence[Extent],
    digests: Callable[[], Sequence[bytes]],
) -> None:
    """Make an image durable as a checkpoint; `digests` is asked when the bytes are written."""
    layout = commit.layout
    partial = None
    try:
        partial = begin_checkpoint(layout, commit.final)
        file = write_part(partial, 0, views, extents, digests)
        close_checkpoint(commit, partial, [file])
    except OSError as error:
        raise SaveFailed(explain(layout, error, sum(view.nbytes for view in views))) from error
    finally:
        if partial is not None:
            remove_folder(partial)  # by now it has its final name, or is of no use


def begin_checkpoint(layout: RunLayout, final: Path) -> Path:
    """The folder in which a checkpoint is put together."""
    for stale in layout.partials_of(final):
        # Of a keeper that was killed in this very commit: nobody else writes this state.
        remove_folder(stale)
    partial = layout.partial(final, os.getpid())
    partial.mkdir()
    pass_point("begun")
    return partial


def write_part(
    partial: Path,
    rank: int,
    views: Sequence[memoryview],
    extents: Sequence[Extent],
    digests: Callable[[], Sequence[bytes]],
) -> DataFile:
    """Make the file of one rank durable; returns what the manifest says of it."""
    data = partial / rank_file(rank)
    size = _write_data(data, views)
    pass_point("synced")
    found = digests()
    parts = tuple(
        Part(extent.name, extent.offset, extent.size_bytes, checksum.hex())
        for extent, checksum in zip(extents, found, strict=True)
    )
    return DataFile(data.name, size, parts)


def close_checkpoint(commit: Commit, partial: Path, files: Sequence[DataFile]) -> None:
    """All parts are durable: write the manifest, and give the checkpoint its name."""
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
    _write_synced(partial / MANIFEST, manifest.to_bytes())
    pass_point("manifest-written")
    sync_folder(partial)
    pass_point("before-publish")
    _refuse_if_fenced(commit)
    _refuse_if_void(commit)
    publish_folder(partial, commit.final)  # who was faster has written the same
    pass_point("published")


def _refuse_if_fenced(commit: Commit) -> None:
    newest = commit.layout.attempt_numbers()[-1:]
    if newest and newest[0] > commit.writer_attempt:
        raise Fenced(
            f"attempt {newest[0]} has taken over this run; "
            f"attempt {commit.writer_attempt} writes nothing any more."
        )


def _refuse_if_void(commit: Commit) -> None:
    """A rule may have called the state bad while it was being written."""
    if is_void(void_steps(commit.layout), commit.attempt, commit.step):
        raise SaveFailed(f"a rule has called step {commit.step} bad")


def explain(layout: RunLayout, error: OSError, wanted: int) -> str:
    """Why a checkpoint of so many bytes could not be written, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError, AttributeError):
            room = os.statvfs(layout.folder)
            free = room.f_bavail * room.f_frsize
            return (
                f"the disk is full ({wanted / 1e6:.1f} MB wanted, {free / 1e6:.1f} MB free "
                f"at {layout.folder})"
            )
    return f"{error.strerror or error} ({layout.folder})"


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_data(path: Path, views: Sequence[memoryview]) -> int:
    """Write the views one after another and flush them; returns the number of bytes."""
    descriptor = _open_data(path, views)
    try:
        offset = 0
        total = sum(view.nbytes for view in views)
        for view in views:
            for start in range(0, view.nbytes, _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                written = 0
                while written < chunk.nbytes:
                    try:
                        count = os.write(descriptor, chunk[written:])
                    except OSError as error:
                        if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                            raise
                        continue
                    written += count
                    if count % PAGE and written < chunk.nbytes:
                        _leave_direct(descriptor)
                offset += chunk.nbytes
                if offset * 2 >= total:
                    pass_point("half-written")
        pass_point("written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return offset


def _open_data(path: Path, views: Sequence[memoryview]) -> int:
    """Open for direct writes, several times faster, where memory and file system allow them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    direct = getattr(os, "O_DIRECT", 0)
    if direct and len(views) == 1 and views[0].nbytes % PAGE == 0:
        try:
            descriptor = os.open(path, flags | direct, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
        else:
            return descriptor
    return os.open(path, flags, 0o644)


def _leave_direct(descriptor: int) -> bool:
    """Go on with plain writes, where direct ones are refused or no longer aligned."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)
