"""A proof against a run that is there already: only the ends can be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from holdfast._tools.prove.course import Course, Undisturbed
from holdfast._tools.prove.files import compare_files
from holdfast._tools.prove.runs import compare_runs, newest_step, unlike_generators
from holdfast._tools.prove.trail import Finding


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


# -- The ends of two courses: how far apart their weights are, and whether their files are equal.


def end_distance(one: Course, other: Course) -> float | None:
    """The norm of the difference of all weights, relative to their norm."""
    paths = one.end / "0.float64", other.end / "0.float64"
    if not all(path.exists() for path in paths):
        return None
    first, second = (np.fromfile(path, np.float64) for path in paths)
    if first.shape != second.shape:
        return None
    apart, whole = float(np.linalg.norm(first - second)), float(np.linalg.norm(first))
    return apart / whole if whole else apart


def say_apart(distance: float) -> str:
    if distance == 0.0:
        return "the weights are the same in the end"
    return f"the weights are {distance:.2%} apart in the end"


def compare_results(
    courses: tuple[Course, Course, Course],
    asked: tuple[str, ...],
    after: int | None,
    note: Callable[[str], None],
) -> Finding | None:
    """The first file that differs: those that were asked for, and what the script saves as result.

    A file that it resumes from is none: when it was saved last depends on the interruptions.
    """
    reference, again, course = courses
    results = sorted(
        name
        for name, saved in reference.filing.saved.items()
        if name not in course.filing.loaded
        and not Path(name).is_absolute()
        and (name in course.filing.saved or saved.place >= reference_steps(reference))
    )
    for name in dict.fromkeys([*asked, *results]):
        expected, found = _place(reference, name), _place(course, name)
        if name not in asked and not expected.exists():
            continue  # the undisturbed run has removed it by itself
        difference = compare_files(name, expected, found)
        if difference is None:
            continue
        if name not in asked and compare_files(name, expected, _place(again, name)) is not None:
            note(f"{name} is another one each time and was not compared.")
            continue
        return Finding(
            f"{name}: {difference.item}",
            None,
            after,
            [difference.expected, None, 1],
            [f"{difference.found} ({difference.apart})", None, 1],
            "result-differs",
        )
    return None


def reference_steps(course: Course) -> int:
    return max((saved.place for saved in course.filing.saved.values()), default=0)


def _place(course: Course, name: str) -> Path:
    name = name.replace("{dir}", str(course.folder / "dir"))
    return course.work / name


def tally(reference: Undisturbed, course: Course) -> list[str]:
    """What was compared, in words."""
    history = reference.histories.get(0)
    if history is None:
        return ["the newest checkpoints of both runs"]
    found = []
    if history.sights:
        kinds: dict[str, int] = {}
        for item in history.end or history.sights[-1].items:
            kind = item.partition("/")[0]
            kinds[kind] = kinds.get(kind, 0) + 1
        words = {
            "weight": "tensors of weights",
            "moment": "of optimizer state",
            "scheduler": "values of schedulers",
            "scaler": "of gradient scalers",
            "generator": "generators",
            "buffer": "buffers",
        }
        found += [f"{kinds[kind]} {text}" for kind, text in words.items() if kind in kinds]
        batches = sum(len(sight.batches) for sight in history.sights)
        if batches and not history.boundaries:  # those of a run are part of its boundaries
            found.append(f"{batches} batches")
    if history.boundaries:
        found.append(f"{len(history.boundaries)} boundaries with all state, metrics and batches")
    files = sum(name not in course.filing.loaded for name in reference.course.filing.saved)
    if files:
        found.append(f"{files} files")
    return found
