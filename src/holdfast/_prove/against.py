"""A proof against a run that is there already: only the ends can be compared."""

from __future__ import annotations

from pathlib import Path

from holdfast._prove.course import Course, Undisturbed
from holdfast._prove.runs import compare_runs, newest_step, unlike_generators
from holdfast._prove.trail import Finding


class KnownRun(Undisturbed):
    """A run folder in place of an undisturbed course: nothing is known but how it ended."""

    def __init__(self, folder: Path, course: Course) -> None:
        super().__init__(course)
        self.folder = folder
        self._steps = newest_step(folder)
        self.start_seconds = 2.0
        self.notes: list[str] = []

    @property
    def steps(self) -> int:
        return self._steps

    def moments(self) -> list[str]:
        return ["start", "step", "boundary", "commit"]

    def compare(self, course: Course, after: int | None) -> Finding | None:
        """The first difference of the newest checkpoints."""
        folder = self._counterpart(course)
        if folder is None:
            missing = ["the script opened no run", None, 1]
            return Finding("the run", None, after, [str(self.folder), None, 1], missing, "unknown")
        unlike = unlike_generators(self.folder, folder)
        difference = compare_runs(self.folder, folder, unlike)
        if difference is None:
            if unlike:
                names = ", ".join(sorted(unlike))
                self.notes.append(f"Not compared, since they may never be seeded: {names}.")
            return None
        found = f"{difference.found} ({difference.apart})"
        leaves = ([difference.expected, None, 1], [found, None, 1])
        return Finding(difference.item, None, after, *leaves, "reference-differs")

    def _counterpart(self, course: Course) -> Path | None:
        """The course's run of the same name, or its only one."""
        folders = [Path(folder) for folder in course.runs.values()]
        named = [folder for folder in folders if folder.name == self.folder.name]
        return next(iter([*named, *reversed(folders)]), None)
