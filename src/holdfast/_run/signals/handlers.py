"""Signals in, numbers out.

A handler may run between any two bytecodes, while the thread it interrupts
holds any lock. So ours appends a number and returns: no saving, no printing.
The step boundary does the work. `set_wakeup_fd` carries the number to the
keeper at C level, so that the clock of a deadline starts even while the main
thread sits in a long call.

It raises at once only outside the user's loop, where no boundary will come, and for
the second Ctrl-C where no keeper answers it, or at a prompt or in a notebook, whose
process must go on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import IO, Any, TypeVar

from holdfast import _errors
from holdfast._environment.processes.libc import c_handler
from holdfast._errors import Stopped, is_interactive
from holdfast._store.folder.requests import SAME_PRESS_SECONDS

_SIGQUIT = getattr(signal, "SIGQUIT", None)
_SIGHUP = getattr(signal, "SIGHUP", None)
_Handler = Callable[[int, Any], Any] | int | None

# To be undone in a forked child; at most one run owns the signals.
_installed: SignalWatch | None = None
_fork_hook_set = False
_masks = threading.local()  # of the thread that forks, while it does


_Function = TypeVar("_Function", bound=Callable[..., Any])
_uninterruptible: set[int] = set()  # the ids of code objects


def uninterruptible(function: _Function) -> _Function:
    """Let no second Ctrl-C cut this function in two, nor anything that it calls.

    The handler looks for its code among the frames that it interrupts: a call costs nothing more.
    """
    _uninterruptible.add(id(function.__code__))
    return function


def _is_uninterruptible(frame: FrameType | None) -> bool:
    while frame is not None and id(frame.f_code) not in _uninterruptible:
        frame = frame.f_back
    return frame is not None


class SignalWatch:
    """Records the signals of one run while it is open."""

    def __init__(self, numbers: tuple[int, ...], wakeup: int, stacks: IO[bytes] | None) -> None:
        self.noted: list[int] = []
        self.is_alone = False  # True: there is no keeper
        self.defers = True  # False: outside the loop, where a signal acts at once
        self.holds_warnings = False  # True: a scheduler's warning is only recorded
        self.leave: Callable[[int], BaseException] | None = None  # set: raised at once
        self.leaves_when_nudged = False  # True: all ranks decide together when to leave
        self.nudged = False  # the next SIGINT comes from our own thread
        self.ends_the_step = False  # True: the nudge does not wait for the boundary
        self._pressed_at: float | None = None
        self._numbers = tuple(n for n in numbers if n != _SIGQUIT)
        is_quit = stacks is not None and _SIGQUIT in numbers
        self._quit: int | None = _SIGQUIT if is_quit else None
        self._wakeup = wakeup
        self._stacks = stacks
        self._former: dict[int, _Handler] = {}
        self._former_wakeup = -1
        self._former_quit: _Handler = None  # only of a process 1
        self._outer: SignalWatch | None = None  # of a run around this one
        self._at_c_level: dict[int, bytes] = {}
        # One object: each access to a method makes a new one, and they are compared by identity.
        self._handler = self._note

    def install(self) -> None:
        global _installed, _fork_hook_set
        for number in self._numbers:
            former = signal.getsignal(number)
            # A signal that was ignored stays so: Ctrl-C of a background job, SIGHUP under nohup.
            if former is signal.SIG_IGN and number in (signal.SIGINT, _SIGHUP):
                continue
            self._former[number] = former
            signal.signal(number, self._handler)
            self._at_c_level[number] = c_handler(number)
        if self._wakeup >= 0:
            self._former_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        if self._quit is not None and self._stacks is not None:
            if os.getpid() == 1:
                # Process 1 cannot die of a signal, and its end would end the keeper. So Python
                # tells the keeper, which saves and ends it.
                self._former_quit = signal.signal(self._quit, self._quit_as_first)
            # At C level: it works while a call holds the GIL. With `chain` the process then dies
            # of the signal, as Ctrl-\ should do. Only this thread's stack: the others change
            # meanwhile, and reading them can be a SIGSEGV.
            faulthandler.register(self._quit, file=self._stacks, all_threads=False, chain=True)
        self._outer, _installed = _installed, self
        if not _fork_hook_set and hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=_block_signals,
                after_in_parent=_unblock_signals,
                after_in_child=_undo_in_child,
            )
            _fork_hook_set = True

    def ignore_from_now(self, number: int) -> None:
        """Make `remove` ignore this signal."""
        if number in self._former:
            self._former[number] = signal.SIG_IGN

    def remove(self) -> None:
        global _installed
        if _installed is self:
            _installed = self._outer
        if self._wakeup >= 0:
            try:
                signal.set_wakeup_fd(self._former_wakeup)
            except (ValueError, OSError):  # closed meanwhile by its owner
                signal.set_wakeup_fd(-1)
        for number, former in self._former.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former.clear()
        if self._quit is not None:
            faulthandler.unregister(self._quit)
            if self._former_quit is not None:
                signal.signal(self._quit, self._former_quit)

    def mend(self) -> list[str]:
        """Reinstall what another library has replaced, and return names of that."""
        replaced = []
        # IPython installs these around each cell and prompt: no user asked for them.
        defaults = (signal.default_int_handler, signal.SIG_IGN, -1) if is_interactive() else ()
        for number in tuple(self._former):
            found = signal.getsignal(number)
            if found is self._handler and c_handler(number) == self._at_c_level[number]:
                continue
            if found is not self._handler and callable(found):
                self._former[number] = found  # the user's newest handler, called at the boundary
            if number != signal.SIGINT or found not in defaults:
                replaced.append(f"the handler of {signal.Signals(number).name}")
            signal.signal(number, self._handler)
            self._at_c_level[number] = c_handler(number)
        if self._wakeup >= 0:
            descriptor = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            if descriptor != self._wakeup:
                self._former_wakeup = descriptor
                if descriptor not in defaults:
                    replaced.append("the wakeup descriptor")
        return replaced

    def users_handler(self, number: int) -> Callable[[int, Any], Any] | None:
        """A handler of the user's own, to be called once the state is durable."""
        former = self._former.get(number)
        if not callable(former) or former is signal.default_int_handler:
            return None
        return former

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.defers:
            nudged, self.nudged = self.nudged, False
            again = not nudged and self._is_pressed_again(number)
            if not nudged:
                self.noted.append(number)
            if self.leave is not None and (nudged or not self.leaves_when_nudged):
                raise self.leave(number)
            if again and self.is_alone:
                raise KeyboardInterrupt  # no keeper acts on the second Ctrl-C
            at_once = again or (nudged and self.ends_the_step)
            if at_once and is_interactive() and not _is_uninterruptible(frame):
                raise KeyboardInterrupt  # the keeper would end the process, and so the kernel
            return
        if self.holds_warnings and _errors.of_signal(number) == _errors.REQUEUE:
            self.noted.append(number)
            return
        handler = self.users_handler(number)
        if handler is not None:  # no boundary will come that could call it
            handler(number, frame)
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(_errors.of_signal(number), signal.Signals(number).name)

    def _quit_as_first(self, number: int, _: FrameType | None) -> None:
        if not self.defers or self.is_alone:
            os._exit(128 + number)

    def _is_pressed_again(self, number: int) -> bool:
        if number != signal.SIGINT:
            return False
        first, now = self._pressed_at, time.monotonic()
        if first is None:
            self._pressed_at = now
        return first is not None and now - first > SAME_PRESS_SECONDS

    def _undo_in_child(self) -> None:
        # A forked worker must neither run our handler nor write into our descriptor:
        # one Ctrl-C with two workers would arrive three times.
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
            for number, former in self._former.items():
                signal.signal(number, signal.SIG_DFL if former is None else former)
            if self._quit is not None:
                faulthandler.unregister(self._quit)


def _block_signals() -> None:
    # What reaches a child before its handlers are put back would be noted by ours and
    # lost, and be told to the keeper as if it had come for the trainer.
    if _installed is not None and _installed.defers:
        quit_number = () if _installed._quit is None else (_installed._quit,)
        numbers = {*_installed._former, *quit_number}
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_signals() -> None:
    before = _masks.__dict__.pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _undo_in_child() -> None:
    global _installed
    if _installed is not None:
        watch, _installed = _installed, None
        watch._undo_in_child()
    _unblock_signals()
