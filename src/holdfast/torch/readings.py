"""Reading numbers from a GPU without waiting for it.

Each number is copied on the device into the next place of a page. A whole page is transferred to
the host when it is full, old enough, or read: a transfer for each number would cost a quick step
more than waiting for the device.
"""

from __future__ import annotations

import time

import torch

_PLACES = 64
_PAGE_SECONDS = 0.05

_open: dict[torch.device, _Page] = {}  # the page that is being filled
_free: list[_Page] = []  # fully read: making a new one may wait for the device


class _Page:
    """Places on a device, the pinned memory that they go to, and the event after the transfer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._there = torch.zeros(_PLACES, dtype=torch.float64, device=device)
        self._places = self._there.unbind()
        self._here = torch.zeros(_PLACES, dtype=torch.float64, pin_memory=True)
        self._event = torch.cuda.Event()
        self.begin()

    def begin(self) -> None:
        self._stream = torch.cuda.current_stream(self.device)
        self.stream_number = _stream_of(self.device)
        self._began = time.monotonic()
        self._is_sent = False
        self._found: list[float] | None = None
        self._used = self._unread = 0

    @property
    def is_full(self) -> bool:
        return self._used == _PLACES

    def add(self, value: torch.Tensor) -> int:
        """Copy a number into the next place, in the order of its stream."""
        place = self._used
        self._places[place].copy_(value)
        self._used += 1
        self._unread += 1
        return place

    def send(self) -> None:
        if self._is_sent:
            return
        self._is_sent = True
        if _open.get(self.device) is self:
            del _open[self.device]
        with torch.cuda.stream(self._stream):
            # The same dtype: a conversion would wait.
            self._here.copy_(self._there, non_blocking=True)
            self._event.record(self._stream)

    def is_here(self) -> bool:
        if not self._is_sent:
            if time.monotonic() - self._began > _PAGE_SECONDS:
                self.send()
            return False
        return self._found is not None or bool(self._event.query())

    def read(self, place: int) -> float:
        self.send()
        if self._found is None:
            self._event.synchronize()
            self._found = self._here.tolist()
        self._unread -= 1
        if not self._unread:
            _free.append(self)
        return self._found[place]


def _stream_of(device: torch.device) -> int:
    # Called for every logged number: making a Stream object takes ten times as long.
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _page_for(device: torch.device) -> _Page:
    page = _open.get(device)
    if page is not None and page.stream_number == _stream_of(device):
        return page
    if page is not None:  # another stream is not ordered after this one
        page.send()
    page = next((each for each in _free if each.device == device), None)
    if page is None:
        page = _Page(device)
    else:
        _free.remove(page)
        page.begin()
    _open[device] = page
    return page


class OnItsWay:
    """A number that was on a device when it was logged."""

    def __init__(self, value: torch.Tensor) -> None:
        self._page = _page_for(value.device)
        self._found: float | None = None
        self._place = self._page.add(value)
        if self._page.is_full:
            self._page.send()

    def is_ready(self) -> bool:
        return self._found is not None or self._page.is_here()

    def value(self) -> float:
        if self._found is None:
            self._found = self._page.read(self._place)
        return self._found
