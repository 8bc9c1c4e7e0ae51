"""A log line by line, without colours and prefixes, with the rank of each line.

Logs have lines of megabytes and millions of lines. So a text is never split: it is searched as a
whole, and only the lines that were found are cut out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_BLOCK = 1 << 13
_LONGEST = 3000  # characters of a line that are read, on both sides of a hit
# srun -l: "3: ", right-aligned where there are more than ten tasks.
_TASK = re.compile(r" {0,6}(\d{1,6}):(?: |$)")
# What `ts`, container runtimes, journald and loggers put before each line. One space after it
# belongs to it; more is the indentation of the line itself.
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_ZONE = r"(?:Z| ?[+-]\d\d:?\d\d| UTC)?"
_STAMP = re.compile(
    rf"[\[(]?(?:(?P<full>\d{{4}}[-/.]\d\d[-/.]\d\d[T _]{_CLOCK}{_ZONE})"
    rf"|(?P<syslog>{_MONTH} [ \d]\d (?:\d{{4}} )?{_CLOCK})"
    rf"|\d\d/\d\d/\d{{2,4}},? {_CLOCK}|{_CLOCK})[\])]?(?: \||[:,])?(?: |$)"
    rf"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) {_MONTH} [ \d]\d {_CLOCK} \d{{4}}(?=\[\d)"  # horovodrun's
)
_AFTER_FULL = re.compile(r"std(?:err|out) [FP](?: |$)")  # kubelet
_AFTER_SYSLOG = re.compile(r"[\w.-]+ [\w./-]+(?:\[\d+\])?: ")
_LABELS = tuple(
    map(
        re.compile,
        (
            # torch's excepthook and its C++ lines: "[rank3]: "; torchrun --tee: "[default3]:".
            r"\[(?:(?P<rank>rank)|default|trainer|worker)(?P<number>\d{1,6})\]:",
            # mpirun, horovodrun, SageMaker
            r"\[(?:\d{1,6},)?(?:mpirank:)?(?P<number>\d{1,6})[^\]\n]{0,40}\]<std(?:err|out)>: ?",
            # ray, and vLLM: "(Worker_TP3 pid=12) ", "(VllmWorker rank=3 pid=12) ".
            r"\((?:\w{1,40}(?: rank=|_TP)(?P<number>\d{1,6})\w{0,40} |[\w.]+ )?(?:pid|ip)="
            r"[^)\n]{1,80}\) ?",
            r"\[(?P<rank>[Rr]ank)[ _:=]?(?P<number>\d{1,6})\]:? ",
            r"(?P<rank>[Rr]ank) ?(?P<number>\d{1,6}): ",
            r"(?:rank|worker|process)[-_ ]?(?P<number>\d{1,6}) +\| ",
            r"\[pod/[^\]\n]{1,200}\] ",  # kubectl logs --prefix
            # docker compose, Determined
            r"(?:(?!(?i:step|ep|iter|trial|fold))[A-Za-z][\w.-]{0,60}\d +\||[\da-f]{8} \|\|) ",
            r"std(?:err|out): ",  # accelerate test
            r"[A-Za-z][\w.-]{0,60}/\d{1,4} ",  # torchx
        ),
    )
)
# pdsh, clush and DeepSpeed's launcher of many nodes: "node-01: ", "[node-01] ".
_HOST = re.compile(
    r"(?m)^(?!\[?(?i:rank|epoch|step|iter|fold|trial))"
    r"(?:\[[\w.-]{0,60}\d\]:? |[A-Za-z][\w.-]{0,60}\d: |\d{1,3}(?:\.\d{1,3}){3}: )"
)
_HOST_LINES = 6
_NUMBER = re.compile(r"(?m)^\[(\d{1,5})\] ")
_RANK_WITHIN = re.compile(r"\[rank(\d{1,6})\]:")
FIRST_HITS, LAST_HITS = 10, 90


class Line(NamedTuple):
    """A line of a text, or one state of a progress bar."""

    text: str  # without the prefixes of launchers
    rank: int | None
    number: int  # from 1, as an editor counts
    from_end: int  # lines after it, with overwritten ones
    start: int
    end: int


_ONLY_LETTERS = {code: " " for code in range(128) if not chr(code).isalpha()}


@cache
def _inner_words(needle: str) -> list[str]:
    """Its words that are whole: the first and the last may be parts of words."""
    return re.findall(r"(?<=[^A-Za-z])[A-Za-z]+(?=[^A-Za-z])", needle)


@cache
def _outer_words(needle: str) -> list[str]:
    """Its first and its last word, with a space at the side where the word is whole."""
    padded = needle.translate(_ONLY_LETTERS)
    first, last = re.match(r"[A-Za-z]+ ?", padded), re.search(r" ?[A-Za-z]+$", padded)
    return [each[0] for each in (first, last) if each is not None]


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode("ascii")


class Text:
    """A whole text of any length, and its lines on demand."""

    def __init__(self, raw: str, first_line: int = 1) -> None:
        self.whole = _without_hosts(_ANSI.sub("", raw) if "\x1b" in raw else raw)
        # ASCII with the same offsets: several times as fast to search.
        self._plain = _ascii(self.whole)
        self._first_line = first_line
        self._counts, self._bars = [0], [0]
        for start in range(0, len(self.whole), _BLOCK):
            end = start + _BLOCK
            self._counts.append(self._counts[-1] + self._plain.count("\n", start, end))
            self._bars.append(self._bars[-1] + self._bars_in(start, end))
        self.line_count = self._counts[-1] + (not self.whole.endswith("\n"))

    @cached_property
    def _words(self) -> set[str]:
        """All words, so that most texts that are not there need no search."""
        return set(self._plain.translate(_ONLY_LETTERS).split())

    @cached_property
    def _joined_words(self) -> str:
        return f" {' '.join(self._words)} "

    def _may_have(self, needle: str) -> bool:
        """False if a word of it is not there."""
        return self._words.issuperset(_inner_words(needle)) and all(
            each in self._joined_words for each in _outer_words(needle)
        )

    def hits(self, needle: str) -> Iterator[Line]:
        """The lines with this text: the first and the last of them, if they are very many."""
        first: list[Line] = []
        last: list[Line] = []
        needle = _ascii(needle)
        if not self._may_have(needle):
            return iter(())
        position = self._plain.find(needle)
        while position >= 0 and len(first) < FIRST_HITS:
            first.append(self.line_at(position))
            position = self._plain.find(needle, max(position + 1, first[-1].end))
        if position >= 0:
            done = first[-1].end
            position = self._plain.rfind(needle, done)
            while position >= 0 and len(last) < LAST_HITS:
                last.append(self.line_at(position))
                position = self._plain.rfind(needle, done, last[-1].start)
        return chain(first, reversed(last))

    def line_at(self, position: int) -> Line:
        whole = self._plain
        lowest = max(0, position - _LONGEST)
        start = max(
            whole.rfind("\n", lowest, position), whole.rfind("\r", lowest, position), lowest - 1
        )
        return self._cut(start + 1, self._end_of(position), position)

    def after(self, line: Line, most: int) -> Iterator[Line]:
        position = line.end
        for _ in range(most):
            if self.whole.startswith("\r\n", position):
                position += 1
            position += 1
            if position >= len(self.whole):
                return
            yield (found := self._cut(position, self._end_of(position), position))
            position = found.end

    def before(self, line: Line, most: int) -> Iterator[Line]:
        """The preceding lines, the nearest first."""
        for _ in range(most):
            end = line.start - 1
            if end < 1:
                return
            if self.whole[end] == "\n" and self.whole[end - 1] == "\r":
                end -= 1
            line = self.line_at(end)
            yield line

    def from_same(self, line: Line, most: int) -> Iterator[Line]:
        """The following lines of the same rank: lines of several ranks come mixed."""
        for other in self.after(line, most):
            if other.rank == line.rank:
                yield other

    def _end_of(self, position: int) -> int:
        highest = min(len(self.whole), position + _LONGEST)
        end = self._plain.find("\n", position, highest)
        end = highest if end < 0 else end
        back = self._plain.find("\r", position, end)
        return end if back < 0 else back

    def _cut(self, start: int, end: int, position: int) -> Line:
        rank, text = split_prefix(self.whole[start:end])
        if rank is None:
            # A message behind a progress bar, in the same line.
            within = _RANK_WITHIN.findall(self.whole, start, min(end, position + 1))
            rank = int(within[-1]) if within else None
        block = start // _BLOCK
        breaks = self._counts[block] + self._plain.count("\n", block * _BLOCK, start)
        bars = self._bars[-1] - self._bars[block] - self._bars_in(block * _BLOCK, end + 1)
        from_end = max(0, self.line_count - breaks - 1) + max(0, bars)
        return Line(text, rank, self._first_line + breaks, from_end, start, end)

    def _bars_in(self, start: int, end: int) -> int:
        """How often a progress bar has overwritten a line."""
        return self._plain.count("\r", start, end) - self._plain.count("\r\n", start, end)


def _without_hosts(text: str) -> str:
    """Without the names that stand before most lines, if they are few: those of hosts.

    Bare numbers that come mixed are ranks, as Intel's MPI prints them.
    """
    sample = text[-4 * _BLOCK :]
    ranks = [int(number) for number in _NUMBER.findall(sample)]
    if len(ranks) >= max(_HOST_LINES, sample.count("\n") / 2) and ranks != sorted(ranks):
        return _NUMBER.sub(r"[rank\1]: ", text)
    found = Counter(_HOST.findall(sample))
    names = [name for name, lines in found.items() if lines >= _HOST_LINES]
    if sum(found[name] for name in names) * 2 < sample.count("\n") or not names:
        return text
    return re.sub(f"^(?:{'|'.join(map(re.escape, names))})+", "", text, flags=re.MULTILINE)


def split_prefix(line: str) -> tuple[int | None, str]:
    """The rank that a launcher put before a line, and the line as the rank wrote it.

    >>> split_prefix("[rank1]: ValueError: x"), split_prefix("0: [default3]:  File")
    ((1, 'ValueError: x'), (3, '  File'))
    >>> split_prefix("2026-11-17T11:10:21.5Z stderr F   File")
    (None, '  File')
    """
    rank: int | None = None
    task = _TASK.match(line)
    if task is not None and _STAMP.match(line) is None:
        rank, line = int(task[1]), line[task.end() :]
    named = False
    while (found := _split_one(line)) is not None:
        label, line = found
        groups = label.groupdict()
        if groups.get("rank") and label[0].endswith("]:"):
            line = line.removeprefix(" ")
        if groups.get("number") and (groups.get("rank") or not named):
            rank = int(groups["number"])
            named = named or bool(groups.get("rank"))
    return rank, line


def _split_one(line: str) -> tuple[re.Match[str], str] | None:
    stamp = _STAMP.match(line)
    if stamp is not None:
        rest = line[stamp.end() :]
        more = (_AFTER_FULL if stamp["full"] else _AFTER_SYSLOG).match(rest)
        is_more = more is not None and (stamp["full"] or stamp["syslog"])
        return stamp, rest[more.end() :] if more is not None and is_more else rest
    for shape in _LABELS:
        if (label := shape.match(line)) is not None and label.end():
            return label, line[label.end() :]
    return None
