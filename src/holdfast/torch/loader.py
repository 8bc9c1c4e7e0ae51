"""A torch DataLoader that can go on in the middle of an epoch.

The user's loader is never changed: a shallow copy gets a sampler that numbers what the loader's own
sampler draws, and a data set that makes each batch from a seed of its own. With a data set by index
nothing is loaded twice: the sampler draws again, and used batches are skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import inspect
import itertools
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from holdfast._adapters.adapter import has_state
from holdfast._errors import name_place
from holdfast._text import cut

# How a position is restored:
SKIPS = "skips"  # the sampler draws again, and used batches are not loaded
KEEPS = "keeps"  # the loader has a state of its own
DATA_KEEPS = "data keeps"  # its data set has one, and no worker prefetches
REPLAYS = "replays"  # all batches are made again

_TORCHS_OWN = ("torch.utils.data", "torchdata.")  # modules of samplers
Apart = Callable[[], AbstractContextManager[None]]


def is_loader(source: object) -> bool:
    return isinstance(source, DataLoader)


def way_of(loader: DataLoader[Any]) -> str:
    data = loader.dataset
    if not isinstance(data, IterableDataset) and can_be_copied(loader):
        return SKIPS
    # If the data set has no state, and its iterator is a Python generator, a stateful loader finds
    # no state there either, and would replay by itself.
    begin = getattr(type(data), "__iter__", None)
    if has_state(loader) and (has_state(data) or not inspect.isgeneratorfunction(begin)):
        return KEEPS
    if _is_torchs_own(loader) and loader.num_workers == 0 and has_state(data):
        return DATA_KEEPS
    return REPLAYS


def _is_torchs_own(loader: DataLoader[Any]) -> bool:
    return type(loader).__iter__ is DataLoader.__iter__ or has_state(loader)


def can_be_copied(loader: DataLoader[Any]) -> bool:
    """Whether a copy with our sampler behaves like the loader."""
    is_pipe = isinstance(loader.dataset, IterDataPipe | MapDataPipe)
    return _is_torchs_own(loader) and not is_pipe


def length_of(loader: DataLoader[Any]) -> int | None:
    """The number of batches, if it is certain: for an iterable it is only a guess."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:
        return None


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """The samples of a full batch, if all have one size."""
    if loader.batch_sampler is None:
        return 1
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """All samplers that decide on the order."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    found = (loader.batch_sampler, loader.sampler, inner)
    return list({id(each): each for each in found if each is not None}.values())


def set_epoch(listeners: list[Any], epoch: int) -> None:
    """Set the epoch of those that have one: a DistributedSampler shuffles by it."""
    for each in listeners:
        if callable(set_it := getattr(each, "set_epoch", None)):
            set_it(epoch)


def draws_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether a sampler may draw from the global generators in the middle of a pass.

    torch's own samplers draw only when a pass begins.
    """
    if loader.batch_sampler is None:
        return True  # positions that are stored for a loader without batches rely on it
    return not all(type(s).__module__.startswith(_TORCHS_OWN) for s in samplers_of(loader))


@dataclass(eq=False)
class Tickets:
    """Replaces the loader's sampler: the same draws, each with number and seed."""

    _sampler: Any
    _sow: Seed | None
    _apart: Callable[[], Apart] | None
    _is_batched: bool
    _drawing: Drawing | None = None
    _skip: int = 0
    _instead: Any = None
    _ticket: Callable[[Any, int], Ticket] = lambda *_: Ticket(None, 0, 0, 0, None)

    def aim(
        self, epoch: int, seed: int, skip: int, mix: Callable[..., int], instead: Any = None
    ) -> None:
        """Set the next pass; a pass in progress is not affected.

        `instead` replaces the loader's sampler in this pass only.
        """

        def ticket(drawn: Any, number: int) -> Ticket:
            return Ticket(drawn, epoch, number, mix(seed, number), self._sow)

        self._skip, self._ticket, self._instead = skip, ticket, instead

    def catch_up(self) -> Drawing | None:
        """Draw the used batches, or else the first one, now: while the generators are unchanged."""
        if self._drawing is not None:
            self._drawing.catch_up()
        return self._drawing

    def __iter__(self) -> Drawing:
        apart = self._apart() if self._apart else None
        sampler = self._sampler if self._instead is None else self._instead
        draws = _draw_apart(sampler, apart) if apart else iter(sampler)
        # A loader without batches draws one index at a time.
        size_of = _length_of_draw if self._is_batched else lambda _: 1
        self._drawing = Drawing(draws, self._skip, self._ticket, size_of)
        return self._drawing

    def __len__(self) -> int:
        return len(self._sampler)


