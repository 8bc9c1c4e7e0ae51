"""Figures of many rounds, and the tables made of them.

A row's ratio is the median of its ratios to another row of the same table, round by round: the
speed of a machine drifts from round to round, and a ratio within a round does not see it.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

LIMIT, OURS, PEER = "limit", "holdfast", "peer"
_UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6, "%": 1e2}
_SIZES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass
class Row:
    """One way of doing a thing: its figure in every round, or a word why there is none."""

    name: str
    kind: str
    values: list[float] = field(default_factory=list)
    against: str = ""  # another row's name; "" for the limit of the table
    at_most: float | None = None  # the target, as a ratio
    at_most_value: float | None = None  # the target, as a figure
    word: str = ""  # why there are no figures, or what to know about them

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass
class Table:
    """One thing measured, by several ways."""

    topic: str
    title: str
    unit: str  # of what is printed: figures are kept in seconds, bytes or as they are
    rows: list[Row]
    setting: str = ""  # sizes, rounds, what is done
    limit: str = ""  # the row that the others are compared with
    compared: str = "× limit"

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def ratio(self, row: Row) -> float | None:
        other = self.row(row.against or self.limit)
        if other is None or not other.values or not row.values or other is row:
            return None
        if len(other.values) == len(row.values):
            pairs = zip(row.values, other.values, strict=True)
            return statistics.median(mine / its for mine, its in pairs)
        return row.median / other.median

    def verdict(self, row: Row) -> str:
        """Met or missed, with the target; nothing for a row without one."""
        if not row.values or (row.at_most is None and row.at_most_value is None):
            return ""
        if row.at_most_value is not None:
            met = row.median <= row.at_most_value
            wanted = self.written(row.at_most_value)
            if min(row.values) < 0 and max(row.values) > row.at_most_value:
                return f"≤ {wanted}: not shown, the spread is wider"
        else:
            ratio = self.ratio(row)
            assert ratio is not None
            assert row.at_most is not None
            met, wanted = ratio <= row.at_most, f"{row.at_most:g} ×"
        return f"≤ {wanted}: {'met' if met else 'missed'}"

    def written(self, value: float) -> str:
        """A figure in words, with three digits that count."""
        unit, factor = self.unit, 1.0
        if unit in _UNITS:
            factor = _UNITS[unit]
        elif unit == "bytes":
            unit = next((u for u, size in _SIZES.items() if abs(value) < 1e3 * size), "GB")
            factor = 1 / _SIZES[unit]
        scaled = value * factor
        digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
        return f"{scaled:.{digits}f} {unit}".rstrip()

    def cells(self) -> list[list[str]]:
        """The table as texts, its head first; the ratio comes before the figures."""
        found = [["", self.compared, "median", "lowest to highest", "target"]]
        for row in self.rows:
            ratio = self.ratio(row)
            shown = _ratio(ratio) if ratio is not None else "1" if row.name == self.limit else ""
            if not row.values:
                found.append([row.name, "", row.word or "no figure", "", ""])
                continue
            spread = f"{self.written(min(row.values))} to {self.written(max(row.values))}"
            told = ", ".join(filter(None, (self.verdict(row), row.word)))
            found.append([row.name, shown, self.written(row.median), spread, told])
        # A column in which nothing stands says nothing.
        filled = [at for at in range(5) if at in (0, 2) or any(line[at] for line in found[1:])]
        return [[line[at] for at in filled] for line in found]

    def text(self) -> str:
        """For a terminal."""
        cells = self.cells()
        widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
        lines = [f"{self.title}", f"  {self.setting}"] if self.setting else [self.title]
        for line in cells:
            first, *rest = (
                cell.ljust(width) if at == 0 or head == "target" else cell.rjust(width)
                for at, (cell, width, head) in enumerate(zip(line, widths, cells[0], strict=True))
            )
            lines.append(f"  {first}  {'  '.join(rest)}".rstrip())
        return "\n".join(lines)

    def markdown(self) -> str:
        head, *body = self.cells()
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for line, row in zip(body, self.rows, strict=True):
            if row.kind == OURS:
                line = [f"**{cell}**" if cell and at < 2 else cell for at, cell in enumerate(line)]
            lines.append(f"| {' | '.join(line)} |")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """For the results' JSON, with what follows from the figures beside them."""
        kept = asdict(self)
        for each, row in zip(kept["rows"], self.rows, strict=True):
            each["ratio"] = self.ratio(row)
            each["median"] = row.median if row.values else None
            each["verdict"] = self.verdict(row)
        return kept

    @staticmethod
    def of(record: dict[str, Any]) -> Table:
        kept = dict(record)
        fields = Row.__dataclass_fields__
        kept["rows"] = [
            Row(**{k: v for k, v in row.items() if k in fields}) for row in kept["rows"]
        ]
        return Table(**kept)


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"
