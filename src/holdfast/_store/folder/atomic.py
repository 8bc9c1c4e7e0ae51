"""Files and folders that are whole or absent: all renames in a run folder are here.

write, fsync, rename, fsync of the folder: all four are needed (measured). Without one of them a
power cut can lose the file or leave it empty.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from holdfast._store.commit.fault_points import fault_point
from holdfast._store.format.threads import by_threads

_in_progress: set[Path] = set()  # the parts that threads of this process are writing


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder: a rename is only in the directory, flushed on its own."""
    if os.name == "nt":  # Windows cannot open a folder, and flushes renames by itself
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_together(descriptors: Sequence[int]) -> None:
    """Flush several files at once, by a thread each; the first error is raised here."""
    left = iter(descriptors)

    def sync(_: int) -> None:
        for descriptor in left:
            os.fsync(descriptor)

    by_threads(sync, len(descriptors))


def _unfinished(path: Path, suffix: str) -> Path:
    """The name of a file while it is written; random, since two hosts may have equal pids."""
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.{suffix}")


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the file at `path` by `data`: a reader sees the old bytes or the new ones."""
    part = _unfinished(path, "part")
    _in_progress.add(part)
    try:
        with part.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    finally:
        _in_progress.discard(part)
    if durable:
        sync_folder(path.parent)


def wait_for_writes(seconds: float) -> None:
    """Wait until no thread is in `write_atomic`: a process that ends now would leave its part."""
    deadline = time.monotonic() + seconds
    while _in_progress and time.monotonic() < deadline:
        time.sleep(0.005)


def create_atomic(path: Path, data: bytes) -> bool:
    """Make a durable file unless it exists; of concurrent processes one succeeds."""
    part = _unfinished(path, "new")
    write_atomic(part, data)
    try:
        _link_or_replace(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


@contextlib.contextmanager
def writing_whole(path: Path, *, replace: bool) -> Iterator[IO[bytes]]:
    """A file to write into, which gets its name when it is whole and durable.

    FileExistsError if the name is taken by then and `replace` is False. If the system has files
    without a name, a kill leaves nothing at all.
    """
    part = _unfinished(path, "part")
    nameless = _open_nameless(path.parent)
    try:
        with part.open("xb") if nameless is None else nameless as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            fault_point("before-naming")
            if nameless is not None:
                # With a descriptor of a folder Python calls linkat, which follows the link.
                source, number = f"/proc/self/fd/{file.fileno()}", file.fileno()
                name = part if replace else path
                os.link(source, name, src_dir_fd=number, follow_symlinks=True)
        if replace:
            os.replace(part, path)
        elif nameless is None:
            _link_or_replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    sync_folder(path.parent)


def _link_or_replace(part: Path, path: Path) -> None:
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: the last one wins
        os.replace(part, path)


def _open_nameless(folder: Path) -> IO[bytes] | None:
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").is_dir():
        return None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:  # not on this file system
        return None
    return os.fdopen(descriptor, "wb")


def publish_folder(prepared: Path, final: Path, *, durable: bool = True) -> bool:
    """Give a finished folder its final name; False if that name is taken.

    Without `durable` the caller flushes the parent folder, if the name must survive a power cut.
    The folder must not be empty: rename(2) silently replaces an empty folder.
    """
    try:
        prepared.rename(final)
    except OSError:
        if final.exists():
            return False
        raise
    if durable:
        sync_folder(final.parent)
    return True


@contextlib.contextmanager
def writing_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into, which gets its name when it is whole.

    FileExistsError if the name is taken by then and `replace` is False. Files in it are made
    durable; those in its folders have to be already.
    """
    prepared = _unfinished(path, "unfinished")
    try:
        prepared.mkdir()
        yield prepared
        for each in prepared.iterdir():
            if each.is_file():
                with each.open("rb+") as file:
                    os.fsync(file.fileno())
        sync_folder(prepared)
        if replace and path.exists():
            remove_folder(path)
        if not publish_folder(prepared, path):
            raise FileExistsError(str(path))
    finally:
        remove_folder(prepared)


def move_aside(path: Path, folder: Path, prefix: str = "") -> Path:
    """Move a file or folder into `folder` under a free name; returns the new path."""
    _refuse_link(folder)
    folder.mkdir(exist_ok=True)
    name = prefix + path.name.lstrip(".")
    target = folder / name
    count = 1
    while os.path.lexists(target):
        count += 1
        target = folder / f"{name}.{count}"
    path.rename(target)
    sync_folder(folder)
    sync_folder(path.parent)
    return target


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():  # its target does not belong to the run
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def discard_folder(path: Path) -> None:
    """Remove a folder; renamed first, so that a part of it is never taken for a complete one."""
    _refuse_link(path)
    fault_point("before-removal")
    doomed = path.with_name(f".removing-{path.name}")
    path.rename(doomed)
    for entry in sorted(doomed.iterdir()):
        entry.unlink()
        fault_point("half-removed")
    remove_folder(doomed)


def remove_folder(path: Path) -> None:
    """Remove a folder that is not needed, as far as the file system allows."""
    import shutil  # slow to import, and rarely needed

    shutil.rmtree(path, ignore_errors=True)
