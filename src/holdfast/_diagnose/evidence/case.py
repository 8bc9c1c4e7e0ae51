"""The case before the judge: whose end it is, and what a rule answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast import _text
from holdfast._diagnose.evidence.ends import End
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.texts.exceptions import Fault
from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign


@dataclass
class Finding:
    """What a rule says: the verdict without what is the same for all."""

    cause: Cause
    sentence: str
    sure: Sure
    evidence: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@dataclass
class Case:
    """All the evidence, and the end that is to be explained."""

    evidence: Evidence
    ends: list[End]
    end: End  # of the rank to blame
    others: list[str] = field(default_factory=list)
    culprit: list[str] = field(default_factory=list)  # how it was found, among several

    @property
    def who(self) -> str:
        return self.end.name()

    @property
    def opening(self) -> str:
        """The same, as it begins a sentence."""
        name = self.who
        return name[:1].upper() + name[1:]

    @property
    def is_in_slurm(self) -> bool:
        return bool(
            self.evidence.job
            or _text.record(self.evidence.lease.get("job"))
            or _text.record(self.evidence.beat.get("slurm"))
        )

    @property
    def durable_step(self) -> int | None:
        found = [
            self.evidence.durable_step,
            self.end.durable_step,
            _text.whole(self.evidence.exit.get("durable_step")),
            _text.whole(self.evidence.beat.get("durable_step")),
            *(_text.whole(event.get("durable_step")) for event in self.evidence.journal),
            *(
                _text.whole(event.get("step"))
                for event in self.evidence.journal
                if event.get("event") == "checkpoint"
            ),
        ]
        return max((step for step in found if step is not None), default=None)

    @property
    def finished_step(self) -> int | None:
        """The step at which the training was complete, if it was."""
        for event in reversed(self.evidence.journal):
            if event.get("event") == "finished":
                return _text.whole(event.get("step")) or 0
        return None

    def stacks_lines(self, most: int = 8) -> list[str]:
        """The top of the stack that faulthandler wrote of the thread that failed."""
        lines = (self.end.stacks or "").splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
        current = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
        begin = starts[-1] if starts else 0
        at = next((i for i in current if i >= begin), None)
        if at is None:
            return []
        found = []
        for line in lines[at + 1 :]:
            if not line.strip().startswith("File "):
                break
            found.append(line.strip())
        return found[:most]


# -- What went wrong in words: an exception, or a line that was printed in its place ---------------


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
            told += [f"which came of {_text.one_line(each, 240)}" for each in self.fault.chain[:3]]
            if self.fault.place:
                told.append(f"at {self.fault.place}")
        if self.sign is not None and (self.fault is None or self.sign.text not in told[0]):
            told.append(f"it printed: {_text.one_line(self.sign.text, 400)}")
        if case.end.had_failed and case.end.signal:
            told.append(f"while it left because of that, it died of {case.end.signal}")
        phase = _text.text(self.record.get("phase"))
        return [*told, f"in the phase {phase}"] if phase else told
