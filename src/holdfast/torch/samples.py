"""What a data loader's workers see: each batch with its number and its seed.

The wrappers stand where the loader's own sampler and data set stood, and let all
else through. They are pickled for workers that are spawned.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from holdfast._errors import name_place


class Seed(Protocol):
    """Seeds what the process that makes a batch draws from."""

    def __call__(self, holders: list[Any], seed: int, in_worker: bool) -> None: ...

    def has_grown(self, holders: list[Any]) -> bool: ...


class Ticket:
    """What the sampler drew for one batch, and the seed with which to make it."""

    __slots__ = ("drawn", "epoch", "number", "seed", "sow")

    def __init__(self, drawn: Any, epoch: int, number: int, seed: int, sow: Seed | None) -> None:
        self.drawn = drawn
        self.epoch = epoch
        self.number = number
        self.seed = seed
        self.sow = sow  # for an iterable data set, which is not asked by index

    def __iter__(self) -> Iterator[Any]:
        # A loader goes through the indices as it begins to take a batch from an iterable.
        worker = get_worker_info()
        if self.sow is not None and worker is not None:
            if isinstance(worker.dataset, _Wrapped):
                worker.dataset.holdfast_sow(self.seed)
            else:
                self.sow([], self.seed, True)  # what it holds is in its own state
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.drawn)


class _TrainersExit:
    """Whether the trainer's interpreter ends: a pipe that it closes then, as forked workers see.

    At its end multiprocessing sends SIGTERM to what is left of the workers, of a loop that an
    exception has left, and waits for them.
    """

    _known: _TrainersExit | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._seen, self._held = os.pipe()
        atexit.register(self.let_go)  # after multiprocessing's own, and so called before it

    @classmethod
    def of_this_process(cls) -> _TrainersExit:
        if cls._known is None or cls._known._pid != os.getpid():
            cls._known = cls()
        return cls._known

    def let_go(self) -> None:
        """Close the end that says that the trainer lives; in a worker, its copy of it."""
        with contextlib.suppress(OSError):
            os.close(self._held)

    def has_begun(self) -> bool:
        """In a worker: nobody holds the other end any more."""
        return bool(select.select([self._seen], [], [], 0)[0])


class WorkerStart:
    """The first thing in a worker: its life is tied to the trainer's, then the user's own start.

    torch's workers look who their parent is once they run. One whose trainer was killed before
    takes the system's first process for it, and stays for ever, with all that it has mapped.
    Tied so, it may answer a SIGTERM later than at once: a scheduler sends it to all processes of
    a job, and the step that is to be finished needs its data. Not so when the trainer exits: then
    it is the trainer that sends it, and waits.
    """

    _LATER_SECONDS = 12.0  # than the time that a trainer takes for its last step by default

    _PR_SET_PDEATHSIG = 1

    def __init__(self, users: Callable[[int], Any] | None, method: str) -> None:
        self._users = users
        self._is_served = method == "forkserver"
        self._exit = _TrainersExit.of_this_process() if method == "fork" else None
        self._trainer = os.getpid()
        # The system counts the end of the thread that has started it, and only this one stays.
        self._is_tied = (
            sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        )

    def __call__(self, worker: int) -> None:
        # The parent of a worker from a fork server is the server, which lives as long as it likes.
        if self._is_tied and not self._is_served:
            import ctypes

            ctypes.CDLL(None).prctl(self._PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._trainer:
                os._exit(1)
            if self._exit is not None:
                self._exit.let_go()
            # No blocked mask: what a data set starts itself would be born with it.
            signal.signal(signal.SIGTERM, self._leave_later)
        if self._users is not None:
            self._users(worker)

    def _leave_later(self, *_: Any) -> None:
        if self._exit is not None and self._exit.has_begun():
            os._exit(0)
        timer = threading.Timer(self._LATER_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()


def _name_sample(error: Exception, ticket: Ticket, sample: Any) -> None:
    worker = get_worker_info()
    whose = "" if worker is None else f", worker {worker.id}"
    name_place(error, ticket.epoch, ticket.number, f"{whose}, sample {sample}")


class _Wrapped:
    """Attributes of the data set itself, for worker_init_fn and whoever else looks at it."""

    _holdfast_data: Any
    _holdfast_collate: Any  # it may hold generators too
    _holdfast_seed: Seed

    def __init__(self, data: Any, collate: Any, seed: Seed) -> None:
        object.__setattr__(self, "_holdfast_data", data)
        object.__setattr__(self, "_holdfast_collate", collate)
        object.__setattr__(self, "_holdfast_seed", seed)

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self._holdfast_data, self._holdfast_collate, self._holdfast_seed)
        return (type(self), parts)

    def holdfast_sow(self, seed: int) -> None:
        """Let what is drawn from here on come from this seed."""
        self._holdfast_seed(self._holders(), seed, get_worker_info() is not None)

    def _holders(self) -> list[Any]:
        return [self._holdfast_data, self._holdfast_collate]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_holdfast"):
            raise AttributeError(name)
        return getattr(self._holdfast_data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._holdfast_data, name, value)

    def __len__(self) -> int:
        return len(self._holdfast_data)


class NamedSamples(_Wrapped, Dataset[Any]):
    """A data set by index: made from the ticket's seed, and an error names its sample."""

    def __getitems__(self, ticket: Ticket) -> Any:
        return self._made(ticket, self._make_batch)

    def __getitem__(self, ticket: Ticket) -> Any:
        return self._made(ticket, self._make_sample)

    def _made(self, ticket: Ticket, make: Callable[[Ticket], Any]) -> Any:
        self.holdfast_sow(ticket.seed)
        made = make(ticket)
        if self._holdfast_seed.has_grown(self._holders()):
            self.holdfast_sow(ticket.seed)
            made = make(ticket)
        return made

    def _make_batch(self, ticket: Ticket) -> Any:
        data = self._holdfast_data
        fetch = getattr(data, "__getitems__", None)
        if callable(fetch):
            try:
                return fetch(ticket.drawn)
            except Exception as error:
                _name_sample(error, ticket, f"one of {_short(ticket.drawn)}")
                raise
        found = []
        index = None
        try:
            for index in ticket.drawn:
                found.append(data[index])
        except Exception as error:
            _name_sample(error, ticket, index)
            raise
        return found

    def _make_sample(self, ticket: Ticket) -> Any:
        try:
            return self._holdfast_data[ticket.drawn]
        except Exception as error:
            _name_sample(error, ticket, ticket.drawn)
            raise


class LazySamples(_Wrapped, IterableDataset[Any]):
    """An iterable data set that begins with its first batch, so that this one's seed counts.

    Workers that outlive an epoch begin it with generators that the last one has left.
    """

    def __iter__(self) -> Iterator[Any]:
        count = 0
        try:
            for sample in self._holdfast_data:
                yield sample
                count += 1
        except Exception as error:
            worker = get_worker_info()
            whose = "" if worker is None else f" of worker {worker.id}"
            error.add_note(f"holdfast: after {count} samples{whose}")
            raise


def _short(drawn: Any) -> str:
    text = str(drawn)
    return text if len(text) <= 200 else f"{text[:197]}…"
