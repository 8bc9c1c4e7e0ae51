"""What went wrong in words: an exception, or a line that was printed in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast._why import words
from holdfast._why.case import Case
from holdfast._why.faults import Fault

if TYPE_CHECKING:
    from holdfast._why.sign import Sign


@dataclass(frozen=True)
class Trouble:
    """One trouble, however it was told."""

    kind: str
    said: str  # in one line
    fault: Fault | None
    sign: Sign | None

    @property
    def message(self) -> str:
        """All that was said, for figures to be found in it."""
        parts = [self.said]
        if self.fault is not None:
            parts = [f"{self.fault.type}: {self.fault.message}", *self.fault.chain]
        return "\n".join([*parts, *([self.sign.text] if self.sign is not None else [])])

    @property
    def record(self) -> dict[str, Any]:
        """What the trainer noted of it."""
        return self.fault.record if self.fault is not None else {}

    @property
    def details(self) -> dict[str, Any]:
        """The figures that were found in its text."""
        return self.sign.details if self.sign is not None else {}

    def evidence(self, case: Case) -> list[str]:
        """What there is to show for it."""
        told = []
        if self.fault is not None:
            told.append(f"{case.who} raised {self.fault.sentence(400)}")
            told += [f"which came of {words.one_line(each, 240)}" for each in self.fault.chain[:3]]
            if self.fault.place:
                told.append(f"at {self.fault.place}")
        if self.sign is not None and (self.fault is None or self.sign.text not in told[0]):
            told.append(f"it printed: {words.one_line(self.sign.text, 400)}")
        if case.end.had_failed and case.end.signal:
            told.append(f"while it left because of that, it died of {case.end.signal}")
        phase = words.text(self.record.get("phase"))
        return [*told, f"in the phase {phase}"] if phase else told
