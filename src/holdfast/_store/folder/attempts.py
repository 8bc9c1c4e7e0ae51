"""Attempts: which process has the run folder, since when, and how it ended.

An attempt's number is taken by renaming a prepared folder to it, which only one process can do, and
which leaves no moment without a lease in it. A lease of this machine is judged by its process. One
of another machine is judged by whether its heartbeat moves while we watch: the clocks of two
machines are never compared.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import ProcessIdentity, of_process
from holdfast._environment.slurm.job import find_job
from holdfast._errors import CheckpointError, FolderError, NotARun, RunIsLive
from holdfast._store.folder.atomic import (
    create_atomic,
    publish_folder,
    remove_folder,
    sync_folder,
    write_atomic,
)
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import read_plain
from holdfast._store.format import manifest
from holdfast._store.format.schema import parse_record
from holdfast._text import record as record_in
from holdfast._text import say

if TYPE_CHECKING:
    from holdfast._store.folder.lineage import Origin

BEAT_SECONDS = 2.0
SILENT_SECONDS = 15.0
_STUCK_SECONDS = 120.0
_NOT_OF_THE_FOLDER = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_HINTS = {
    errno.EMFILE: "Close some files, or allow more: ulimit -n 4096",
    errno.ENFILE: "The whole machine has too many files open: end some programs.",
    errno.ENOMEM: "Free some memory, or ask for more.",
    errno.EAGAIN: "End some processes, or allow more: ulimit -u",
    errno.ENAMETOOLONG: "Choose a folder with a shorter name.",
    errno.ENOSPC: "Free some room on its disk, or choose a folder on another one.",
    errno.EDQUOT: "Free some room of your quota, or choose a folder on another disk.",
}
_held: dict[tuple[Path, int], tuple[int, int]] = {}  # live attempts of this process, by inode


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty if it is missing or invalid."""
    try:
        return parse_record(read_plain(path))
    except (OSError, ValueError):
        return {}


def write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode(), durable=durable)


def cannot_write(folder: Path, error: OSError) -> FolderError:
    default = "Choose a folder that you may write to, on a disk with room."
    hint = _HINTS.get(error.errno or 0, default)
    is_of_it = error.errno not in _NOT_OF_THE_FOLDER
    what = "this run folder cannot be written" if is_of_it else "this run cannot be opened"
    return FolderError(f"{folder}: {what} ({error.strerror or error}).\n{hint}")


def open_folder(folder: Path) -> tuple[RunLayout, str]:
    """Make the run folder if it is missing; returns its paths and the run's id."""
    layout = RunLayout(folder.absolute())
    refuse_links(layout)
    try:
        if not layout.folder.exists():
            layout.folder.mkdir(parents=True, exist_ok=True)
        if (record := read_json(layout.identity)).get("run_id"):
            settle_identity(layout, record)
        else:
            _give_identity(layout)
        # After the identity: by it the keeper of a run whose folder was removed knows that these
        # are not its own.
        for path in (layout.attempts, layout.checkpoints, layout.requests):
            path.mkdir(exist_ok=True)
        probe = layout.attempts / _private_name(".probe-")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(folder, error) from error
    return layout, str(read_json(layout.identity)["run_id"])


def _give_identity(layout: RunLayout) -> None:
    identity = {
        "run_id": os.urandom(16).hex(),
        "created": time.time(),
        "folder": str(layout.folder),
    }
    # Ranks that start at once must agree on one id.
    if not create_atomic(layout.identity, (json.dumps(identity, indent=1) + "\n").encode()) and (
        not read_json(layout.identity).get("run_id")
    ):
        write_json(layout.identity, identity)


def find_run(folder: Path) -> tuple[RunLayout, str]:
    layout = RunLayout(folder.absolute())
    record = read_json(layout.identity)
    if not record.get("run_id"):
        raise NotARun(
            f"{folder}: there is no run here.\nA run folder is what holdfast.Run was given."
        )
    refuse_links(layout)
    return layout, own_id(layout, record)


