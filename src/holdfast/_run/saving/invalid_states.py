"""How far back a state was bad already, before anybody logged it.

Whoever logs every tenth step learns late that a tensor is not finite, and the states saved in
between hold it too: resumed, they would only end in the same way again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast._errors import CheckpointError
from holdfast._state.finite import has_not_finite
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder.layout import rank_file
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.folder.plain_file import open_file
from holdfast._store.format import manifest
from holdfast._store.format.image import parse_header
from holdfast._store.format.manifest import DataFile, Part
from holdfast._text import say

if TYPE_CHECKING:
    from holdfast._run.saving.saver import Saver

_MOST_NAMES = 8
_Look = Callable[[frozenset[str], bool], frozenset[str]]


def first_tainted(
    policy: Policy, saver: Saver, names: list[str], trained: frozenset[str], step: int
) -> int:
    """The first step from which on all that is saved has a tensor of `names` that is not finite.

    Tensors that were so in the oldest state of all are meant to be, as a mask of infinities is;
    but not a NaN in a parameter that is trained: then nothing good is left.
    """
    candidates = sorted([*_in_memory(saver, step), *_on_disk(policy, step)], key=lambda c: -c[0])
    if not candidates or not names:
        return step
    suspects = frozenset([name for name in names if not name.endswith(".grad")][:_MOST_NAMES])
    look_at_oldest = candidates[-1][1]
    always = look_at_oldest(suspects, False) - look_at_oldest(suspects & trained, True)
    suspects -= always
    if always and not suspects:
        say(
            f"not finite in the oldest state that is saved already: {', '.join(sorted(always))}.\n"
            "If that is not meant so, the next start ends in the same way: use another folder."
        )
    found = step
    for at, look in candidates:
        if not suspects or not look(suspects, False):
            break
        found = at
    return found


def _in_memory(saver: Saver, step: int) -> Iterator[tuple[int, _Look]]:
    for at, image in saver.slots():
        if at < step:
            yield at, _look_into(image)


def _on_disk(policy: Policy, step: int) -> Iterator[tuple[int, _Look]]:
    for at, attempt, folder in policy.layout.checkpoint_folders():
        if at < step and is_on_line(policy.line, attempt, at):
            yield at, _look_into_checkpoint(folder, rank_file(policy.rank))


def _look_into_checkpoint(folder: Path, name: str) -> _Look:
    def look(names: frozenset[str], only_nan: bool) -> frozenset[str]:
        with contextlib.suppress(OSError, ValueError, CheckpointError):
            # Damaged, or just removed: no witness.
            stored = manifest.read(folder)
            file = next((each for each in stored.files if each.name == name), None)
            if file is not None:
                return _look_at_parts(folder, file, names, only_nan=only_nan)
        return frozenset()

    return look


def _look_at_parts(
    folder: Path, file: DataFile, names: frozenset[str], *, only_nan: bool
) -> frozenset[str]:
    """Some tensors of one rank, in whichever file each of them is."""
    header = _read(folder, file, file.parts[0])
    stored_as = {spec.name: spec.stored_as for spec in parse_header(header).specs}
    found = set()
    for part in file.parts:
        if part.name in names and part.name in stored_as:
            data = memoryview(_read(folder, file, part))
            if has_not_finite(data, stored_as[part.name], only_nan=only_nan):
                found.add(part.name)
    return frozenset(found)


def _read(folder: Path, file: DataFile, part: Part) -> bytes:
    with open_file(folder / (part.file or file.name)) as opened:
        opened.seek(part.offset)
        return opened.read(part.size_bytes)


def _look_into(image: memoryview) -> _Look:
    def look(names: frozenset[str], only_nan: bool) -> frozenset[str]:
        plan = parse_header(bytes(image[: 8 + int.from_bytes(image[:8], "little")]))
        found = set()
        for spec, offset in zip(plan.specs, plan.offsets, strict=True):
            if spec.name in names:
                with image[offset : offset + spec.size_bytes] as data:
                    if has_not_finite(data, spec.stored_as, only_nan=only_nan):
                        found.add(spec.name)
        return frozenset(found)

    return look
