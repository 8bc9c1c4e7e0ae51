"""What is to be adopted, and what was read of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._data.course import Position
from holdfast._save.capture import Captured


@dataclass(frozen=True)
class Adoption:
    """What is to be adopted, and how."""

    source: Path
    step: int | None = None
    epoch: int | None = None  # as the checkpoint says
    names: tuple[tuple[str, str], ...] = ()  # the name in the run, and that in the checkpoint
    fresh: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A checkpoint of another library, read and ready to be stored."""

    source: str
    kind: str  # whose it is, in words; empty for TensorFlow, whose objects have a graph
    captured: Captured
    step: int
    step_from: str  # what said so
    epoch: int
    states: dict[str, int]  # names, each with its number of tensors
    left_out: list[str]
    notes: list[str] = field(default_factory=list)


def position_of(epoch: int) -> Any:
    """Where the data stands when so many epochs are over: at the top of one."""
    return None if not epoch else Position(epoch).to_tree()
