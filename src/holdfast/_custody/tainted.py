"""How far back a state was bad already, before anybody logged it.

Whoever logs every tenth step learns late that a tensor is not finite, and the states saved in
between hold it too: resumed, they would only end in the same way again.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast._keeper.keep import Policy
from holdfast._record.image import parse_header
from holdfast._record.layout import rank_file
from holdfast._record.line import is_on_line
from holdfast._save.finite import has_not_finite
from holdfast._say import say

if TYPE_CHECKING:
    from holdfast._custody.saver import Saver

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
        path = folder / rank_file(policy.rank)
        if at < step and is_on_line(policy.line, attempt, at):
            yield at, _look_into_file(path)


def _look_into_file(path: Path) -> _Look:
    def look(names: frozenset[str], only_nan: bool) -> frozenset[str]:
        with (
            contextlib.suppress(OSError, ValueError),  # damaged, or just removed: no witness
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as image,
        ):
            return _look_into(image)(names, only_nan)
        return frozenset()

    return look


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
