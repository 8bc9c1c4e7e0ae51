"""From an image in memory to a committed checkpoint, by the keeper or the trainer.

The order is the invariant: data and manifest, fsync of both and of their folder, rename, fsync of
the parent folder, line in the journal; last `remove_old`, which the caller runs. A checkpoint has
its final name only when every byte of it is on the disk, so a kill or a power cut at any stage
leaves either nothing that counts or a complete checkpoint. With several ranks each part is flushed
in `direct_io.write_file`, before the manifest exists. With one, data file (`unsynced`) and manifest
are flushed in parallel: the file system then commits both together. For a small state most of the
time is spent in flushes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._environment.processes.identity import of_process
from holdfast._errors import SaveFailed
from holdfast._store.commit.chunks import CommitThreads
from holdfast._store.commit.dedup import PreviousCheckpoint, Sharing
from holdfast._store.commit.direct_io import write_file
from holdfast._store.commit.fault_points import fault_point
from holdfast._store.commit.retention import Kept, remove_others
from holdfast._store.commit.source import Source, threads_for
from holdfast._store.commit.write_queue import Key, PublishOrder
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import publish_folder, remove_folder, sync_folder, sync_together
from holdfast._store.folder.attempts import read_json, read_origins
from holdfast._store.folder.layout import MANIFEST, RunLayout, rank_file
from holdfast._store.folder.lineage import is_void, set_aside_void, void_steps
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import wrap_header
from holdfast._store.format.manifest import DataFile, Manifest, Part
from holdfast._store.memory.control import mark_of


class Fenced(SaveFailed):
    """A newer attempt has taken the run: this one may not commit any more."""


@dataclass(frozen=True)
class Policy:
    """What the trainer tells the keeper once, at its start: most settings are here.

    A new setting is the last field, with a default, and gets its value in `Session._start_keeper`;
    if the environment can change it, by a function at the end of `keeper_client.py`. Only a tuple,
    a Path or a dict with numbers as keys needs a line in `KeeperConfig.from_json`.
    """

    layout: RunLayout
    run_id: str
    attempt: int
    line: dict[int, int | None]
    keep_last: int
    best: tuple[str, str] | None
    version: str
    rank: int = 0
    size: int = 1  # of the world
    requeue_limit: int = 3  # of a job, while no attempt makes a step
    hang_seconds: float | None = None  # without a step; None: learned from the run
    hang_restarts: bool = False  # True if `--hang-timeout` asked for a restart
    mirror: str | None = None  # the address of the mirror
    mirror_keep_last: int = 3
    notices: str = "off"  # of which cloud; "auto" to find out
    keep_memory_seconds: float = 0.0  # for the next attempt, after a death


@dataclass(frozen=True)
class State:
    attempt: int  # the attempt that trained it
    step: int
    reason: str
    metrics: dict[str, float | None]
    at_epoch_end: bool = False  # at the end of an epoch, not at the boundary of the step

    @property
    def key(self) -> Key:
        """The greater one is the newer state."""
        return self.attempt, mark_of(self.step, self.at_epoch_end)

    def folder(self, layout: RunLayout) -> Path:
        return layout.checkpoint(self.step, self.attempt, self.at_epoch_end)


def keep_checkpoint(
    policy: Policy,
    state: State,
    source: Source,
    threads: CommitThreads,
    former: PreviousCheckpoint | None = None,
    order: PublishOrder | None = None,
) -> PreviousCheckpoint | None:
    """Make an image durable as a checkpoint, and record it in the journal.

    Returns what the next one may share with it; None if it is committed already.
    """
    began, order = time.monotonic(), order or PublishOrder()
    layout, final = policy.layout, state.folder(policy.layout)
    refuse_if_replaced(layout, policy.run_id)
    if final.exists():
        return None
    partial = None
    unsynced: list[int] = []
    try:
        partial = begin_checkpoint(layout, final)
        file = write_part(partial, 0, source, threads, former, unsynced)
        written = PreviousCheckpoint.written(final, partial, file, source, former)
        close_checkpoint(policy, state, partial, [file], order, unsynced)
    except OSError as error:
        raise SaveFailed(explain(layout, error, source.size_bytes)) from error
    finally:
        for descriptor in unsynced:
            os.close(descriptor)
        if partial is not None:
            remove_folder(partial)  # by now it has its final name, or is useless
    _record(policy, state, source.size_bytes, file.size_bytes, began, order)
    return written


def keep_parts(
    policy: Policy,
    state: State,
    partial: Path,
    files: Sequence[DataFile],
    began: float,
    order: PublishOrder,
) -> None:
    """Commit a checkpoint whose parts the ranks have written."""
    size_bytes = sum(file.image_bytes for file in files)
    try:
        close_checkpoint(policy, state, partial, files, order)
    except OSError as error:
        raise SaveFailed(explain(policy.layout, error, size_bytes)) from error
    finally:
        remove_folder(partial)
    _record(policy, state, size_bytes, sum(file.size_bytes for file in files), began, order)


def _record(
    policy: Policy, state: State, size_bytes: int, own_bytes: int, began: float, order: PublishOrder
) -> None:
    written = {"written_bytes": own_bytes} if own_bytes < size_bytes else {}
    ranks = {"ranks": policy.size} if policy.size > 1 else {}
    seconds = time.monotonic() - began
    with order.take("note", state.key):
        journal.append(
            policy.layout.journal,
            "checkpoint",
            step=state.step,
            attempt=state.attempt,
            reason=state.reason,
            size_bytes=size_bytes,
            seconds=round(seconds, 4),
            name=state.folder(policy.layout).name,
            metrics=state.metrics,
            **written,
            **ranks,
        )


def remove_old(policy: Policy, known: dict[Path, Kept] | None = None) -> None:
    remove_others(policy.layout, policy.line, policy.keep_last, policy.best, known)


def begin_checkpoint(layout: RunLayout, final: Path) -> Path:
    """The folder in which a checkpoint is put together."""
    for stale, writer in layout.stale_partials(final, os.getpid()):
        # A keeper was killed in this commit, or in an older one. One that lives still writes: the
        # trainer makes checkpoints itself, beside its keeper, once there is no memory for them.
        if writer == os.getpid() or not of_process(writer).started:
            remove_folder(stale)
    partial = layout.partial(final, os.getpid())
    partial.mkdir()
    fault_point("begun")
    return partial


def write_part(
    partial: Path,
    rank: int,
    source: Source,
    threads: CommitThreads,
    former: PreviousCheckpoint | None = None,
    unsynced: list[int] | None = None,
) -> DataFile:
    """Write the file of one rank and flush it; returns what the manifest says of it.

    What `former` has is linked instead, if it is much. With `unsynced` the file is left open
    there, and the caller flushes it.
    """
    data = partial / rank_file(rank)
    hashing = source.hashing
    threads.put_to(hashing, threads_for(source.ranges.sizes))
    sharing = None
    if former is not None and former.resembles(source):
        hashing.finish()
        sharing = former.share_with(source)
    if former is not None and sharing is not None and former.link(sharing, partial):
        return _write_changed(data, source, threads, sharing, unsynced)
    try:
        size = write_file(data, source.views, threads, unsynced)
    finally:
        hashing.finish()  # also if the disk is full: it holds the memory
    if unsynced is None:
        fault_point("synced")
    ranges, checksums = source.ranges, map(bytes.hex, hashing.digests())
    rows = zip(ranges.names, ranges.offsets, ranges.sizes, checksums, strict=True)
    return DataFile(data.name, size, tuple(Part(*row) for row in rows))


def _write_changed(
    data: Path, source: Source, threads: CommitThreads, sharing: Sharing, unsynced: list[int] | None
) -> DataFile:
    """Write what the linked files lack, as a valid safetensors file."""
    ranges = source.ranges
    own = [index for index, file in enumerate(sharing.files) if not file]
    wrapper = wrap_header(bytes(source.view(0)), [ranges.names[index] for index in own[1:]])
    size = write_file(data, [memoryview(wrapper), *map(source.view, own)], threads, unsynced)
    if unsynced is None:
        fault_point("synced")
    offsets = list(sharing.offsets)
    position = len(wrapper)
    for index in own:
        offsets[index] = position
        position += ranges.sizes[index]
    checksums = map(bytes.hex, source.hashing.digests())
    rows = zip(ranges.names, offsets, ranges.sizes, checksums, sharing.files, strict=True)
    top = Part("wrapper", 0, len(wrapper), digest(wrapper).hex())
    return DataFile(data.name, size, tuple(map(Part._make, rows)), sharing.linked, top)


def close_checkpoint(
    policy: Policy,
    state: State,
    partial: Path,
    files: Sequence[DataFile],
    order: PublishOrder,
    unsynced: Sequence[int] = (),
) -> None:
    """All parts are written: write the manifest, and give the checkpoint its name.

    Parts that are not durable yet are open as `unsynced`.
    """
    layout = policy.layout
    manifest = Manifest(
        run_id=policy.run_id,
        attempt=state.attempt,
        step=state.step,
        reason=state.reason,
        saved_at=time.time(),
        files=tuple(files),
        origin=read_origins(layout, [state.attempt]).get(state.attempt),
        metrics=state.metrics,
        holdfast=policy.version,
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(open_plain(partial / MANIFEST, flags), "wb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        sync_together([*unsynced, file.fileno()])
    if unsynced:
        fault_point("synced")
    fault_point("manifest-written")
    sync_folder(partial)
    fault_point("before-publish")
    refuse_if_replaced(layout, policy.run_id)
    newest = max(layout.attempt_numbers(), default=0)
    if newest > policy.attempt:
        raise Fenced(
            f"attempt {newest} has taken over this run; "
            f"attempt {policy.attempt} writes nothing any more."
        )
    _refuse_if_void(layout, state)
    with order.take("name", state.key):
        # False means that another process has published this state: nothing is left to do.
        publish_folder(partial, state.folder(layout), durable=False)
    sync_folder(layout.checkpoints)
    fault_point("published")
    try:
        _refuse_if_void(layout, state)
    except SaveFailed:
        # A rule has called it bad since the last check, perhaps before it had its name.
        set_aside_void(layout)
        raise


def is_replaced(layout: RunLayout, run_id: str) -> bool:
    """Whether the folder was removed and then made again, by another run."""
    return bool(read_json(layout.identity).get("run_id", run_id) != run_id)


def refuse_if_replaced(layout: RunLayout, run_id: str) -> None:
    """The other run would resume from what is written there."""
    if is_replaced(layout, run_id):
        raise SaveFailed(f"{layout.folder} was removed, and is the folder of another run now")


def _refuse_if_void(layout: RunLayout, state: State) -> None:
    """A rule may have called the state bad while it was being written."""
    if is_void(void_steps(layout), state.attempt, state.step):
        raise SaveFailed(f"a rule has called step {state.step} bad")


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