@dataclass(eq=False)
class Drawing:
    """One pass of a sampler."""

    _draws: Iterator[Any]
    _skip: int
    _ticket: Callable[[Any, int], Ticket]
    _size_of: Callable[[Any], int]

    def __post_init__(self) -> None:
        self._number = self._skip
        self._has_drawn = False
        self._ahead: deque[int] = deque()  # the sizes of batches that were drawn but not used
        self._used = 0
        self._samples: int | None = 0  # in the batches that were used

    def catch_up(self) -> None:
        if self._has_drawn:
            return
        self._has_drawn = True
        for drawn in itertools.islice(self._draws, self._skip):
            self._ahead.append(self._size_of(drawn))
        self.samples_after(self._skip)
        if not self._skip:
            # A sampler draws its order with the first batch: do it before any other draw.
            self._draws = itertools.chain([*itertools.islice(self._draws, 1)], self._draws)

    def samples_after(self, batches: int) -> int | None:
        """How many samples the first batches had; `batches` must not decrease.

        Workers prefetch batches: those do not count yet.
        """
        while self._used < batches and self._ahead:
            size = self._ahead.popleft()
            self._samples = None if size < 0 or self._samples is None else self._samples + size
            self._used += 1
        return self._samples

    def __iter__(self) -> Drawing:
        return self

    def __next__(self) -> Ticket:
        self.catch_up()
        drawn = next(self._draws)
        self._ahead.append(self._size_of(drawn))
        ticket = self._ticket(drawn, self._number)
        self._number += 1
        return ticket


def _length_of_draw(drawn: Any) -> int:
    return len(drawn) if hasattr(drawn, "__len__") else -1


def _draw_apart(sampler: Any, apart: Apart) -> Iterator[Any]:
    """Draw each batch except for the first with generators of the sampler's own.

    With the global generators, draws would differ after a restart, which does not repeat the draws
    of the training in between. Most samplers draw everything at the beginning.
    """
    draws = iter(sampler)
    for drawn in draws:
        yield drawn
        break
    while True:
        with apart():
            try:
                drawn = next(draws)
            except StopIteration:
                return
        yield drawn


def copy_loader(
    loader: DataLoader[Any], seed: Seed, apart: Callable[[], Apart] | None
) -> tuple[DataLoader[Any], Tickets]:
    """The loader as we run it, and its sampler."""
    data = loader.dataset
    is_iterable = isinstance(data, IterableDataset)
    mine = copy.copy(loader)
    attributes = mine.__dict__  # DataLoader refuses to set these
    attributes["_iterator"] = None
    if "_initial_iter_for_state_dict" in attributes:
        # torchdata's loader, after state_dict(): its first iterator belongs to the user.
        attributes["_initial_iter_for_state_dict"] = False
    batched = loader.batch_sampler is not None
    tickets = Tickets(
        loader.batch_sampler if batched else loader.sampler,
        seed if is_iterable else None,
        apart,
        batched,
    )
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method(allow_none=True) or "fork"
    attributes["worker_init_fn"] = WorkerStart(loader.worker_init_fn, method)
    if batched:
        attributes["batch_sampler"] = tickets
    elif not is_iterable:
        attributes["sampler"] = tickets
    if not is_iterable:
        attributes["dataset"] = NamedSamples(data, loader.collate_fn, seed)
    elif way_of(loader) != KEEPS:
        attributes["dataset"] = LazySamples(data, loader.collate_fn, seed)
        # Without batches no ticket reaches the workers: new workers begin with the pass's seed.
        attributes["persistent_workers"] = loader.persistent_workers and batched
    if mine.persistent_workers:
        # They draw a seed in the first pass of each attempt. With the global generator, each
        # attempt would take one more number from it.
        attributes["generator"] = torch.Generator()
    return mine, tickets


