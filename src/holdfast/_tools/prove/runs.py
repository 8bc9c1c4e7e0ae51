"""Two run folders: whether training came to the same state in both, on every rank.

What must differ is left out: attempts, times, ids, and the run's own memory of when its
phases came. Nothing in either folder is changed, damaged checkpoints stay where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._errors import CheckpointError, FolderError
from holdfast._store.folder.attempts import find_run, known_origins
from holdfast._store.folder.lineage import is_on_line, trace_line
from holdfast._store.read.find import attempts_in_memory
from holdfast._store.read.merge_ranks import read_checkpoint, read_world
from holdfast._store.read.verify import Loaded
from holdfast._tools.prove.trees import FileDifference, Stored, first_difference

_CHECKPOINT = "the newest checkpoint"
# With a blank, as all that is not the user's: his states are named by keywords.
_GENERATORS = "global generators"
# Where a run is in its data: the rest of a position depends on these and the generators.
_POSITION = ("epoch", "lap", "batches", "is_over", "state", "states")


@dataclass(frozen=True)
class _Newest:
    """The state that a run would resume from."""

    step: int
    ranks: list[dict[str, Any]]  # of each: state, metrics, position, generators, as plain trees
    name: str


def compare_runs(
    expected: Path, found: Path, unseeded: Collection[str] = ()
) -> FileDifference | None:
    """The first difference between the newest good checkpoints of two runs, or None.

    `unseeded` are generators ("python", "numpy", …) that are not compared: a script that
    never seeds one finds it different each time, and need not use it.
    """
    try:
        one = _newest(expected)
    except (CheckpointError, FolderError) as error:
        return FileDifference(str(expected), _CHECKPOINT, _said(error), "", "cannot be read")
    try:
        other = _newest(found)
    except (CheckpointError, FolderError) as error:
        return FileDifference(
            str(found), _CHECKPOINT, f"step {one.step}", _said(error), "cannot be read"
        )
    if one.step != other.step:
        apart = f"by {abs(one.step - other.step)}"
        steps = str(one.step), str(other.step)
        return FileDifference(other.name, "the number of steps", *steps, apart)
    if len(one.ranks) != len(other.ranks):
        counts = str(len(one.ranks)), str(len(other.ranks))
        return FileDifference(other.name, "the number of ranks", *counts, "by their number")
    for rank, (there, here) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        parts = _without(there, unseeded), _without(here, unseeded)
        difference = first_difference(other.name, *parts)
        if difference is not None and len(one.ranks) > 1:
            return replace(difference, item=f"rank {rank}: {difference.item}")
        if difference is not None:
            return difference
    return None


def unlike_generators(expected: Path, found: Path) -> frozenset[str]:
    """The global generators whose states differ: of two undisturbed runs, those nobody seeds."""
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


def newest_step(folder: Path) -> int:
    """The step of the state that a run would resume from."""
    return _newest(folder).step


def _without(parts: dict[str, Any], unseeded: Collection[str]) -> dict[str, Any]:
    compared = {n: state for n, state in parts[_GENERATORS].items() if n not in unseeded}
    return parts | {_GENERATORS: compared}


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _newest(folder: Path) -> _Newest:
    """The newest whole checkpoint on the run's own line, as a resume would choose it."""
    layout, run_id = find_run(folder)
    newest = max(layout.attempt_numbers(), default=0)
    line = trace_line(known_origins(layout, attempts_in_memory(run_id)), newest)
    trouble: CheckpointError | None = None
    for step, attempt, path in reversed(layout.checkpoint_folders()):
        if not is_on_line(line, attempt, step):
            continue
        try:
            ranks = [read_checkpoint(path, rank) for rank in range(read_world(path))]
        except CheckpointError as error:
            trouble = trouble or error
            continue
        name = f"{folder}: {path.name}"
        return _Newest(ranks[0].head["step"], [_parts(each) for each in ranks], name)
    raise trouble or CheckpointError(f"{folder}: there is no checkpoint.")


def _parts(loaded: Loaded) -> dict[str, Any]:
    """What is compared, in the order in which it is told."""
    head, tree = loaded.head, loaded.head["tree"]
    extra = _plain(tree.get("extra", {}), loaded)
    position = extra.get("position") or {}
    if position.get("is_over") or not position.get("batches"):
        position = {**position, "state": None}  # of the lap before: nobody reads it there
    return {
        **{name: _plain(encoded, loaded) for name, encoded in tree["state"].items()},
        "logged metrics": {**head.get("metrics", {}), **_renamed(head.get("best", {}))},
        "position in the data": {n: position[n] for n in _POSITION if n in position},
        _GENERATORS: extra.get("generators") or {},
    }


def _renamed(best: dict[str, Any]) -> dict[str, Any]:
    return {f"best ({watched})": value for watched, value in best.items()}


def _plain(encoded: Any, loaded: Loaded) -> Any:
    """A stored tree (the tags are those of `_state/capture.py`) with its tensors as bytes."""
    if isinstance(encoded, list):
        return [_plain(item, loaded) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    inner = encoded.get(tag)
    if tag == "$t":
        return _tensor(loaded, encoded[tag])
    if tag == "$shard":  # this rank's part, and which one it is
        shard = encoded[tag]
        return shard | {"t": None if shard["t"] is None else _tensor(loaded, shard["t"])}
    if tag in ("$dict", "$odict"):
        return dict(_pairs(inner, loaded))
    if tag in ("$state", "$generator", "$tuple", "$set", "$frozenset", "$node"):
        return _plain(inner, loaded)
    if tag.startswith("$"):
        return f"{tag[1:]} {inner}"
    return {key: _plain(item, loaded) for key, item in encoded.items()}


def _pairs(encoded: Any, loaded: Loaded) -> Iterator[tuple[Any, Any]]:
    for key, item in encoded:
        plain = _plain(key, loaded)
        yield (tuple(plain) if isinstance(plain, list) else plain), _plain(item, loaded)


def _tensor(loaded: Loaded, index: int) -> Stored:
    spec = loaded.plan.specs[index]
    data = np.frombuffer(loaded.data(index), np.uint8) if spec.size_bytes else np.empty(0, np.uint8)
    dtype = spec.dtype.removeprefix("scalar ")
    if spec.kind == "numpy":
        dtype = np.dtype(dtype).name if dtype[:1] in "<|" else dtype
    return Stored("uint8" if spec.kind == "bytes" else dtype, spec.shape, data)
