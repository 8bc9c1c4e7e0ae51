"""What lint judges by, what it finds, and edits of a script."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from holdfast._environment.slurm.options import Option, WarningSignal
from holdfast._tools.doctor.run import save_seconds, step_seconds

_ORDER = ("error", "warning", "hint")
NOT_UNDERSTOOD = "not-understood"  # the rule that says so: silence would read as a good script
SLACK_SECONDS = 30  # SLURM checks every 30 s, so a signal may come that much earlier


@dataclass(frozen=True)
class Surroundings:
    folder: Path  # of the script
    cwd: Path  # where it is submitted from
    run: Path | None = None
    ignored: Collection[str] = ()

    @cached_property
    def save_seconds(self) -> float | None:
        return None if self.run is None else save_seconds(self.run)

    @cached_property
    def step_seconds(self) -> float | None:
        return None if self.run is None else step_seconds(self.run)

    @property
    def needed_seconds(self) -> float | None:
        """The time of a save from its request on, as the run has measured it."""
        return None if self.save_seconds is None else self.save_seconds + (self.step_seconds or 0.0)

    @property
    def run_name(self) -> str:
        return "" if self.run is None else self.run.name


@dataclass(frozen=True)
class Edit:
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class LintFinding:
    rule: str
    severity: str  # of _ORDER
    line: int
    message: str
    source: str = ""  # the line as it stands
    corrected: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    folder: str | None = None  # a missing one, which --fix makes
    is_fixable: bool = False  # by --fix, which leaves hints as they are


def in_order(found: list[LintFinding], around: Surroundings) -> list[LintFinding]:
    """Each once, by its line, without the ignored rules."""
    kept = [each for each in dict.fromkeys(found) if each.rule not in around.ignored]
    return sorted(kept, key=lambda each: (each.line, _ORDER.index(each.severity), each.rule))


def apply_edits(text: str, *groups: Iterable[Edit]) -> str:
    """The text with the changes; of two groups that overlap, only the first."""
    chosen: list[Edit] = []
    for group in groups:
        edits = [edit for edit in group if edit not in chosen]
        if not any(a.start < b.end and b.start < a.end for a in edits for b in chosen):
            chosen += edits
    # From the end, so that offsets before stay valid; insertions at one place keep their order.
    chosen.sort(key=lambda each: (each.start, each.end))
    chosen.reverse()
    for edit in chosen:
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def changed_lines(text: str, edits: Iterable[Edit]) -> tuple[str, ...]:
    old, new = text.splitlines(), apply_edits(text, edits).splitlines()
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return tuple(line for kind, _, _, at, end in changes if kind != "equal" for line in new[at:end])


def whole_lines(text: str, start: int, end: int) -> tuple[int, int]:
    """The offsets of the whole lines around a part of the text."""
    last = text.find("\n", end)
    return text.rfind("\n", 0, start) + 1, len(text) if last < 0 else last + 1


def set_value(option: Option, value: str) -> Edit:
    """The option with another value, in the same notation."""
    if option.value_start >= option.end:
        return Edit(option.start, option.end, f"--{option.name}={value}")
    return Edit(option.value_start, option.end, value)


def signal_value(option: Option, warning: WarningSignal, *, to_batch: bool) -> str:
    """A value for --signal with the same signal and time."""
    flags, _, rest = option.value.rpartition(":")
    prefix = ("R" if "R" in flags.upper() else "") + ("B" if to_batch else "")
    written = rest.partition("@")[0]
    return f"{prefix}{':' if prefix else ''}{written}@{warning.seconds}"


def before_the_limit(warning: WarningSignal) -> str:
    return f"{warning.seconds} to {warning.seconds + SLACK_SECONDS} s before the limit"
