"""The eye on a holdfast.Run: each boundary with all of its state, each batch, each phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast._run.ranks.world import find_world
from holdfast._run.witness.eye import Eye, open_eye
from holdfast._run.witness.leaves import Leaf, digest_of, leaf_of, walk, whole_leaf
from holdfast._state.capture import capture, capture_generators
from holdfast._store.folder.errand import Errand


class RunEye:
    """Of one opening of a run."""

    def __init__(self, eye: Eye, folder: Path, step: int) -> None:
        self._eye = eye
        self._name = _name_of(folder, eye.errand)
        self._batches: list[str] = []
        eye.mark = (self._name, step)
        eye.tell("run", name=self._name, folder=str(folder.absolute()), step=step)

    def boundary(
        self,
        step: int,
        *,
        at_turn: bool,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any],
        position: Mapping[str, Any] | None,
    ) -> bool:
        """Tell of a boundary; whether a checkpoint is wanted there."""
        self._eye.mark = (self._name, step)
        items = state_items(state)
        for name, value in metrics.items():
            items[f"metric/{name}"] = leaf_of(value)
        for name, value in capture_generators().items():
            items[f"generator/{name}"] = whole_leaf(value)
        if position is not None:
            place = [position[key] for key in ("epoch", "lap", "batches")]
            items["position"] = leaf_of(place)
        items |= self._eye.take_inputs()
        items["batches"] = whole_leaf(self._batches)
        self._batches = []
        key = f"{self._name}@{step}{'-turn' if at_turn else ''}"
        answer = self._eye.ask("boundary", key=key, step=step, items=items)
        return bool(answer.get("save"))

    def batch(self, number: int, batch: Any) -> None:
        self._eye.run_tells_batches = True
        self._batches.append(f"{number}:{digest_of(batch)}")

    def phase(self, name: str) -> None:
        self._eye.ask("phase", name=name)

    def close(self) -> None:
        self._eye.mark = None
        self._eye.run_tells_batches = False


def open_run_eye(folder: Path, step: int) -> RunEye | None:
    """The eye on a run that was opened; None where nobody has asked for one."""
    world = find_world()
    eye = open_eye(None if world.is_alone else world.rank)
    return None if eye is None else RunEye(eye, folder, step)


def state_items(state: Mapping[str, Any]) -> dict[str, Leaf]:
    """Every tensor and every number of a run's state."""
    captured = capture(state)
    items = {
        f"state/{spec.name}": leaf_of(value)
        for spec, value in zip(captured.specs, captured.values, strict=True)
    }
    for path, value in walk(captured.tree["state"]):
        if not path.endswith("$t"):
            items[f"state/{path.replace('$state.', '')}"] = leaf_of(value)
    return items


def _name_of(folder: Path, errand: Errand) -> str:
    """The same in every course, wherever that one has its folder."""
    whole = folder.resolve()
    for base in (Path(errand.work).resolve(), Path(errand.end).resolve().parent):
        if whole.is_relative_to(base):
            return str(whole.relative_to(base))
    return whole.name