# -- In the workers: each batch with its number and its seed ------------------------------
# The wrappers stand where the loader's own sampler and data set stood, and pass everything else
# through. They are pickled for workers that are spawned.


class Seed(Protocol):
    """Seeds the generators of the process that makes a batch."""

    def __call__(self, holders: list[Any], seed: int, in_worker: bool) -> None: ...

    def has_grown(self, holders: list[Any]) -> bool: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """What the sampler drew for one batch, and the seed with which to make it."""

    drawn: Any
    epoch: int
    number: int
    seed: int
    sow: Seed | None  # for an iterable data set, which has no indices

    def __iter__(self) -> Iterator[Any]:
        # A loader iterates over the indices when it begins a batch of an iterable.
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
    """Whether the trainer's interpreter exits: it closes a pipe then, which forked workers poll.

    At exit multiprocessing sends SIGTERM to the remaining workers, of a loop that an exception has
    left, and waits for them.
    """

    _known: _TrainersExit | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._seen, self._held = os.pipe()
        atexit.register(self.let_go)  # registered after multiprocessing's, so called before it

    @classmethod
    def of_this_process(cls) -> _TrainersExit:
        if cls._known is None or cls._known._pid != os.getpid():
            cls._known = cls()
        return cls._known

    def let_go(self) -> None:
        """Close the write end; in a worker, its copy of it."""
        with contextlib.suppress(OSError):
            os.close(self._held)

    def has_begun(self) -> bool:
        """In a worker: whether the trainer has closed the write end."""
        return bool(select.select([self._seen], [], [], 0)[0])


class WorkerStart:
    """The worker_init_fn: ties the worker to the trainer's life, then calls the user's own.

    torch's workers check their parent once they run. If the trainer was killed before, the parent
    is the system's first process, and the worker would stay for ever with all its mappings. A tied
    worker can delay its reaction to SIGTERM: a scheduler sends it to all processes of a job, and
    the last step still needs its data. When the trainer exits, it sends SIGTERM itself and waits:
    then the worker leaves at once.
    """

    _LATER_SECONDS = 12.0  # longer than a trainer's default time for its last step

    _PR_SET_PDEATHSIG = 1

    def __init__(self, users: Callable[[int], Any] | None, method: str) -> None:
        self._users = users
        self._is_served = method == "forkserver"
        self._exit = _TrainersExit.of_this_process() if method == "fork" else None
        self._trainer = os.getpid()
        # The signal comes when the starting thread ends; only the main thread lasts.
        self._is_tied = (
            sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        )

    def __call__(self, worker: int) -> None:
        # The parent of a worker from a fork server is the server.
        if self._is_tied and not self._is_served:
            import ctypes

            ctypes.CDLL(None).prctl(self._PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._trainer:
                os._exit(1)
            if self._exit is not None:
                self._exit.let_go()
            # A handler, not a blocked mask: child processes of a data set would inherit that.
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
    """Passes attributes of the data set through, for worker_init_fn and other code."""

    _holdfast_data: Any
    _holdfast_collate: Any  # it may hold generators too
    _holdfast_seed: Seed

    def __init__(self, data: Any, collate: Any, seed: Seed) -> None:
        object.__setattr__(self, "_holdfast_data", data)
        object.__setattr__(self, "_holdfast_collate", collate)
        object.__setattr__(self, "_holdfast_seed", seed)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (*self._holders(), self._holdfast_seed))

    def holdfast_sow(self, seed: int) -> None:
        """Seed all generators that a batch may draw from."""
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
    """A data set by index: batches are made from the ticket's seed, and errors name the sample."""

    def __getitems__(self, ticket: Ticket) -> Any:
        return self._made(ticket, self._make_batch)

    def __getitem__(self, ticket: Ticket) -> Any:
        return self._made(ticket, lambda ticket: self._item(ticket, ticket.drawn))

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
                _name_sample(error, ticket, f"one of {cut(str(ticket.drawn), 200)}")
                raise
        return [self._item(ticket, index) for index in ticket.drawn]

    def _item(self, ticket: Ticket, index: Any) -> Any:
        try:
            return self._holdfast_data[index]
        except Exception as error:
            _name_sample(error, ticket, index)
            raise


