"""The eye of one process: what it tells, and at which moments it can be made to wait."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

from holdfast._environment import variables
from holdfast._run.witness.channel import Channel
from holdfast._run.witness.leaves import Leaf, leaf_of, walk
from holdfast._store.folder.errand import Errand, current

_MOST_CALLS = 64  # of one update


class Eye:
    """Open from the first thing that there is to tell; closed in children, unless one trains."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        #: The run of holdfast that is open, and its step: set by whoever watches it.
        self.mark: tuple[str, int] | None = None
        #: Whether batches are told by the run, and need not be seen at the loader.
        self.run_tells_batches = False
        #: Whether updates are told by the watch of another framework than torch.
        self.is_elsewhere_told = False
        self._inputs: dict[str, Leaf] = {}  # what went into models since the last update
        self._calls = 0
        self.rank = variables.rank()
        self._pid = os.getpid()
        self._is_rank = False  # a child that is one of several that train
        self._channel: Channel | None = None
        self._armed: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether this is the process that trains, and not one that it has started."""
        is_child = multiprocessing.parent_process() is not None
        return os.getpid() == self._pid and (self._is_rank or not is_child)

    def open_for(self, rank: int) -> None:
        """Open in a child that trains as one of several ranks, as those of mp.spawn do."""
        self.rank = rank
        if not self.is_open:
            self._is_rank, self._pid, self._channel = True, os.getpid(), None

    def tell(self, event: str, **fields: Any) -> None:
        if self.is_open:
            self._line().tell({"event": event, **fields})

    def ask(self, event: str, **fields: Any) -> dict[str, Any]:
        """Tell, and wait until we may go on: an interruption may come in between."""
        if not self.is_open:
            return {}
        answer = self._line().ask({"event": event, **fields})
        self._armed = answer.get("arm", self._armed)
        return answer

    def reach(self, moment: str, **fields: Any) -> dict[str, Any]:
        """A moment that may be the one to interrupt."""
        if self._armed != moment or not self.is_open:
            return {}
        self._armed = None
        return self.ask("here", moment=moment, **fields)

    def note_inputs(self, values: Mapping[str, Any]) -> None:
        """What goes into a model, by its names in the script."""
        if self._calls < _MOST_CALLS:
            for path, value in walk(values):
                if hasattr(value, "dtype"):
                    self._inputs[f"input/{self._calls}/{path}"] = leaf_of(value)
        self._calls += 1

    def take_inputs(self) -> dict[str, Leaf]:
        found, self._inputs, self._calls = self._inputs, {}, 0
        return found

    def is_armed(self, moment: str) -> bool:
        return self._armed == moment and self.is_open

    def _line(self) -> Channel:
        if self._channel is None:
            self._channel = Channel(self.errand.socket)
            self._channel.tell({"event": "hello", "pid": self._pid, "rank": self.rank})
        return self._channel


_eye: Eye | None = None


def find_eye() -> Eye | None:
    """The eye of this process, which may be closed; None in an ordinary run."""
    global _eye
    errand = current()
    if _eye is None and errand is not None:
        _eye = Eye(errand)
    return _eye


def open_eye(rank: int | None = None) -> Eye | None:
    """The eye of this process if it is open; as one of several ranks even in a child."""
    eye = find_eye()
    if eye is not None and rank is not None:
        eye.open_for(rank)
    return eye if eye is not None and eye.is_open else None
