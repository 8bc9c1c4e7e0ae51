"""`holdfast mirror`: list a mirror, copy to it now, fetch from it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast._errors import FolderError, HoldfastError, MirrorError, NoGoodCheckpoint, RunIsLive
from holdfast._run.resume.from_mirror import refuse_inside
from holdfast._settings import Settings
from holdfast._store.commit.retention import Kept
from holdfast._store.folder import attempts, journal
from holdfast._store.folder.atomic import create_atomic
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, trace_line
from holdfast._store.mirror.child import Service, describe_trouble
from holdfast._store.mirror.fetch import Fetched, candidates, fetch_newest
from holdfast._store.mirror.index import Holder, MirrorIndex
from holdfast._store.mirror.store import open_store
from holdfast._store.mirror.uploader import Uploader, locked


@dataclass(frozen=True, slots=True)
class MirroredCheckpoint:
    step: int
    attempt: int
    name: str
    age_seconds: float
    size_bytes: int | None  # None: its index is damaged
    is_here: bool  # in the run folder too


@dataclass(frozen=True, slots=True)
class MirrorList:
    address: str
    run_id: str | None
    checkpoints: list[MirroredCheckpoint]
    damaged: list[str]


def address_of(folder: Path, given: str | None) -> str:
    """The given mirror, or the one that the run has used."""
    if given is not None:
        found = Settings(mirror=given).mirror_address
        assert found is not None
        refuse_inside(folder.absolute(), found)
        return found
    known = attempts.read_json(RunLayout(folder.absolute()).mirror).get("address")
    if not isinstance(known, str):
        raise FolderError(
            f"{folder}: no mirror of this run is known here.\n"
            "Name it: --at s3://bucket/run (or a folder)."
        )
    return known


def list_mirror(folder: Path, address: str) -> MirrorList:
    with _store_errors(address):
        index = MirrorIndex(open_store(address))
        run_id = index.identity()
        layout = RunLayout(folder.absolute())
        here = {path.name for _, _, path in layout.checkpoint_folders()}
        found = [
            MirroredCheckpoint(
                step=each.step,
                attempt=each.attempt,
                name=each.path.name,
                age_seconds=max(0.0, time.time() - index.head(each.path.name).saved_at),
                size_bytes=index.size_bytes(each.path.name),
                is_here=each.path.name in here,
            )
            for each in (index.checkpoints() if run_id else [])
        ]
        return MirrorList(address, run_id, found, list(index.damaged))


def push(
    folder: Path, address: str, tell_waiting: Callable[[], None], tell_damage: Callable[[str], None]
) -> dict[str, Any]:
    """Copy the newest checkpoint now, after any copy under way; returns the record."""

    def receive(kind: str, **fields: Any) -> None:
        if kind == "damaged":
            tell_damage(fields["text"])

    layout, run_id = attempts.find_run(folder)
    numbers = layout.attempt_numbers()
    if not layout.checkpoint_folders():
        raise FolderError(f"{folder}: there is no checkpoint to copy yet.")
    known = attempts.read_json(layout.mirror)
    keep, best = known.get("keep_last"), known.get("best")
    service = Service(
        folder=str(layout.folder),
        run_id=run_id,
        attempt=numbers[-1] if numbers else 1,
        address=address,
        keep_last=keep if isinstance(keep, int) else 3,
        best=(best[0], best[1]) if isinstance(best, list) else None,
    )
    uploader = Uploader(service, receive, is_known=known.get("address") in (None, address))
    has_waited = False
    with _store_errors(address):
        while not uploader.copy_newest():
            if uploader.is_kept_waiting and not has_waited:
                has_waited = True
                tell_waiting()
    if not uploader.record["checkpoints"]:
        raise NoGoodCheckpoint(
            f"{folder}: no checkpoint here is whole, and none was copied.\n"
            f"To look closer: holdfast verify {folder}"
        )
    return uploader.record


def fetch(
    folder: Path,
    address: str,
    step: int | None,
    tell_damage: Callable[[str, str], None],
) -> Fetched:
    """Fetch the newest whole checkpoint, or that of a step, into the run folder."""
    layout = RunLayout(folder.absolute())
    attempts.refuse_links(layout)
    with _store_errors(address):
        index = MirrorIndex(open_store(address))
        run_id = index.identity()
        if run_id is None:
            raise MirrorError(f"{address}: there is no run in this mirror.")
        wanted = candidates(index)
        newest = index.newest_attempt()
        if step is not None:
            wanted = [each for each in wanted if each.step == step]
        if not wanted:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise MirrorError(f"{address}: there is {what} in this mirror.")
        _admit(layout, folder, run_id, newest)
        _refuse_strange(index, layout, folder, wanted[0])
        with locked(layout, waits=True):
            found = fetch_newest(index, layout, tell_damage, lambda *_: None, step)
    if found is None:
        raise NoGoodCheckpoint(f"{address}: none of the checkpoints that were asked for is whole.")
    journal.append(layout.journal, "restored", address=address, **asdict(found))
    if not layout.mirror.exists():
        attempts.write_json(layout.mirror, {"address": address, "time": time.time()}, durable=False)
    return found


def _admit(layout: RunLayout, folder: Path, run_id: str, elsewhere: int) -> None:
    """Give a new folder the identity of this run; refuse another run, or a live one."""
    own = attempts.read_json(layout.identity).get("run_id")
    if own is None:
        layout.checkpoints.mkdir(parents=True, exist_ok=True)
        identity = {"run_id": run_id, "created": time.time(), "attempts_elsewhere": elsewhere}
        create_atomic(layout.identity, (json.dumps(identity, indent=1) + "\n").encode())
        return
    if own != run_id:
        raise FolderError(
            f"{folder}: is another run than the one in the mirror.\n"
            "Fetch it into a folder that does not exist yet."
        )
    numbers = layout.attempt_numbers()
    if numbers and attempts.is_live(layout, numbers[-1]):
        holder = attempts.lease_holder(layout, numbers[-1])
        assert holder is not None  # a live run has one
        raise RunIsLive(
            f"{folder}: the run trains now, and would not see it.\nStop it first (holdfast stop "
            f"{folder}).",
            pid=holder.pid,
            host=holder.host,
        )


def _refuse_strange(index: MirrorIndex, layout: RunLayout, folder: Path, wanted: Kept) -> None:
    """Refuse a folder whose lineage has left that of the mirror: it would not resume from there."""
    attempt, step = wanted.attempt, wanted.step
    numbers = layout.attempt_numbers()
    newest = max([0, *numbers, *(number for _, number, _ in layout.checkpoint_folders())])
    line = trace_line(attempts.known_origins(layout), newest)
    holder = Holder.of(layout, str(attempts.read_json(layout.identity)["run_id"]), newest)
    claims = index.claims().get(attempt, set())
    is_ours = not claims or any(holder.knows(attempt, each) for each in claims)
    # A folder in which no training has begun yet has no lineage.
    if line and attempt <= newest and not (is_ours and is_on_line(line, attempt, step)):
        raise FolderError(
            f"{folder}: has gone its own way since (attempt {newest} here, step {step} of attempt "
            f"{attempt} there).\nFetch it into a folder that does not exist yet."
        )
    elsewhere = index.newest_attempt()
    if elsewhere > max(newest, attempts.lives_elsewhere(layout)):
        identity = {**attempts.read_json(layout.identity), "attempts_elsewhere": elsewhere}
        attempts.write_json(layout.identity, identity)


@contextlib.contextmanager
def _store_errors(address: str) -> Iterator[None]:
    """Errors of a store's library, in a sentence."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise MirrorError(f"{describe_trouble(address, error)}.") from error