def refuse_links(layout: RunLayout) -> None:
    """Refuse a run of which a folder is a link: it would be followed for writing or removal."""
    if (link := layout.linked_folder()) is not None:
        raise FolderError(
            f"{link}: is a symbolic link, and holdfast touches nothing outside a run folder.\n"
            "Move the folder here in place of the link, or link the whole run folder."
        )


def lives_elsewhere(layout: RunLayout) -> int:
    """The attempts of a run on other machines, before this folder was fetched from a mirror."""
    count = read_json(layout.identity).get("attempts_elsewhere")
    return count if isinstance(count, int) else 0


def lease_holder(layout: RunLayout, attempt: int) -> ProcessIdentity | None:
    """The process that took this attempt, or None if the lease is unreadable."""
    return identity_in(read_json(layout.lease(attempt)).get("process"))


def keeper_of(layout: RunLayout, attempt: int) -> ProcessIdentity | None:
    return identity_in(read_json(layout.heartbeat(attempt)).get("keeper"))


def note_keeper(layout: RunLayout, attempt: int, pid: int) -> None:
    """Record the keeper before its first heartbeat: the next attempt must wait for it."""
    before = {"beat": 0, "time": time.time(), **read_json(layout.heartbeat(attempt))}
    record = {**before, "keeper": asdict(of_process(pid))}
    with contextlib.suppress(OSError):
        write_json(layout.heartbeat(attempt), record, durable=False)


def is_live_here(layout: RunLayout, attempt: int) -> bool | None:
    """Whether the process of this attempt still trains; None if it is of another machine."""
    if layout.exit(attempt).exists():
        return False
    holder = lease_holder(layout, attempt)
    if holder is None:
        return False
    return holder.is_alive() if holder.is_here() else None


def is_live(layout: RunLayout, attempt: int, patience_seconds: float = SILENT_SECONDS) -> bool:
    """The same for any machine; may watch the heartbeat for a while."""
    if (known := is_live_here(layout, attempt)) is not None:
        return known
    first = read_json(layout.heartbeat(attempt)).get("beat")
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        time.sleep(0.25)
        if layout.exit(attempt).exists():
            return False
        if read_json(layout.heartbeat(attempt)).get("beat") != first:
            return True
    return False


def claim(
    layout: RunLayout,
    folder: Path,
    say: Callable[[str], None],
    meanwhile: Callable[[int], None] = lambda _: None,
) -> int:
    """Take the next attempt number, or refuse if another process has the run.

    `meanwhile` is called with the last attempt while its keeper is waited for.
    """
    while True:
        numbers = layout.attempt_numbers()
        newest = numbers[-1] if numbers else 0
        if numbers and not _take_over(layout, newest, folder, say):
            _refuse_if_live(layout, newest, folder, say)
            await_keeper(layout, newest, say, meanwhile)
        try:
            # A number that a checkpoint has is taken, even if its attempt's folder is gone.
            taken = [attempt for _, attempt, _ in layout.checkpoint_folders()]
            taken.append(lives_elsewhere(layout))
            number = max([newest, *taken]) + 1
            if _publish_lease(layout, number):
                _held[layout.folder, number] = _inode(layout.attempt(number))
                return number
        except OSError as error:
            raise cannot_write(folder, error) from error


def release(layout: RunLayout, attempt: int) -> None:
    """This process has ended an attempt, even if the disk could not record that."""
    _held.pop((layout.folder, attempt), None)


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _private_name(prefix: str) -> str:
    return f"{prefix}{os.getpid()}-{os.urandom(4).hex()}"


def _publish_lease(layout: RunLayout, attempt: int) -> bool:
    """Take this number; False if another process was faster."""
    prepared = layout.attempts / _private_name(".claim-")
    prepared.mkdir()
    lease: dict[str, Any] = {"process": asdict(of_process()), "since": time.time()}
    job = find_job(variables.of_job())
    if job is not None:
        lease["job"] = {"number": job.number, "restarts": job.restarts}
    try:
        write_json(prepared / "lease.json", lease, durable=False)
        # Not durable: the number must survive a power cut only once it has a checkpoint, and
        # `note_origin` ensures that.
        return publish_folder(prepared, layout.attempt(attempt), durable=False)
    finally:
        remove_folder(prepared)


