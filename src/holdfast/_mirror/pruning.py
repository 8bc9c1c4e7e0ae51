"""Which checkpoints a mirror keeps, and the removal of the others with what only they need."""

from __future__ import annotations

import contextlib

from holdfast._errors import DamagedCheckpoint
from holdfast._keeper.retention import choose_kept
from holdfast._mirror import places
from holdfast._mirror.shelf import Holder, Shelf
from holdfast._mirror.stretches import IndexedFile
from holdfast._record.faults import pass_point
from holdfast._record.layout import RunLayout
from holdfast._record.void import is_void, void_steps


def prune(
    shelf: Shelf,
    holder: Holder,
    layout: RunLayout,
    keep_last: int,
    best: tuple[str, str] | None,
) -> list[str]:
    """Remove what need not be kept, or was called bad; returns the names that went."""
    held = shelf.checkpoints()
    line = shelf.line(layout, holder.attempt)
    voids = void_steps(layout)
    good = [each for each in held if not is_void(voids, each.attempt, each.step)]
    kept = {path.name for path in choose_kept(good, line, keep_last, best)}
    gone = [each.path.name for each in held if each.path.name not in kept] + shelf.damaged
    indexes: list[list[IndexedFile]] = []
    for name in sorted(kept):
        try:
            indexes.append(shelf.index(name))
        except DamagedCheckpoint:
            gone.append(name)  # nobody could fetch it; if the run still has it, it is sent again
    needed = {key for files in indexes for file in files for key, _, _ in file.pieces()}
    shelf.check(holder)
    for name in gone:
        # The manifest first: half a checkpoint must not be taken for a whole one.
        shelf.store.remove([places.manifest(name)])
        pass_point("mirror-half-removed")
        shelf.store.remove([places.index(name)])
        shelf.forget(name)
    if not shelf.strange:  # else nobody knows what those need
        _sweep(shelf, needed)
    shelf.drop_old_claims(holder)
    return gone


def _sweep(shelf: Shelf, needed: set[str]) -> None:
    """Remove pieces that no checkpoint needs: of those that went, and of uploads never finished."""
    keys = shelf.store.list(places.CHECKPOINTS)
    present = {places.checkpoint_of(key) for key in keys}
    stray = [key for key in keys if key.split("/")[1] not in present]
    idle = [key for key in shelf.store.list(places.PIECES) if key not in needed]
    with contextlib.suppress(FileNotFoundError):
        shelf.store.remove([*stray, *idle])