class LazySamples(_Wrapped, IterableDataset[Any]):
    """An iterable data set that starts with its first batch, after that batch's seed is set.

    Persistent workers would begin an epoch with the generators of the last one.
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


# -- An epoch's order that is divided among ranks, and its rest for another number of ranks --------
# A DistributedSampler deals one order to the ranks like cards. After the same number of batches on
# each rank, they have used a prefix of that order: so the rest can be dealt to any number of ranks,
# and no sample comes twice or is left out.


def share_of(loader: DataLoader[Any], world: int) -> Share | None:
    """How this loader shares an order with other ranks; None if it does not."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return Share(sampler, batches, sampler.rank, sampler.num_replicas, sampler.drop_last)
    if world == 1 and type(sampler) is SequentialSampler and hasattr(loader.dataset, "__len__"):
        # One process reads all of the order that a DistributedSampler without shuffling divides.
        return Share(sampler, batches, 0, 1, False)
    return None


@dataclass(frozen=True)
class Share:
    sampler: Any
    batches: Any  # the batch sampler; None if there are no batches
    rank: int
    shares: int
    drop_last: bool

    @property
    def order(self) -> dict[str, Any]:
        """What identifies an order, and among how many ranks it is divided."""
        seed = int(self.sampler.seed) if getattr(self.sampler, "shuffle", False) else None
        return {"samples": self.samples, "seed": seed, "shares": self.shares}

    @property
    def samples(self) -> int:
        """The length of the whole order."""
        if isinstance(self.sampler, DistributedSampler):
            return len(self.sampler.dataset)  # type: ignore[arg-type]  # it needs one with a length
        return len(self.sampler)

    def rest(self, before: int) -> Rest:
        """This rank's share of what follows the first samples of this epoch."""
        left = self._whole()[before:]
        mine = deal(left, self.rank, self.shares, self.drop_last)
        draws = self._batched(mine)
        is_known = self.batches is None or _is_known(self.batches)
        return Rest(draws, len(draws) if is_known else None, len(left))

    def follows_order(self) -> bool:
        """Whether its batches are consecutive pieces of the order.

        A sampler of the user may group samples by length, or not use the order.
        """
        share = list(copy.copy(self.sampler))
        if not _is_known(self.sampler):
            dealt = deal(self._whole(), self.rank, self.shares, self.drop_last)
            if share != dealt:
                return False
        if self.batches is None or _is_known(self.batches):
            return True
        try:
            drawn = [index for batch in self._batched(share) for index in batch]
        except (AttributeError, TypeError):  # it takes no other sampler, or draws no indices
            return False
        return drawn == share[: len(drawn)]

    def _whole(self) -> list[Any]:
        """The order of this epoch, drawn by the sampler as if there were one rank."""
        alone = copy.copy(self.sampler)
        if isinstance(alone, DistributedSampler):
            alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
            alone.num_samples = alone.total_size = self.samples
        return list(alone)

    def _batched(self, indices: list[Any]) -> Any:
        if self.batches is None:
            return indices
        batches = copy.copy(self.batches)
        batches.sampler = indices
        return batches


@dataclass(frozen=True)
class Rest:
    """The rest of an order, for one rank."""

    draws: Any  # replaces the loader's batch sampler
    length: int | None  # of the batches, if it is known
    samples: int  # for all ranks together


def deal(order: list[Any], rank: int, shares: int, drop_last: bool) -> list[Any]:
    """One rank's share, as a DistributedSampler deals: all have the same length.

    >>> [deal([5, 6, 7], rank, 2, drop_last=False) for rank in range(2)]
    [[5, 7], [6, 5]]
    >>> [deal([5, 6, 7], rank, 2, drop_last=True) for rank in range(2)]
    [[5], [6]]
    """
    if drop_last:
        return order[: len(order) // shares * shares][rank::shares]
    missing = -len(order) % shares
    filling = (order * -(-missing // max(1, len(order))))[:missing]
    return (order + filling)[rank::shares]


def _is_known(sampler: Any) -> bool:
    """Whether it draws and counts like torch's own samplers."""
    methods = [getattr(type(sampler), name, None) for name in ("__iter__", "__len__")]
    return all(str(getattr(each, "__module__", "")).startswith(_TORCHS_OWN) for each in methods)