def _refuse_if_live(
    layout: RunLayout, attempt: int, folder: Path, say: Callable[[str], None]
) -> None:
    holder = lease_holder(layout, attempt)
    if holder is None or layout.exit(attempt).exists():
        return
    if holder == of_process():
        # By the inode: the folder may have another name by now.
        if _inode(layout.attempt(attempt)) not in _held.values():
            return
        fact = "this process trains here already, and has not left that run"
    else:
        if not holder.is_here():
            say(
                f"{folder} was last used on {holder.host} (pid {holder.pid}), which did not "
                f"close it; watching up to {SILENT_SECONDS:.0f} s whether it is still alive."
            )
        if not is_live(layout, attempt):
            return
        fact = f"another process trains here, pid {holder.pid} on {holder.host}"
    raise RunIsLive(
        f"{folder}: {fact}.\nStop it first (holdfast stop {folder}), or use another folder.",
        pid=holder.pid,
        host=holder.host,
    )


def _take_over(layout: RunLayout, attempt: int, folder: Path, say: Callable[[str], None]) -> bool:
    """Whether an earlier start of our own SLURM job has the run: then we take it over.

    SLURM has given that start up, and a node that it has lost may not know. Our number fences it
    off: it writes nothing any more.
    """
    holder, job = lease_holder(layout, attempt), find_job(variables.of_job())
    if holder is None or job is None or layout.exit(attempt).exists():
        return False
    held = record_in(read_json(layout.lease(attempt)).get("job"))
    restarts = held.get("restarts")
    is_earlier = isinstance(restarts, int) and restarts < job.restarts
    if held.get("number") != job.number or not is_earlier:
        return False
    if holder.is_here() and not holder.is_alive():
        return False
    say(
        f"{folder}: SLURM has restarted the job; taking over from {holder.host} (pid {holder.pid})."
    )
    return True


@contextlib.contextmanager
def beating(layout: RunLayout, attempt: int, *, is_needed: bool = True) -> Iterator[None]:
    """Beat until there is a keeper: a large state takes long to load."""
    if not is_needed:  # another rank does it
        yield
        return
    over = threading.Event()

    def beat() -> None:
        count = 0
        while not over.wait(BEAT_SECONDS):
            count += 1
            with contextlib.suppress(OSError):
                record = {"beat": f"starting {count}", "time": time.time()}
                write_json(layout.heartbeat(attempt), record, durable=False)

    thread = threading.Thread(target=beat, name="holdfast-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def await_keeper(
    layout: RunLayout,
    attempt: int,
    say: Callable[[str], None],
    meanwhile: Callable[[int], None] = lambda _: None,
) -> None:
    """Wait until the keeper of a dead process has finished; kill it if it is stuck."""
    if layout.exit(attempt).exists():
        return  # written after everything was durable: the keeper only waits for its process
    keeper = keeper_of(layout, attempt)
    if keeper is None or not keeper.is_here() or not keeper.is_alive():
        return
    began = moved = time.monotonic()
    newest, told = -1, False
    while keeper.is_alive() and not layout.exit(attempt).exists():
        now = time.monotonic()
        if (write := layout.newest_write()) != newest:
            newest, moved = write, now
        if now - began > 1 and not told:
            say(f"the last attempt's keeper (pid {keeper.pid}) is still writing; waiting for it.")
            told = True
        if now - moved > _STUCK_SECONDS:
            say(f"the last attempt's keeper (pid {keeper.pid}) is stuck; ending it.")
            os.kill(keeper.pid, signal.SIGKILL)
            return
        meanwhile(attempt)
        time.sleep(0.01)


