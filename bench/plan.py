"""How much is measured: sizes, rounds, where."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.machine import room
from bench.ways import Way


@dataclass(frozen=True)
class Plan:
    """What the command line asked for."""

    folder: Path
    quick: bool
    peers: bool
    megabytes: int
    rounds: int

    @contextlib.contextmanager
    def place(self, name: str) -> Iterator[Path]:
        """A folder that is gone afterwards."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def chosen(self, peers: tuple[type[Way], ...]) -> list[type[Way]]:
        """The peers that take part: a quick look leaves out those that take long to import."""
        return [peer for peer in peers if self.peers and not (self.quick and peer.is_slow)]

    def fits(self, megabytes: int, times: float) -> bool:
        """Whether so many copies of a state fit into memory, with some to spare."""
        return room() > megabytes * 1e6 * times + 1.5e9
