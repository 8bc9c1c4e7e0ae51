"""Which checkpoints a mirror keeps, and the removal of the others with what only they need."""

from __future__ import annotations

import contextlib

from holdfast._errors import DamagedCheckpoint
from holdfast._store.commit.fault_points import pass_point
from holdfast._store.commit.retention import choose_kept
from holdfast._store.folder.invalid import is_void, void_steps
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.mirror import keys as places
from holdfast._store.mirror.index import Holder, Shelf
from holdfast._store.mirror.upload import StoreDiffers, size_of


def prune(
    shelf: Shelf,
    holder: Holder,
    layout: RunLayout,
    keep_last: int,
    best: tuple[str, str] | None,
) -> list[str]:
    """Remove what need not be kept, or was called bad; returns the names that went.

    StoreDiffers, after that, if one that is to be kept has lost pieces: it does not count then.
    """
    held = shelf.checkpoints()
    line = shelf.line(layout, holder.attempt)
    voids = void_steps(layout)
    good = [each for each in held if not is_void(voids, each.attempt, each.step)]
    chosen = choose_kept(good, line, keep_last, best)
    own = [each for each in good if is_on_line(line, each.attempt, each.step)]
    oldest = min((each.attempt for each in own[-keep_last:]), default=0)
    is_full = len(own) >= keep_last
    # What a life before has copied after this one had begun leads nowhere; as long as there is
    # little else, it is better than nothing.
    kept = {
        each.path.name
        for each in good
        if each.path in chosen and (each in own or not is_full or each.attempt >= oldest)
    }
    gone = [each.path.name for each in held if each.path.name not in kept] + shelf.damaged
    there = shelf.store.list(places.PIECES)
    needed: set[str] = set()
    lost = []
    for name in sorted(kept):
        try:
            keys = {key for file in shelf.index(name) for key, _, _ in file.pieces()}
        except DamagedCheckpoint:
            lost.append(name)  # nobody could fetch it; if the run still has it, it is sent again
            continue
        if all(key in there and there[key].size_bytes == size_of(key) for key in keys):
            needed |= keys
        else:
            lost.append(name)
    shelf.check(holder)
    for name in [*gone, *lost]:
        # The manifest first: half a checkpoint must not be taken for a whole one.
        shelf.store.remove([places.manifest(name)])
        pass_point("mirror-half-removed")
        shelf.store.remove([places.index(name)])
        shelf.forget(name)
    if not shelf.strange:  # else nobody knows what those need
        _sweep(shelf, needed)
    shelf.drop_old_claims(holder)
    if lost:
        raise StoreDiffers(f"{shelf.store.address} has lost pieces of {', '.join(lost)}")
    return gone


def _sweep(shelf: Shelf, needed: set[str]) -> None:
    """Remove pieces that no checkpoint needs: of those that went, and of uploads never finished."""
    keys = shelf.store.list(places.CHECKPOINTS)
    present = {places.checkpoint_of(key) for key in keys}
    stray = [key for key in keys if key.split("/")[1] not in present]
    idle = [key for key in shelf.store.list(places.PIECES) if key not in needed]
    with contextlib.suppress(FileNotFoundError):
        shelf.store.remove([*stray, *idle])
    shelf.store.tidy(places.PIECES)