def read_origins(layout: RunLayout, numbers: Iterable[int] | None = None) -> dict[int, Origin]:
    """The attempts that began to train, each with the (attempt, step) it came from."""
    origins: dict[int, Origin] = {}
    for number in layout.attempt_numbers() if numbers is None else numbers:
        found = read_json(layout.origin(number))
        try:
            attempt = found["attempt"]
            origins[number] = None if attempt is None else (int(attempt), int(found["step"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # it never began, or the file is damaged
    return origins


def note_origin(layout: RunLayout, attempt: int, origin: Origin) -> None:
    """Record durably where an attempt came from, and that its number is taken."""
    source, step = origin if origin is not None else (None, None)
    write_json(layout.origin(attempt), {"attempt": source, "step": step})
    sync_folder(layout.attempts)


def known_origins(layout: RunLayout, in_memory: Collection[int] = ()) -> dict[int, Origin]:
    """The origins of all attempts that count; `in_memory` are those that left an arena.

    If an attempt's own record is lost or damaged, its checkpoints still have its origin. An attempt
    that began from scratch and left nothing does not count: it found no checkpoints once (a folder
    that was not mounted), and would hide them for ever.
    """
    origins = read_origins(layout)
    folders = layout.checkpoint_folders()
    with_state = {attempt for _, attempt, _ in folders} | set(in_memory)
    for number in sorted(origins, reverse=True):
        if number in with_state or origins[number] is not None:
            break
        del origins[number]
    for _, attempt, folder in folders:
        if attempt not in origins:
            with contextlib.suppress(OSError, CheckpointError):
                origins[attempt] = manifest.read(folder).origin
    return origins


def identity_in(value: object) -> ProcessIdentity | None:
    try:
        found = ProcessIdentity(**record_in(value))
    except TypeError:
        return None
    texts = (found.started, found.host, found.boot, found.namespace)
    is_valid = type(found.pid) is int and all(isinstance(each, str) for each in texts)
    return found if is_valid else None


# -- A copied run folder is a run of its own -------------------------------------------------
# `cp -r` is how people branch an experiment. The copy has the id of the original, and would share
# its arenas, its attempts and its row in every table. So run.json also records where the folder was
# made. If another folder still exists there with this id, this one is the copy. If not, the folder
# was moved, and stays the run that it was.


def own_id(layout: RunLayout, record: dict[str, Any]) -> str:
    """The id of the run in a folder whose run.json says `record`."""
    run_id = str(record["run_id"])
    if _original(layout, record) is None:
        return run_id
    # Every reader gets the same id, before and after a start has stored it.
    return hashlib.blake2b(f"{run_id} {layout.folder}".encode(), digest_size=16).hexdigest()


def settle_identity(layout: RunLayout, record: dict[str, Any]) -> None:
    """Record where the folder is; a copy becomes a run of its own."""
    if record.get("folder") == str(layout.folder):
        return
    original = _original(layout, record)
    found = {**record, "run_id": own_id(layout, record), "folder": str(layout.folder)}
    if original is not None:
        say(f"{layout.folder}: is a copy of {original.folder}; from here on it is its own run.")
        found["copied_from"] = str(original.folder)
        _end_copied_attempts(layout, original)
    write_json(layout.identity, found)


def _original(layout: RunLayout, record: dict[str, Any]) -> RunLayout | None:
    """The run that this folder is a copy of; None if it is not a copy."""
    place = record.get("folder")
    if not isinstance(place, str) or place == str(layout.folder):
        return None
    found = RunLayout(Path(place))
    try:
        if found.identity.samefile(layout.identity):
            return None  # another name of the same folder
    except (OSError, ValueError):  # gone, or not a path
        return None
    return found if read_json(found.identity).get("run_id") == record["run_id"] else None


def _end_copied_attempts(layout: RunLayout, original: RunLayout) -> None:
    """A process that trains in the original does not train here."""
    for number in layout.attempt_numbers():
        if layout.exit(number).exists():
            continue
        # An attempt that another rank has begun here has another lease.
        if read_json(layout.lease(number)) == read_json(original.lease(number)):
            end = {"status": None, "how": f"copied from {original.folder}", "time": time.time()}
            write_json(layout.exit(number), end)
