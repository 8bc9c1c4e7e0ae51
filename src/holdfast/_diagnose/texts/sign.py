"""A sign: one line of a log that tells of an end; and the lines that tell of progress."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from holdfast._diagnose.texts.lines import Line, Text, split_prefix

TEXT_MOST = 600  # characters of a line that are kept: some libraries print pages in one
# It stays in the line of the shell's last words.
PROGRESS_BAR = re.compile(
    r".*(?:\d(?:it/s|s/it)[^\]]*\]|\beta [\d:]+ ?[\\|/-]|\] - ETA: [\d:]+s?\b.*: [\d.e+-]+)"
)


@dataclass(frozen=True)
class Sign:
    """A line that tells of an end.

    `details` always has `from_end`: the number of lines after it. A sign in the last lines is
    likely why the training ended; one from thousands of lines before hardly is.
    """

    kind: str
    text: str  # the line that tells
    rank: int | None = None
    line: int = 1
    details: dict[str, Any] = field(default_factory=dict)


def make_sign(
    kind: str, line: Line, details: dict[str, Any] | None = None, rank: int | None = None
) -> Sign:
    return Sign(
        kind,
        line.text.strip()[:TEXT_MOST],
        rank if rank is not None else line.rank,
        line.number,
        {**(details or {}), "from_end": line.from_end},
    )


def is_source_code(text: str, at: int) -> bool:
    """Whether it is a line of a program, as a traceback shows it: no message of the program."""
    if not text.startswith("    "):
        return False
    before = text[:at].lstrip()
    return before.startswith(("raise ", "assert ", "return ", "#")) or before.endswith(
        ('("', "('", '(f"', "(f'", '= "', '"""')
    )


# -- Progress: the lines of a log with steps, epochs, bars and losses. They decide what an error in
# the middle of a log was: a training that counts on after it has caught it.


