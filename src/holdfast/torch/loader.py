"""A torch DataLoader that can go on in the middle of an epoch.

The user's loader is never changed: a shallow copy gets a sampler that numbers what the
loader's own draws, and a data set that makes each batch from a seed of its own. For a data
set by index nothing is loaded twice: the sampler draws again, and what was used is skipped.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from holdfast.torch.samples import LazySamples, NamedSamples, Seed, Ticket, WorkerStart

# How a position is found again:
SKIPS = "skips"  # the sampler draws again, and what was used is not loaded
KEEPS = "keeps"  # the loader has a state of its own
DATA_KEEPS = "data keeps"  # its data set has one, and no worker runs ahead of it
REPLAYS = "replays"  # all batches are made again

Apart = Callable[[], AbstractContextManager[None]]


def is_loader(source: object) -> bool:
    return isinstance(source, DataLoader)


def way_of(loader: DataLoader[Any]) -> str:
    """How a position in this loader is found again."""
    data = loader.dataset
    own_iter = type(loader).__iter__ is DataLoader.__iter__ or _keeps_state(loader)
    is_pipe = isinstance(data, IterDataPipe | MapDataPipe)
    if not isinstance(data, IterableDataset) and own_iter and not is_pipe:
        return SKIPS
    if _keeps_state(loader) and not _has_no_state(data):
        return KEEPS
    if own_iter and loader.num_workers == 0 and _keeps_state(data):
        return DATA_KEEPS
    return REPLAYS


def _keeps_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _has_no_state(data: object) -> bool:
    """Whether a loader that keeps states finds none here, and would replay by itself.

    The data set has none, and its iterator is a generator of Python's, which has none either.
    """
    begin = getattr(type(data), "__iter__", None)
    return not _keeps_state(data) and inspect.isgeneratorfunction(begin)


def can_be_copied(loader: DataLoader[Any]) -> bool:
    """Whether a copy with our sampler does what the loader does."""
    own_iter = type(loader).__iter__ is DataLoader.__iter__ or _keeps_state(loader)
    return own_iter and not isinstance(loader.dataset, IterDataPipe | MapDataPipe)


def length_of(loader: DataLoader[Any]) -> int | None:
    """The number of batches, if it is known for sure: of an iterable it is only a guess."""
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
    """Whoever decides on the order."""
    found: list[Any] = []
    for each in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", 0)):
        if each is not None and not any(each is other for other in found):
            found.append(each)
    return found


def set_epoch(listeners: list[Any], epoch: int) -> None:
    """Tell the epoch to whoever asks for it: a DistributedSampler shuffles by it."""
    for each in listeners:
        tell = getattr(each, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def draws_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether a sampler may draw from the global generators in the middle of a pass.

    torch's own draw when a pass begins, and never again.
    """
    own = [
        type(each).__module__.startswith(("torch.utils.data", "torchdata."))
        for each in samplers_of(loader)
    ]
    return not all(own)


class Tickets:
    """Stands where the loader's sampler stood: the same draws, each with number and seed."""

    def __init__(
        self,
        sampler: Any,
        seed: Seed | None,
        apart: Callable[[], Apart] | None,
        is_batched: bool,
    ) -> None:
        self._sampler = sampler
        self._size_of = _length_of_draw if is_batched else _one
        self._sow = seed
        self._apart = apart
        self._drawing: Drawing | None = None
        self._skip = 0
        self._instead: Any = None
        self._ticket: Callable[[Any, int], Ticket] = lambda *_: Ticket(None, 0, 0, 0, None)

    def aim(
        self, epoch: int, seed: int, skip: int, mix: Callable[..., int], instead: Any = None
    ) -> None:
        """Say which pass comes next; one that is under way goes on as it was.

        `instead` draws in place of the loader's sampler, in this pass only.
        """

        def ticket(drawn: Any, number: int) -> Ticket:
            return Ticket(drawn, epoch, number, mix(seed, number), self._sow)

        self._skip, self._ticket, self._instead = skip, ticket, instead

    def catch_up(self) -> Drawing | None:
        """Draw what was used, or else the first, now: while the generators are as they were."""
        if self._drawing is not None:
            self._drawing.catch_up()
        return self._drawing

    def __iter__(self) -> Drawing:
        apart = self._apart() if self._apart else None
        sampler = self._sampler if self._instead is None else self._instead
        draws = _draw_apart(sampler, apart) if apart else iter(sampler)
        self._drawing = Drawing(draws, self._skip, self._ticket, self._size_of)
        return self._drawing

    def __len__(self) -> int:
        return len(self._sampler)


class Drawing:
    """One pass of a sampler."""

    def __init__(
        self,
        draws: Iterator[Any],
        skip: int,
        ticket: Callable[[Any, int], Ticket],
        size_of: Callable[[Any], int],
    ) -> None:
        self._size_of = size_of
        self._draws = draws
        self._skip = skip
        self._number = skip
        self._ticket = ticket
        self._has_drawn = False
        self._ahead: deque[int] = deque()  # the sizes of batches that were drawn, but not used
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
            # A sampler draws its order with the first batch: before anything else does.
            self._draws = itertools.chain([*itertools.islice(self._draws, 1)], self._draws)

    def samples_after(self, batches: int) -> int | None:
        """How many indices the first batches had; never asked for fewer than before.

        Workers are given batches ahead of those that are used: these do not count yet.
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
    """The samples of a batch; -1 if it cannot be told."""
    return len(drawn) if hasattr(drawn, "__len__") else -1


def _one(_: Any) -> int:
    return 1  # a loader without batches draws one index, of whatever type


def _draw_apart(sampler: Any, apart: Apart) -> Iterator[Any]:
    """Draw each batch but the first from a stream of the sampler's own.

    Draws from the global generators would come at other moments after a restart: it does not
    repeat what the training drew in between. Most samplers draw all in the beginning, as ever.
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
    """The loader as we run it, and the sampler by which to aim it."""
    data = loader.dataset
    is_iterable = isinstance(data, IterableDataset)
    mine = copy.copy(loader)
    attributes = mine.__dict__  # DataLoader refuses to have these set
    attributes["_iterator"] = None
    if "_initial_iter_for_state_dict" in attributes:
        # torchdata's, once asked for its state: a first iterator is there, which was the user's.
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
        # Without batches no ticket reaches the workers: new ones begin with the pass's seed.
        attributes["persistent_workers"] = loader.persistent_workers and batched
    if mine.persistent_workers:
        # They are made in the first pass of a life and draw a seed then: from the global
        # generator, each life would take one number more from it.
        attributes["generator"] = torch.Generator()
    return mine, tickets
