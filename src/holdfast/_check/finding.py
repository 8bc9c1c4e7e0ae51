"""What lint finds, and the changes that put it right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ERROR = "error"
WARNING = "warning"
HINT = "hint"
NOT_UNDERSTOOD = "not-understood"  # the rule by which silence is not taken for a good script


@dataclass(frozen=True)
class Edit:
    """Replace what stands from `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One thing that goes wrong, and how it would be right."""

    rule: str
    severity: str
    line: int
    message: str
    source: str = ""  # the line as it stands
    corrected: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    folder: str | None = None  # one that is missing, and that --fix makes
    is_fixable: bool = False


def apply_edits(text: str, *groups: Iterable[Edit]) -> str:
    """The text with the changes; of two groups that want the same place, only the first."""
    chosen: list[Edit] = []
    for group in groups:
        edits = [edit for edit in group if edit not in chosen]
        if not any(_overlap(edit, other) for edit in edits for other in chosen):
            chosen += edits
    # From the end, so that places before stay right; insertions at one place keep their order.
    chosen.sort(key=lambda each: (each.start, each.end))
    chosen.reverse()
    for edit in chosen:
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _overlap(one: Edit, other: Edit) -> bool:
    return one.start < other.end and other.start < one.end


def changed_lines(text: str, edits: Iterable[Edit]) -> tuple[str, ...]:
    """The lines that the changes make, in their order."""
    found: list[str] = []
    for start, end, inside in _by_lines(text, edits):
        before = text[start:end].splitlines()
        moved = [Edit(each.start - start, each.end - start, each.text) for each in inside]
        after = apply_edits(text[start:end], moved).splitlines()
        while before and after and before[-1] == after[-1]:
            before.pop()
            after.pop()
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        found += after[same:]
    return tuple(found)


def _by_lines(text: str, edits: Iterable[Edit]) -> list[tuple[int, int, list[Edit]]]:
    """The changes that touch the same whole lines, and where those lines are."""
    groups: list[tuple[int, int, list[Edit]]] = []
    for edit in sorted(edits, key=lambda each: (each.start, each.end)):
        start = text.rfind("\n", 0, edit.start) + 1
        end = text.find("\n", edit.end)
        end = len(text) if end < 0 else end + 1
        if groups and start < groups[-1][1]:
            first, last, inside = groups.pop()
            groups.append((first, max(last, end), [*inside, edit]))
        else:
            groups.append((start, end, [edit]))
    return groups
