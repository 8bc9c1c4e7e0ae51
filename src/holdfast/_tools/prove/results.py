"""How two trainings ended: their newest checkpoints, their weights and their files, compared.

What must differ is left out: attempts, times, ids, and when the run's phases came. Nothing in a
run folder is changed; damaged checkpoints stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._errors import CheckpointError, FolderError
from holdfast._store.folder.attempts import find_run
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.format.tree import Pairs, TreeVisitor
from holdfast._store.read.merge_ranks import read_checkpoint, read_world
from holdfast._store.read.verify import Loaded
from holdfast._tools.convert.export import own_lineage
from holdfast._tools.prove.causes import Deviation
from holdfast._tools.prove.files import (
    FileDifference,
    StoredTensor,
    compare_files,
    first_difference,
    stored_bytes,
)
from holdfast._tools.prove.script_run import ScriptRun, UndisturbedRun

# With a blank: the names of the user's states are keywords, and have none.
_GENERATORS = "global generators"
# The rest of a position depends on these and on the generators.
_POSITION = ("epoch", "lap", "batches", "is_over", "state", "states")


@dataclass(frozen=True)
class _Newest:
    step: int
    ranks: list[dict[str, Any]]  # of each: state, metrics, position, generators, as plain trees
    name: str


def compare_runs(
    expected: Path, found: Path, unseeded: Collection[str] = ()
) -> FileDifference | None:
    """The first difference between the newest good checkpoints of two runs, or None.

    `unseeded` generators ("python", "numpy", …) are not compared: one that a script never seeds
    differs each time, and may be unused.
    """
    newest: list[_Newest] = []
    for folder in (expected, found):
        try:
            newest.append(_newest(folder))
        except (CheckpointError, FolderError) as error:
            said = str(error).partition("\n")[0]
            sides = (f"step {newest[0].step}", said) if newest else (said, "")
            return FileDifference(str(folder), "the newest checkpoint", *sides, "cannot be read")
    one, other = newest
    if one.step != other.step:
        steps, apart = (str(one.step), str(other.step)), f"by {abs(one.step - other.step)}"
        return FileDifference(other.name, "the number of steps", *steps, apart)
    if len(one.ranks) != len(other.ranks):
        counts = str(len(one.ranks)), str(len(other.ranks))
        return FileDifference(other.name, "the number of ranks", *counts, "by their number")
    for rank, pair in enumerate(zip(one.ranks, other.ranks, strict=True)):
        there, here = (
            parts
            | {_GENERATORS: {n: v for n, v in parts[_GENERATORS].items() if n not in unseeded}}
            for parts in pair
        )
        difference = first_difference(other.name, there, here)
        if difference is not None:
            of_rank = f"rank {rank}: " if len(one.ranks) > 1 else ""
            return replace(difference, item=of_rank + difference.item)
    return None


def unlike_generators(expected: Path, found: Path) -> frozenset[str]:
    """The global generators whose states differ: in two undisturbed runs, the unseeded ones."""
    try:
        both = [_newest(path).ranks for path in (expected, found)]
    except (CheckpointError, FolderError):
        return frozenset()
    return frozenset(
        name
        for one, other in zip(*both, strict=False)
        for name in {**one[_GENERATORS], **other[_GENERATORS]}
        if first_difference("", one[_GENERATORS].get(name), other[_GENERATORS].get(name))
    )


def _newest(folder: Path) -> _Newest:
    """The newest whole checkpoint on the run's own lineage, as a resume would choose it."""
    layout, run_id = find_run(folder)
    line = own_lineage(layout, run_id)
    trouble: CheckpointError | None = None
    for step, attempt, path in reversed(layout.checkpoint_folders()):
        if is_on_line(line, attempt, step):
            try:
                ranks = [read_checkpoint(path, rank) for rank in range(read_world(path))]
            except CheckpointError as error:
                trouble = trouble or error
            else:
                name = f"{folder}: {path.name}"
                return _Newest(ranks[0].head["step"], [_parts(each) for each in ranks], name)
    raise trouble or CheckpointError(f"{folder}: there is no checkpoint.")


def _parts(loaded: Loaded) -> dict[str, Any]:
    head, tree = loaded.head, loaded.head["tree"]
    plain = _ComparableTree(loaded)
    extra = plain.visit(tree.get("extra", {}), "")
    position = extra.get("position") or {}
    if position.get("is_over") or not position.get("batches"):
        position = {**position, "state": None}  # of the pass before, and unused
    return {
        **{name: plain.visit(encoded, name) for name, encoded in tree["state"].items()},
        "logged metrics": {
            **head.get("metrics", {}),
            **{f"best ({watched})": value for watched, value in head.get("best", {}).items()},
        },
        "position in the data": {n: position[n] for n in _POSITION if n in position},
        _GENERATORS: extra.get("generators") or {},
    }


