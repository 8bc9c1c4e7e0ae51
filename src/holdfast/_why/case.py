"""The case before the judge: whose end it is, and what a rule answers with."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast._why import words
from holdfast._why.ends import End
from holdfast._why.evidence import Evidence
from holdfast._why.verdict import Cause, Sure

# The statuses of `_leave/statuses.py`, which stands above: a test holds the two together.
BAD, NOT_DURABLE, REQUEUE, IDLE, HUNG = 65, 74, 75, 76, 77
HUNG_UP, PERSON, TERMINATED = 129, 130, 143


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
            or words.record(self.evidence.lease.get("job"))
            or words.record(self.evidence.beat.get("slurm"))
        )

    @property
    def durable_step(self) -> int | None:
        found = [
            self.evidence.durable_step,
            self.end.durable_step,
            words.whole(self.evidence.exit.get("durable_step")),
            words.whole(self.evidence.beat.get("durable_step")),
            *(words.whole(event.get("durable_step")) for event in self.evidence.journal),
            *(
                words.whole(event.get("step"))
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
                return words.whole(event.get("step")) or 0
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