_READ_CHARACTERS = 1 << 18  # of the end of a text; what stands further up is past by its distance
_LONGEST = 800
_WORD = re.compile(
    r"(?<!--)\b(?:[Gg]lobal[_ ]?)?(?:[Ss]teps?|STEP|[Ii]ter(?:ation)?s?|[Uu]pdates?|[Ee]pochs?"
    r"|EPOCH|Trial|[Bb]atch|\w*[Ll]oss|LOSS|it/s|s/it|nan, .{1,40}: -?nan|[Ee]pisodes?|[Rr]ewards?"
    r"|[Rr]ounds?|\w*[Aa]ccuracy|(?<=-)(?:auc|rmse|mae|\w*error)(?=:))\b"
)
_STEP = re.compile(
    r"(?<!--)\b(?:global[_ ]?step|steps?|iter(?:ation)?s?|updates?|batch)"
    r"['\"]?\]?\W{1,4}(\d{1,12})\b"
    r"|\btrial (?:\w{1,40}_)?(\d{1,12})\b",  # of a search, which goes on after one that failed
    re.IGNORECASE,
)
_EPOCH = re.compile(r"(?<!--)\bepochs?['\"]?\]?\W{1,4}(\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE)
_PLAIN = re.compile(r"^\W{0,3}(?:[A-Za-z]{1,12}\W{1,3}){0,3}(\d{1,12})(?![\d.])")
_OF_MANY = re.compile(r"\b(\d{1,12})/\d{1,12}\b")
_LOSS = re.compile(
    r"loss\w*['\"]?\s*(?:[:=(]|is )?\s*(?:tensor\()?(-?[\d.]+|[+-]?nan|[+-]?inf)\b", re.I
)
# A loss of 0 with a gradient norm that is not a number: the loss was not a number either.
_NO_LOSS = re.compile(
    r"\bloss['\"]?\W{1,4}0(?:\.0*)?\b.*\bgrad_?norm['\"]?\W{1,4}(?:nan|inf)\b", re.I
)
_SEVERAL = re.compile(r"[:=] ?-?nan, .*[:=] ?-?nan\b")  # figures of one step
_NO_GRADIENT = re.compile(r"\bgrad(?:ient)?[ _]?norm['\"]?\W{1,4}(?:nan|inf)\b", re.I)
_ERRORS = re.compile(r"Error|Exception|Traceback|File \"|[Oo]ut of memory")
_MOST_BAD = 2  # losses in a row up to the end that are not numbers

Count = tuple[float, float, float]


class Mark(NamedTuple):
    """A line that tells of progress."""

    from_end: int  # lines after it, as a sign counts them
    rank: int | None
    counted: Count | None  # epoch, step, n of m
    loss: str  # as it was printed; empty if there is none
    start: int


class Marks:
    """The lines of progress of a text, in order."""

    def __init__(self, text: Text) -> None:
        found = list(_read(text))
        self.losses = [mark for mark in found if mark.loss]
        self._of: dict[int | None, list[Mark]] = {}
        for mark in found:
            if mark.counted is not None:
                self._of.setdefault(mark.rank, []).append(mark)
        # The highest count from each mark on to the end.
        self._highest = {
            rank: [*accumulate(reversed([m.counted or (0, 0, 0) for m in marks]), max)][::-1]
            for rank, marks in self._of.items()
        }

    def goes_on(self, rank: int | None, from_end: int, least: float) -> bool:
        """Whether the same rank counts on after a line, from where it was before it.

        A buffered stream shows lines from before an error after it. Such lines continue in the
        middle of a line, or no line precedes them: then the number of lines tells.
        """
        marks = self._of.get(rank, [])
        at = bisect_left(marks, -from_end, key=lambda mark: -mark.from_end)
        after = next((i for i in range(at, len(marks)) if marks[i].from_end < from_end), None)
        if after is None:
            return False
        before = [mark for mark in marks[:at] if mark.from_end > from_end]
        if not before or before[-1].counted is None:
            return len(marks) - after >= least
        return self._highest[rank][after] > before[-1].counted

    def count_after(self, rank: int | None, from_end: int) -> int:
        """How many lines of progress follow a line: of the same rank, or of all."""
        ranks = self._of if rank is None else (None, rank)
        return sum(mark.from_end < from_end for each in ranks for mark in self._of.get(each, ()))

    def goes_on_between(self, from_end: int, until: int) -> bool:
        """Whether unlabelled lines count on between two lines."""
        marks = [mark for mark in self._of.get(None, []) if mark.counted is not None]
        before = [mark.counted for mark in marks if mark.from_end > from_end]
        between = [mark.counted for mark in marks if until < mark.from_end < from_end]
        return bool(before and between) and max(filter(None, between)) > (before[-1] or (0, 0, 0))

    def bad_losses(self) -> list[Mark]:
        """The losses up to the end that are not numbers; empty if the last ones are numbers."""
        found: list[Mark] = []
        for mark in reversed(self.losses):
            if not re.fullmatch(r"(?i)[+-]?(?:nan|inf)", mark.loss):
                break
            found.append(mark)
        return found[::-1] if len(found) >= _MOST_BAD else []


def _read(text: Text) -> Iterator[Mark]:
    whole = text.whole
    start = max(0, len(whole) - _READ_CHARACTERS)
    breaks = whole.count("\n", start) + whole.count("\r", start) - whole.count("\r\n", start)
    after = breaks - whole.endswith("\n")
    place, found = start, _WORD.search(whole, start)
    while found is not None:
        lowest = max(place, found.start() - _LONGEST)
        begin = max(
            whole.rfind("\n", lowest, found.start()), whole.rfind("\r", lowest, found.start())
        )
        begin = max(begin + 1, lowest)
        line = re.split(r"[\r\n]", whole[begin : found.start() + _LONGEST], maxsplit=1)[0]
        passed = whole[place:begin]
        after -= passed.count("\n") + passed.count("\r") - passed.count("\r\n")
        place = begin
        if error := _ERRORS.search(line):  # an error may follow a progress bar in the same line
            bar = PROGRESS_BAR.match(line[: error.start()])
            line = bar[0] if bar else ""
        if line:
            rank, said = split_prefix(line)
            loss = _LOSS.search(said)
            is_lost = _NO_LOSS.search(said) or (
                loss is None and (_NO_GRADIENT.search(said) or _SEVERAL.search(said))
            )
            value = "nan" if is_lost else loss[1] if loss else ""
            yield Mark(max(0, after), rank, _count(said), value, begin)
        found = _WORD.search(whole, max(begin + len(line), found.end()))


def _count(line: str) -> Count | None:
    epoch, step, part = _EPOCH.search(line), _STEP.search(line), _OF_MANY.search(line)
    if epoch is None and step is None and part is None:
        plain = _PLAIN.search(line)
        return (0, float(plain[1]), 0) if plain else None
    known = (float(each[each.lastindex or 1]) if each else 0.0 for each in (epoch, step, part))
    first, second, third = known
    return first, second, third