class _ComparableTree(TreeVisitor):
    """Decodes a stored tree into plain containers, with its tensors as bytes."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def tensor(self, number: int, _: str) -> StoredTensor:
        spec = self._loaded.plan.specs[number]
        data = stored_bytes(self._loaded.data(number) if spec.size_bytes else memoryview(b""))
        dtype = spec.dtype.removeprefix("scalar ")
        if spec.kind == "numpy" and dtype[:1] in "<|":
            dtype = np.dtype(dtype).name
        return StoredTensor("uint8" if spec.kind == "bytes" else dtype, spec.shape, data)

    def shard(self, shard: dict[str, Any], path: str) -> dict[str, Any]:
        """This rank's part, and which one it is."""
        return shard | {"t": None if shard["t"] is None else self.tensor(shard["t"], path)}

    def mapping(self, _: dict[str, Any], pairs: Pairs) -> dict[Any, Any]:
        keys = [self.visit(key, "") for key, _ in pairs]
        hashable = [tuple(key) if isinstance(key, list) else key for key in keys]
        return {key: item for key, (_, item) in zip(hashable, pairs, strict=True)}

    def container(self, _: str, inner: Any) -> Any:
        return inner

    def scalar(self, tag: str, inner: Any) -> str:
        return f"{tag[1:]} {inner}"


class ReferenceRun(UndisturbedRun):
    """A run folder in place of an undisturbed training: only its end is known."""

    def __init__(self, folder: Path, script: ScriptRun) -> None:
        super().__init__(script)
        self.folder = folder
        self._steps = _newest(folder).step
        self.start_seconds = 2.0

    @property
    def steps(self) -> int:
        return self._steps

    def moments(self) -> list[str]:
        return ["start", "step", "boundary", "commit"]

    def compare(
        self, script: ScriptRun, after: int | None, note: Callable[[str], None]
    ) -> Deviation | None:
        # The script's run of the same name, or its newest one.
        folders = [Path(folder) for folder in script.runs.values()]
        named = [folder for folder in folders if folder.name == self.folder.name]
        folder = next(iter([*named, *reversed(folders)]), None)
        if folder is None:
            texts = str(self.folder), "the script opened no run"
            return Deviation.of_texts("unknown", "the run", texts, after)
        unlike = unlike_generators(self.folder, folder)
        difference = compare_runs(self.folder, folder, unlike)
        if difference is not None:
            return _judged("reference-differs", difference.item, difference, after)
        if unlike:
            names = ", ".join(sorted(unlike))
            note(f"Not compared, since they may never be seeded: {names}.")
        return None


def end_distance(one: ScriptRun, other: ScriptRun) -> float | None:
    """The norm of the difference of all weights, relative to their norm."""
    paths = one.end / "0.float64", other.end / "0.float64"
    if not all(path.exists() for path in paths):
        return None
    first, second = (np.fromfile(path, np.float64) for path in paths)
    if first.shape != second.shape:
        return None
    apart, whole = float(np.linalg.norm(first - second)), float(np.linalg.norm(first))
    return apart / whole if whole else apart


def compare_results(
    scripts: tuple[ScriptRun, ScriptRun, ScriptRun],
    asked: tuple[str, ...],
    after: int | None,
    note: Callable[[str], None],
) -> Deviation | None:
    """The first file that differs, of those asked for and those that the script saves as results.

    A file that it resumes from is no result: the interruptions decide when it was saved last.
    """
    reference, again, script = scripts
    last = max((saved.place for saved in reference.file_log.saved.values()), default=0)
    results = sorted(
        name
        for name, saved in reference.file_log.saved.items()
        if name not in script.file_log.loaded
        and not Path(name).is_absolute()
        and (name in script.file_log.saved or saved.place >= last)
    )
    for name in dict.fromkeys([*asked, *results]):
        expected, found = _place(reference, name), _place(script, name)
        if name not in asked and not expected.exists():
            continue  # the undisturbed run has removed it by itself
        difference = compare_files(name, expected, found)
        if difference is None:
            continue
        if name not in asked and compare_files(name, expected, _place(again, name)) is not None:
            note(f"{name} is another one each time and was not compared.")
            continue
        return _judged("result-differs", f"{name}: {difference.item}", difference, after)
    return None


def _judged(cause: str, item: str, found: FileDifference, after: int | None) -> Deviation:
    texts = found.expected, f"{found.found} ({found.apart})"
    return Deviation.of_texts(cause, item, texts, after)


def _place(script: ScriptRun, name: str) -> Path:
    name = name.replace("{dir}", str(script.folder / "dir"))
    return script.work / name


_COMPARED = {
    "weight": "tensors of weights",
    "moment": "of optimizer state",
    "scheduler": "values of schedulers",
    "scaler": "of gradient scalers",
    "generator": "generators",
    "buffer": "buffers",
}


def list_compared(reference: UndisturbedRun, script: ScriptRun) -> list[str]:
    if not reference.histories:
        return ["the newest checkpoints of both runs"]
    history = reference.history()
    found = []
    if history.updates:
        kinds = Counter(item.partition("/")[0] for item in history.end or history.updates[-1].items)
        found += [f"{kinds[kind]} {text}" for kind, text in _COMPARED.items() if kind in kinds]
        batches = sum(len(update.batches) for update in history.updates)
        if batches and not history.boundaries:  # those of a run are part of its boundaries
            found.append(f"{batches} batches")
    if history.boundaries:
        found.append(f"{len(history.boundaries)} boundaries with all state, metrics and batches")
    files = sum(name not in script.file_log.loaded for name in reference.script.file_log.saved)
    return [*found, f"{files} files"] if files else found
