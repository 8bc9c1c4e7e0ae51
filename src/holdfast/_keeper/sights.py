"""What ranks show of their training: who holds the others up, and who sees the same data."""

from __future__ import annotations

from collections import deque
from typing import Any

from holdfast._keeper.stragglers import ENOUGH_SAMPLES, name_straggler
from holdfast._keeper.table import Seat, Table


class Sights(Table):
    """Compares what the ranks tell of themselves."""

    def _on_waits(self, seat: Seat, message: dict[str, Any]) -> None:
        """How long a rank waited in the collectives of its last steps."""
        samples = self.waits.setdefault(seat.rank, deque(maxlen=ENOUGH_SAMPLES))
        samples.append(message["waited"])
        if len(self.waits) < self._size:
            return
        waits = {rank: list(each) for rank, each in self.waits.items()}
        found = name_straggler(waits, message["step_seconds"])
        if found is None:
            self.straggler = None
            return
        rank, seconds = found
        is_new = self.straggler is None or self.straggler["rank"] != rank
        host = self.seats[rank].beat.get("host", "")
        self.straggler = {"rank": rank, "host": host, "seconds": round(seconds, 4)}
        if is_new and rank not in self._named:
            self._named.add(rank)  # once in a life: it may come and go
            self._books.note("straggler", **self.straggler)

    def _on_lap(self, seat: Seat, message: dict[str, Any]) -> None:
        """A rank has used all batches of a loop: the next boundary of one is not that of all."""
        key = message["epoch"], message["number"]
        counts = self.laps.setdefault(key, {})
        counts[seat.rank] = message["batches"]
        if len(set(counts.values())) > 1:
            told = {"epoch": message["epoch"], "batches": sorted(counts.items())}
            self._books.note("uneven-batches", **told)
            for rank in self.seats:
                self._send(rank, "uneven", **told)
        if len(counts) == self._size:
            del self.laps[key]

    def _on_print(self, seat: Seat, message: dict[str, Any]) -> None:
        """What a rank's first batches look like: of two that train on the same, one is wasted."""
        self.prints.setdefault(seat.rank, []).append(message["print"])
        if len(self.prints) < self._size or any(len(each) < 2 for each in self.prints.values()):
            return
        seen: dict[tuple[str, ...], int] = {}
        for rank, prints in sorted(self.prints.items()):
            twin = seen.setdefault(tuple(prints[:2]), rank)
            if twin != rank:
                self._books.note("identical-batches", ranks=[twin, rank])
                self._send(0, "twins", ranks=[twin, rank])
                break
        self.prints = {rank: [] for rank in self.prints}  # compared once
