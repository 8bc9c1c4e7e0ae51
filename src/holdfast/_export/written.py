"""What the writers of all formats are given, and what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._resume.verify import Loaded


@dataclass(frozen=True)
class Wanted:
    """What is to be exported, and how."""

    out: Path
    step: int | None = None
    only: tuple[str, ...] = ()
    strip: bool = False
    force: bool = False
    to: str | None = None  # the format; else the ending of `out` says it
    config: Path | None = None  # of the model, for a Hugging Face folder


@dataclass(frozen=True)
class Selected:
    """The states that are to be written, with every checksum verified and every tensor whole."""

    loaded: Loaded
    names: list[str]

    @property
    def state(self) -> dict[str, Any]:
        """The stored tree of each."""
        found: dict[str, Any] = self.loaded.head["tree"]["state"]
        return {name: found[name] for name in self.names}


@dataclass(frozen=True)
class Written:
    """What was written, and what the format has no place for."""

    tensors: int
    size_bytes: int
    left_out: list[str] = field(default_factory=list)
