"""What a mirror holds: its checkpoints, which of them count, and whose it is.

A run folder that copies here leaves a claim. It knows the claims of its own lives, and those that
were there when it was restored from here. Any other is of a run folder that has gone its own way:
then this one copies nothing and removes nothing any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast._environment.processes.identity import host_name
from holdfast._errors import CheckpointError, DamagedCheckpoint, MirrorError
from holdfast._store.commit.retention import Kept
from holdfast._store.folder.attempts import known_origins, lives_elsewhere, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import Origin, trace_line
from holdfast._store.format import manifest
from holdfast._store.format.manifest import Manifest
from holdfast._store.mirror import keys
from holdfast._store.mirror.chunks import IndexedFile, decode_index
from holdfast._store.mirror.store import Store


class TakenOver(MirrorError):
    """Another run folder copies to this mirror now."""


class Followed(MirrorError):
    """A later life of the same run folder copies: this one has nothing to do any more."""


@dataclass(frozen=True)
class Holder:
    """Who copies: one run folder, in one life."""

    run_id: str
    attempt: int
    folder: str  # tells this run folder from another of the same run
    known_before: int = 0  # the lives that were known when it was restored from a mirror

    @classmethod
    def of(cls, layout: RunLayout, run_id: str, attempt: int) -> Holder:
        identity = read_json(layout.identity)
        mark = f"{run_id} {identity.get('created')}".encode()
        folder = hashlib.blake2b(mark, digest_size=8).hexdigest()
        return cls(run_id, attempt, folder, lives_elsewhere(layout))

    def knows(self, attempt: int, folder: str) -> bool:
        return folder == self.folder or attempt <= self.known_before


@dataclass
class Shelf:
    """The checkpoints of a mirror; what was read once is not read again."""

    store: Store
    _heads: dict[str, Manifest] = field(default_factory=dict)  # without their files
    _indexes: dict[str, list[IndexedFile]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)  # manifests that are none, by the last look
    strange: list[str] = field(default_factory=list)  # and those of another version of holdfast

    def identity(self) -> str | None:
        """The id of the run that this is a mirror of; None if it is of none yet."""
        try:
            found = json.loads(self.store.get(keys.IDENTITY))
            return str(found["run_id"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise MirrorError(
                f"{self.store.address}: {keys.IDENTITY} is not one of holdfast.\n"
                "Choose an address where nothing else is."
            ) from error

    def claims(self) -> dict[int, set[str]]:
        """Which run folders have copied here, by attempt."""
        found: dict[int, set[str]] = {}
        for key in self.store.list(keys.CLAIMS):
            claim = keys.claim_of(key)
            if claim is not None:
                found.setdefault(claim[0], set()).add(claim[1])
        return found

    def newest_attempt(self) -> int:
        """Of all lives that are known here."""
        attempts = [each.attempt for each in self.checkpoints()]
        return max([0, *self.claims(), *attempts])

    # -- who may copy here --------------------------------------------------------

    def enter(self, holder: Holder) -> None:
        """Begin to copy; MirrorError if it is another run's, or another folder goes on here."""
        if self.identity() is None:
            text = json.dumps({"run_id": holder.run_id, "created": time.time()}) + "\n"
            self.store.put(keys.IDENTITY, text.encode())
        claims = self.claims()
        self._refuse_owner(holder)
        self._refuse_later_life(holder, claims)
        if holder.folder not in claims.get(holder.attempt, ()):
            for attempt, folders in sorted(claims.items(), reverse=True):
                for folder in folders:
                    if not holder.knows(attempt, folder):
                        raise self._taken(attempt, folder)
            told = json.dumps({"host": host_name(), "time": time.time()}) + "\n"
            self.store.put(keys.claim(holder.attempt, holder.folder), told.encode())
        self.check(holder)

    def check(self, holder: Holder) -> None:
        """TakenOver if another folder copies here since: asked before whatever cannot be undone."""
        claims = self.claims()
        # Two runs may have come to an empty address in the same moment: one of them has it.
        self._refuse_owner(holder)
        self._refuse_later_life(holder, claims)
        for attempt, folders in claims.items():
            for folder in folders - {holder.folder}:
                # Of two that came in the same moment one goes on: which, both see alike.
                is_later = (attempt, holder.folder) > (holder.attempt, folder)
                if attempt >= holder.attempt and is_later and not holder.knows(attempt, folder):
                    raise self._taken(attempt, folder)

    def drop_old_claims(self, holder: Holder) -> None:
        """What a later life of the same folder stands for."""
        self.store.remove(
            keys.claim(attempt, folder)
            for attempt, folders in self.claims().items()
            for folder in folders
            if attempt < holder.attempt and holder.knows(attempt, folder)
        )

    def _refuse_owner(self, holder: Holder) -> None:
        owner = self.identity()
        if owner is None:  # emptied by hand, perhaps: what is copied next makes it ours again
            raise OSError(f"{keys.IDENTITY} has gone from it")
        if owner != holder.run_id:
            raise MirrorError(
                f"{self.store.address}: this is the mirror of another run.\n"
                "Give every run an address of its own."
            )

    def _refuse_later_life(self, holder: Holder, claims: dict[int, set[str]]) -> None:
        """Where a lock is not seen on other machines, two of one folder would be at it."""
        later = [number for number, folders in claims.items() if holder.folder in folders]
        if max(later, default=0) > holder.attempt:
            raise Followed(f"{self.store.address}: attempt {max(later)} copies there now.")

    def _taken(self, attempt: int, folder: str) -> TakenOver:
        host = "another machine"
        # Who it is only makes the sentence better.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            host = str(json.loads(self.store.get(keys.claim(attempt, folder)))["host"])
        return TakenOver(
            f"{self.store.address}: attempt {attempt} of this run, in a folder of {host}, has "
            "taken this mirror over; nothing is copied from here any more.\n"
            "To go on from what it has copied, start with an empty folder."
        )

    # -- what is there --------------------------------------------------------------

    def checkpoints(self) -> list[Kept]:
        """Those that were copied to the end, oldest first; `path` has the name only."""
        found = []
        self.damaged, self.strange = [], []
        for key in self.store.list(keys.CHECKPOINTS):
            name = keys.checkpoint_of(key)
            if name is None:
                continue
            try:
                head = self.head(name)
            except FileNotFoundError:
                continue  # removed meanwhile
            except DamagedCheckpoint:
                self.damaged.append(name)
            except CheckpointError:
                self.strange.append(name)
            else:
                path = Path(name)
                found.append(Kept(head.step, head.attempt, path, head.metrics, head.reason))
        for name in {*self._heads, *self._indexes} - {each.path.name for each in found}:
            self.forget(name)
        return sorted(found, key=lambda each: (each.attempt, each.step, each.path.name))

    def head(self, name: str) -> Manifest:
        """A checkpoint's manifest without its files."""
        if name not in self._heads:
            found = manifest.parse_head(self.store.get(keys.manifest(name)), name)
            if not name.startswith(f"step-{found.step:012d}-a{found.attempt:04d}"):
                raise DamagedCheckpoint(f"{name}: the manifest is that of another step.")
            self._heads[name] = found
        return self._heads[name]

    def whole(self, name: str) -> tuple[bytes, Manifest]:
        """A checkpoint's manifest as it is stored, and what it says."""
        try:
            raw = self.store.get(keys.manifest(name))
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{name}: the manifest is missing.") from error
        return raw, manifest.parse(raw, f"{self.store.address}: {name}")

    def index(self, name: str) -> list[IndexedFile]:
        """Of which pieces a checkpoint is made; DamagedCheckpoint if nobody can tell."""
        if name not in self._indexes:
            where = f"{self.store.address}: {name}"
            try:
                data = self.store.get(keys.index(name))
            except FileNotFoundError as error:
                raise DamagedCheckpoint(f"{where}: the index is missing.") from error
            self._indexes[name] = decode_index(data, where)
        return self._indexes[name]

    def remember(self, name: str, head: Manifest, files: list[IndexedFile]) -> None:
        """A checkpoint that has just been copied."""
        self._heads[name] = replace(head, files=())
        self._indexes[name] = files

    def forget(self, name: str) -> None:
        self._heads.pop(name, None)
        self._indexes.pop(name, None)

    def size_bytes(self, name: str) -> int | None:
        """Of all files of a checkpoint; None if nobody can tell."""
        try:
            return sum(file.size_bytes for file in self.index(name))
        except CheckpointError:
            return None

    def line(self, layout: RunLayout | None, newest: int) -> dict[int, int | None]:
        """Which (attempt, step) states lead to the newest attempt, by all that is known of them."""
        origins: dict[int, Origin] = {}
        for each in self.checkpoints():
            origins[each.attempt] = self._heads[each.path.name].origin
        if layout is not None:
            origins |= known_origins(layout)
        return trace_line(origins, newest)
