"""A sign: one line of a log that tells of an end; and the lines that tell of progress."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast._diagnose.texts.lines import Line, Text, split_prefix

TEXT_MOST = 600  # characters of a line that are kept: some libraries print pages in one
# It stays in the line of the shell's last words.
PROGRESS_BAR = re.compile(
    r".*(?:[\d?](?:it/s|s/it)[^\]]*\]|\beta [\d:]+ ?[\\|/-]|\] - ETA: [\d:]+s?\b.*: [\d.e+-]+)"
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

    @property
    def from_end(self) -> int:
        return int(self.details.get("from_end") or 0)


def make_sign(
    kind: str, line: Line, details: dict[str, Any] | None = None, rank: int | None = None
) -> Sign:
    text = line.text.strip()
    bar = PROGRESS_BAR.match(text) if "it/s" in text or "s/it" in text else None
    return Sign(
        kind,
        ((text[bar.end() :].strip() if bar else "") or text)[:TEXT_MOST],
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


_FEW_LINES = 5  # after a restart: the log was cut, and its last attempt tells nothing
RESTARTS = "will restart worker group"  # torchrun's agent
UNMET = "torch.distributed.elastic.rendezvous.api.Rendezvous"  # its own errors
_READ_CHARACTERS = 1 << 18  # of the end of a text; what stands further up is past by its distance
_LONGEST = 800
_WORD = re.compile(
    r"(?<!--)\b(?:[Gg]lobal[_ ]?)?(?:[Ss]teps?|STEP|[Ii]ter(?:ation)?s?|[Uu]pdates?|[Ee]pochs?"
    r"|EPOCH|Trial|[Bb]atch|\w*[Ll]oss|LOSS|it/s|s/it|nan, .{1,40}: -?nan|[Ee]pisodes?|[Rr]ewards?"
    r"|[Rr]ounds?|\w*[Aa]ccuracy|(?<=-)(?:auc|rmse|mae|\w*error)(?=:))\b|\d(?:it/s|s/it)\b"
)
# The rows of a table of progress stand below a header with the names of its columns.
_WORD_OR_ROW = re.compile(
    rf"{_WORD.pattern}|(?m:^[ |]*\d{{1,9}}(?:/\d{{1,9}})?"
    r"(?=[ \t|]+[-+]?(?:\d[\d.:e+-]*|(?i:nan|inf))[%GMK]?(?:[ \t|]|$)))"
)
_CELLS = re.compile(r"[\s|\u2502\u2503]+")
_WIDE_CELLS = re.compile(r"\s{2,}|\t|\s*[|\u2502\u2503]\s*")
_OF_STEPS = re.compile(r"(?i)(?:global_?)?(?:epochs?|ep|steps?|it|iter\w*|batch|rounds?|updates?)")
_OF_LOSSES = re.compile(r"(?i)loss|^(?:box|obj|cls|dfl)$")
_CELL_OF_LOSS = re.compile(r"(?i)-?\d[\d.]*(?:e[+-]?\d+)?|[+-]?(?:nan|inf)")
_STEP = re.compile(
    r"(?<!--)\b(?:global[_ ]?step|steps?|iter(?:ation)?s?|updates?|batch)"
    r"['\"]?\]?\W{1,4}(\d{1,12})\b"
    r"|\btrial (?:\w{1,40}_)?(\d{1,12})\b",  # of a search, which goes on after one that failed
    re.IGNORECASE,
)
_EPOCH = re.compile(r"(?<!--)\bepochs?['\"]?\]?\W{1,4}(\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE)
_PLAIN = re.compile(r"^\W{0,3}(?:(?!(?i:size)\W)[A-Za-z]{1,12}\W{1,3}){0,3}(\d{1,12})(?![\d.:/-])")
_OF_MANY = re.compile(r"\b(\d{1,12}) ?/ ?\d{1,12}\b")
_LOSS = re.compile(
    r"(?<!best.)loss[\w/]*['\"\]]?\s*(?:[:=(]|is )?\s*(?:tensor\()?"
    r"(-?\.?\d[\d.]*|[+-]?nan|[+-]?inf)\b",
    re.I,
)
# A loss of 0 with a gradient norm, or figures, that are no numbers: the loss was none either.
_NO_LOSS = re.compile(
    r"\bloss['\"]?\W{1,4}0(?:\.0*)?\b(?:.*\bgrad_?norm['\"]?\W{1,4}(?:nan|inf)\b"
    r"|(?:.*['\"]: nan\b){2})",
    re.I,
)
_SEVERAL = re.compile(r"[:=] ?-?nan, .*[:=] ?-?nan\b")  # figures of one step
_NO_GRADIENT = re.compile(r"\bgrad(?:ient)?[ _]?norm['\"]?\W{1,4}(?:nan|inf)\b", re.I)
_NOT_FINITE = re.compile(r"[:=(] ?[+-]?(?:nan|inf)\b", re.I)
_ERRORS = re.compile(
    r"Error|Exception|Traceback|File \"|[Oo]ut of memory|slurmstepd: |srun: "
    r"|^\d+\t[\d.]+\t(?:ray::|\S*python)"  # a table of processes
)
_IS_BAD = re.compile(r"(?i)[+-]?(?:nan|inf)")
_MOST_BAD = 2  # figures up to the end that are not numbers

# docker compose, and kubectl logs --prefix.
_SERVICE = re.compile(r"(?m)^(\[pod/[^\]\n]{1,200}\]|[\w.-]{1,60}[-_]\d{1,4}(?= +\| ))(.*)")
_SERVICE_END = re.compile(r"(?m)^([\w.-]{1,60}) exited with code (\d{1,3})")
_OF_A_STOP = ("0", "137", "143")  # statuses of services that are stopped with another one
_ENDS_READ = 1 << 16
_SHARE = 0.2  # of the lines of progress of the service that has most: it trains, too

Count = tuple[float, float, float]
_NONE = (0.0, 0.0, 0.0)


def of_training(text: str) -> str:
    """Of several services in one log, the lines of those that train, or else that failed."""
    if len({found[1] for found in _SERVICE.finditer(text[-_ENDS_READ:])}) < 2:
        return text
    steps: dict[str, int] = {}
    ends = dict(_SERVICE_END.findall(text))
    failed = {name for name, code in ends.items() if code not in _OF_A_STOP}
    for name, said in _SERVICE.findall(text):
        steps[name] = steps.get(name, 0) + bool(_WORD.search(said) and _count(said))
        if name not in ends and "Traceback" in said:
            failed.add(name)
    most = max(steps.values())
    trained = {_kind_of(name) for name in steps if steps[name] > most * _SHARE}
    others = {name for name in steps if trained and _kind_of(name) not in trained} - failed
    if not trained and set(ends.values()) != {"0"}:
        others = {name for name, code in ends.items() if code == "0"}
    names = "|".join(map(re.escape, others)) or "(?!)"
    shape = rf"(?m)^(?:[\w.]+[-_])?(?:{names})(?= +\| | exited|(?<=\]) ).*"
    return re.sub(shape, "", text).rstrip("\n") + "\n"  # empty lines keep the numbers of others


def _kind_of(service: str) -> str:
    """Without the number of a replica; of a pod, its container."""
    return service.rpartition("/")[2].rstrip("0123456789")


class Mark(NamedTuple):
    """A line that tells of progress."""

    from_end: int  # lines after it, as a sign counts them
    rank: int | None
    counted: Count | None  # epoch, step, n of m
    loss: str  # as it was printed; empty if there is none
    bad: int  # figures that are no numbers, beside such a loss
    start: int
    bar: str = ""  # m of n of m, if it is a state of a progress bar
    names: tuple[str, ...] = ()  # of the columns in which a table has no numbers


class Marks:
    """The lines of progress of a text, in order."""

    def __init__(self, text: Text) -> None:
        found = list(_read(text))
        self.losses = [mark for mark in found if mark.loss]
        self._of: dict[int | None, list[Mark]] = {}
        for mark in found:
            if mark.counted is not None:
                self._of.setdefault(mark.rank, []).append(mark)
        # torchrun's agent starts its ranks again without a word: only their counting tells.
        agents = (line.from_end for line in text.hits("failed (exitcode: "))
        restarts = (line.from_end for line in text.hits(RESTARTS) if line.from_end > _FEW_LINES)
        # An agent that does not meet the others any more starts nothing.
        unmet = [line.from_end for line in text.hits(UNMET)]
        told = [at for at in restarts if self.counts_on(at) or not any(at > end for end in unmet)]
        self.last_start = min([*filter(self.counts_on, agents), *told], default=math.inf)

    def goes_on(self, rank: int | None, from_end: int, least: float) -> bool:
        """Whether the same rank counts on after a line, from where it was before it.

        A buffered stream shows lines from before an error after it. Such lines continue in the
        middle of a line, or no line precedes them: then the number of lines tells.
        """
        before, after = self._around(rank, from_end)
        if not before or not after:
            return bool(after) and len(after) >= least
        highest = max(mark.counted or _NONE for mark in after)
        is_drawn_once = least != 1 and _is_drawn_once(after)
        return highest > (before[-1].counted or _NONE) and not is_drawn_once

    def _around(self, rank: int | None, from_end: int) -> tuple[list[Mark], list[Mark]]:
        """The lines that count, of this rank, before and after a line."""
        marks = self._of.get(rank, [])
        after = [mark for mark in marks if mark.from_end < from_end]
        return [mark for mark in marks if mark.from_end > from_end], after

    def count_after(self, rank: int | None, from_end: int) -> int:
        """How many lines of progress follow a line: of the same rank, or of all."""
        ranks = self._of if rank is None else (None, rank)
        return sum(mark.from_end < from_end for each in ranks for mark in self._of.get(each, ()))

    def counts_on(self, from_end: int, until: int = -1) -> bool:
        """Whether any rank counts on after a line, from wherever it begins there."""
        for marks in self._of.values():
            after = [mark for mark in marks if until < mark.from_end < from_end]
            counts = [mark.counted or _NONE for mark in after]
            if counts and max(counts) > counts[0] and not _is_drawn_once(after):
                return True
        return False

    def trains_on(self, rank: int | None, from_end: int) -> bool:
        """Whether more epochs or steps follow a line; an evaluation has neither, or one epoch."""
        before, after = (
            [mark.counted[:2] for mark in marks if mark.counted and not mark.bar]
            for marks in self._around(rank, from_end)
        )
        is_higher = max(after, default=(0, 0)) > max(before, default=(math.inf, 0))
        return is_higher or len({epoch for epoch, _ in after}) > 1

    def bad_losses(self) -> list[Mark]:
        """The losses up to the end that are not numbers; empty if the last ones are numbers."""
        last = max((i for i, mark in enumerate(self.losses, 1) if not mark.bad), default=0)
        found = self.losses[last:]
        return found if sum(mark.bad for mark in found) >= _MOST_BAD else []

    def is_finite_after(self, from_end: int) -> bool:
        """Whether a loss below a line is a number again."""
        return any(mark.from_end < from_end and not mark.bad for mark in self.losses)


def tells_progress(line: str) -> bool:
    """Whether a line counts epochs or steps."""
    return _WORD.search(line) is not None and _count(line) is not None


def last_progress(text: str) -> str:
    """The last line with a loss or with n of m, without what follows a bar in it."""
    whole = Text(text)
    lines = ((mark, whole.line_at(mark.start).text.strip()) for mark in reversed([*_read(whole)]))
    said = next((line for mark, line in lines if mark.loss or _OF_MANY.search(line)), "")
    bar = PROGRESS_BAR.match(said)
    return bar[0] if bar else said


def _is_drawn_once(marks: list[Mark]) -> bool:
    """Whether each bar shows one count only: a bar is drawn a last time while its script dies."""
    states = {(mark.bar, mark.counted) for mark in marks}
    return all(mark.bar for mark in marks) and len(states) == len({mark.bar for mark in marks})


def _columns(line: str) -> list[str]:
    """The names of the columns, if it is the header of a table with losses."""
    cells = [cell for cell in _WIDE_CELLS.split(line.strip()) if cell]
    is_of_steps = len(cells) > 1 and _OF_STEPS.fullmatch(cells[0]) is not None
    is_header = is_of_steps and not any(cell[0].isdigit() or ":" in cell for cell in cells)
    return cells if is_header and any(map(_OF_LOSSES.search, cells)) else []


def _losses_of_row(line: str, columns: list[str]) -> dict[str, str]:
    """The losses in a row of such a table, by their columns; empty if it is none."""
    cells = [cell for cell in _CELLS.split(line) if cell]
    is_row = len(cells) >= len(columns) and cells[0].replace("/", "").isdigit()
    rows = zip(columns, cells, strict=False) if is_row else ()
    found = {name: cell for name, cell in rows if _OF_LOSSES.search(name)}
    return found if all(map(_CELL_OF_LOSS.fullmatch, found.values())) else {}


def _read(text: Text) -> Iterator[Mark]:
    whole, columns = text.whole, list[str]()
    start = max(0, len(whole) - _READ_CHARACTERS)
    breaks = whole.count("\n", start) + whole.count("\r", start) - whole.count("\r\n", start)
    after = breaks - whole.endswith("\n")
    place, found = start, _WORD_OR_ROW.search(whole, start)
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
        if ' File "' in whole[max(0, begin - _LONGEST) : max(0, begin - 1)].rpartition("\n")[2]:
            line = ""  # the code of a frame, as fit(epochs=10)
        if error := _ERRORS.search(line):  # an error may follow a progress bar in the same line
            bar = PROGRESS_BAR.match(line[: error.start()])
            line = bar[0] if bar else ""
        rank, said = split_prefix(line)
        columns = _columns(said) or columns
        of_row = _losses_of_row(said, columns) if columns else {}
        if of_row or _WORD.search(line):
            loss = None if "'train_runtime'" in said else _LOSS.search(said)  # of the whole
            is_lost = _NO_LOSS.search(said) or (
                loss is None and (_NO_GRADIENT.search(said) or _SEVERAL.search(said))
            )
            value = "nan" if is_lost else loss[1] if loss else ""
            names = tuple(name for name, cell in of_row.items() if _IS_BAD.fullmatch(cell))
            value = "nan" if names else next(iter(of_row.values()), value)
            is_bad = _IS_BAD.fullmatch(value) is not None
            bad = max(1, len(names or _NOT_FINITE.findall(said))) if is_bad else 0
            of_many = _OF_MANY.search(said) if PROGRESS_BAR.match(said) else None
            total = of_many[0].partition("/")[2] if of_many else ""
            yield Mark(max(0, after), rank, _count(said), value, bad, begin, total, names)
        found = _WORD_OR_ROW.search(whole, max(begin + len(line), found.end()))


def _count(line: str) -> Count | None:
    found = [shape.search(line) for shape in (_EPOCH, _STEP, _OF_MANY)]
    if not any(found):
        found[1] = _PLAIN.search(line)
    epoch, step, part = (float(each[each.lastindex or 1]) if each else 0.0 for each in found)
    return (epoch, step, part) if any(found) else None
