"""One attempt of the command: followed to its end, and its keepers to theirs.

After a death, the keeper of a single process first records it. From then on the next attempt may
begin, while that keeper makes the last state durable: a run that opens waits for the keeper of the
attempt before it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from holdfast._errors import HUNG, REQUEUE
from holdfast._store.folder.supervised import is_death_recorded
from holdfast._supervise import children
from holdfast._supervise.child import Outlet, Streams
from holdfast._supervise.hangs import CommandHangs, Timeout, WatchedCommand
from holdfast._supervise.record import SupervisionRecord
from holdfast._supervise.signals import SignalQueue, Warnings, stop_ourselves
from holdfast._supervise.terminal import Keyboard
from holdfast._supervise.watch import CommandWatch

if TYPE_CHECKING:
    from holdfast._supervise.warm_spare import WarmSpare

_FROM_THE_KERNEL = 0x80  # SI_KERNEL, as a terminal's keys are
_FROM_A_PROCESS = (0, -1, -6)  # kill, sigqueue, tgkill: these have a sender
_SAME_SECONDS = 1.0  # SLURM often sends the same signal twice, a moment apart
_LOOK_SECONDS = 0.05
_LOOK_SELDOM_SECONDS = 0.5
_LONGEST_SECONDS = 3600.0
_SAY_SECONDS = 10.0
_OUTPUT_SECONDS = 2.0  # for the rest of the output, after a request to end
_SCREEN_SECONDS = 0.5
_RECORD_SECONDS = 5.0  # for a keeper to record a death
_REST_SECONDS = 20.0  # for processes that save something at SIGTERM
_TYPED_SECONDS = 60.0  # an end so soon after Ctrl-C is due to it
_KEYS = (signal.SIGINT, signal.SIGQUIT)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class SupervisedAttempt:
    def __init__(
        self,
        child: int,
        signals: SignalQueue,
        streams: Streams,
        outlets: Collection[Outlet],
        record: SupervisionRecord,
        timeout: Timeout | None,
        *,
        in_job: bool,
        spare: WarmSpare | None = None,
    ) -> None:
        self._spare = spare
        self._apart = () if spare is None else spare.pids  # no part of the command
        self._child = child
        self._signals = signals
        self._streams = streams
        self._outlets = outlets
        self._record = record
        self._in_job = in_job
        self._status: int | None = None
        self._maxrss_bytes = 0
        self._passed: dict[int, float] = {}
        self._warnings = Warnings(os.getpid(), self._apart)
        self._next_warning = 0.0
        self._session = child if streams.has_own_session else os.getsid(0)
        self._hangs = CommandHangs(
            WatchedCommand(
                *(child, os.getpid(), record, timeout, self.say, self._left_behind),
                is_held_up=lambda: any(each.has_waiting for each in outlets),
                has_keys=streams.master is not None,
            )
        )
        self._watch = CommandWatch(
            child, os.getpid(), lambda pid: pid in self._apart or pid in self._hangs.inspectors
        )
        self._is_stopped = False
        self._is_given_up = False
        self.was_asked = False  # to end, for any reason
        master = streams.master
        self._keyboard = None if master is None else Keyboard(0, master, child)

    def follow(self) -> int:
        """Return its status, as subprocess gives it, when all about its end is on record.

        A keeper that still saves is waited for by `wait_for_keepers`.
        """
        if self._keyboard is not None:
            self._keyboard.open()
        try:
            while self._status is None and not self._hangs.is_lost:
                self._turn(None)
            if self._status is None:
                self._status = HUNG  # it cannot be ended
            if self._keyboard is not None:
                # It has passed the command's own terminal, which has set its line ends already.
                self._finish_output(_SCREEN_SECONDS)
        finally:
            if self._keyboard is not None:
                self._keyboard.close()
        seen = self._watch.end(self._status)
        if self._keyboard is not None and self._keyboard.asked_at is not None:
            self.was_asked |= time.monotonic() - self._keyboard.asked_at < _TYPED_SECONDS
        if -self._status in self._passed:
            # A child that is a shell dies of it at once and passes nothing on.
            self._signal_the_rest(-self._status)
        self._streams.close_given(is_over=True)
        self._hangs.end_the_rest(self._turn)  # else their keepers would wait for them
        if not self._await_death_record():
            self.wait_for_keepers()
        self._hangs.close()
        self._record.is_cut_off |= self._hangs.is_lost
        if self._status < 0 and not self.has_hung:
            self._end_the_rest()
        self._finish_output(_OUTPUT_SECONDS if self.was_asked else _LONGEST_SECONDS)
        self._streams.close()
        self._record.write_end(self._status, self._maxrss_bytes, seen)
        return self._status

    def _turn(self, seconds: float | None) -> None:
        """Wait for the first event or deadline, and handle what there is."""
        parts = (self._watch, self._hangs, self._spare, self._keyboard)
        watches = [each for each in parts if each is not None]
        deadlines = [seconds, self._warnings.next_poll_seconds()]
        if self._status is None:
            deadlines += [each.next_poll_seconds() for each in watches]
        self._wait(min((each for each in deadlines if each is not None), default=_LONGEST_SECONDS))
        for info in self._signals.received():
            self._take(info)
        self._reap()
        if self._status is None:
            for each in watches:
                each.poll()
        if time.monotonic() >= self._next_warning:
            self._warnings.deliver()
            self._next_warning = time.monotonic() + _LOOK_SECONDS / 2

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        if self._signals.descriptor is None:
            seconds = min(seconds, _LOOK_SECONDS)
        else:
            poller.register(self._signals.descriptor, select.POLLIN)
        inlets = {each.descriptor: each for each in self._streams.inlets if each.wants_to_read}
        outlets = {each.descriptor: each for each in self._outlets if each.has_waiting}
        for descriptor in inlets:
            poller.register(descriptor, select.POLLIN)
        for descriptor in outlets:
            poller.register(descriptor, select.POLLOUT)
        keys = self._keyboard if self._status is None else None
        if keys is not None and keys.wants_to_read:
            poller.register(keys.descriptor, select.POLLIN)
        if keys is not None and keys.has_typed:
            events = select.POLLIN if keys.master in inlets else 0
            poller.register(keys.master, events | select.POLLOUT)
        if self._watch.fileno() >= 0:
            poller.register(self._watch.fileno(), select.POLLIN)
        for descriptor, event in poller.poll(max(0.0, seconds) * 1000):
            if descriptor in inlets and event & ~select.POLLOUT:
                inlets[descriptor].pump()
            elif descriptor in outlets:
                outlets[descriptor].flush()
            elif keys is not None and descriptor == keys.descriptor:
                for name in keys.read():
                    self._record.add_signal(name, None, None, "the terminal")
            elif descriptor == self._watch.fileno():
                self._watch.observe_ends()
            if keys is not None and descriptor == keys.master and event & select.POLLOUT:
                keys.flush()

    def _take(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGWINCH:
            if self._status is None:
                self._streams.pass_size_on(self._child)
        elif number == signal.SIGCONT:
            self._go_on()
        elif number == signal.SIGTSTP:
            self._stop(with_group=False)
        else:
            self._pass_on(info)

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        number, now = info.si_signo, time.monotonic()
        self.was_asked = True
        name = signal.Signals(number).name
        if info.si_code in _FROM_A_PROCESS:
            by = children.name_of(info.si_pid)
            self._record.add_signal(name, info.si_pid, info.si_uid, by)
        else:
            self._record.add_signal(name, None, None, "the terminal")
        if self._child_has_it_from_the_terminal(info):
            self._observe_interrupt(number)
            return
        last = self._passed.get(number)
        # The receiver counts Ctrl-C: pressed twice, it is another request.
        if last is not None and now - last < _SAME_SECONDS and number != signal.SIGINT:
            return
        self._passed[number] = now
        if number in _WARNINGS and children.is_known():
            self._warnings.add(number)
            self._next_warning = 0.0
        elif self._status is None and info.si_code == _FROM_THE_KERNEL and number in _KEYS:
            # To the group, as the terminal would: a shell waits for its children.
            with contextlib.suppress(OSError):
                os.killpg(self._child, number)
        elif self._status is None:  # afterwards, the pid may be another's
            children.send(self._child, number)
        else:
            self._observe_interrupt(number)
            self._signal_the_rest(number)

    def _observe_interrupt(self, number: int) -> None:
        if self._status is not None:
            self._is_given_up |= number == signal.SIGINT

    def _child_has_it_from_the_terminal(self, info: signal.struct_siginfo) -> bool:
        """Whether the kernel has sent it to our whole group, and the child is in that."""
        if info.si_code != _FROM_THE_KERNEL or self._streams.has_own_session:
            return False
        # At the close of a terminal only the first process of its session gets SIGHUP.
        return not (info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid())

    def _signal_the_rest(self, number: int) -> None:
        """The child is gone: trainers that it has left behind have to save and leave, too."""
        for pid in children.catchers(os.getpid(), number, self._apart):
            children.send(pid, number)

    def _stop(self, *, with_group: bool) -> None:
        """Ctrl-Z: stop the command and ourselves, as one job; returns when we are continued."""
        if self._status is not None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self._child, signal.SIGSTOP)
        if self._keyboard is not None:
            self._keyboard.close()
        stop_ourselves(with_group=with_group)
        self._go_on()

    def _go_on(self) -> None:
        self._is_stopped = False
        if self._keyboard is not None and self._status is None:
            self._keyboard.open_again()
        if self._status is not None:
            return
        if self._streams.has_own_session:
            with contextlib.suppress(OSError):
                os.killpg(self._child, signal.SIGCONT)
        else:
            children.send(self._child, signal.SIGCONT)

    def _reap(self) -> None:
        stops = 0 if self._keyboard is None else os.WUNTRACED
        with contextlib.suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG | stops))[0] != 0:
                pid, status, used = ended
                if os.WIFSTOPPED(status):
                    if pid == self._child and not self._is_stopped:
                        self._is_stopped = True
                        self._stop(with_group=True)
                    continue
                code = os.waitstatus_to_exitcode(status)
                self._watch.observe_reaped(pid, code)
                if self._spare is not None:
                    self._spare.observe_reaped(pid, code)
                if pid == self._child:
                    self._status = code
                    self._maxrss_bytes = used.ru_maxrss * 1024

    def _await_death_record(self) -> bool:
        """True if a keeper has recorded a death, and only saves the last state."""
        life = self._record.folder
        if not self._status or self.was_asked or self.has_hung or life is None:
            return False
        deadline = time.monotonic() + _RECORD_SECONDS
        while time.monotonic() < deadline and children.keepers(os.getpid()):
            if is_death_recorded(life):
                return True
            self._turn(_LOOK_SECONDS / 5)
        return False

    def wait_for_keepers(self) -> None:
        """They end by themselves, when the last state is durable."""
        began = time.monotonic()
        has_said = False
        empty_looks = 0
        while self._has_children() and empty_looks < 2:
            # The list of children can miss one while another ends.
            found = children.keepers(os.getpid())
            empty_looks = 0 if found else empty_looks + 1
            if not found:
                self._turn(_LOOK_SECONDS / 5)
                continue
            is_news = not has_said and not self._hangs.is_lost
            if is_news and time.monotonic() - began > _SAY_SECONDS:
                has_said = True
                pids = ", ".join(map(str, found))
                self.say(
                    f"the command has ended; its keeper (pid {pids}) still saves: waiting for it."
                )
            self._turn(_LOOK_SELDOM_SECONDS)
            if self._hangs.gives_up(found):
                return
            if self._is_given_up and not self._in_job:
                return  # Ctrl-C; outside of a job the keeper can go on alone

    def _end_the_rest(self) -> None:
        """End the processes of a killed command: they would block the next attempt."""
        deadline = time.monotonic() + _REST_SECONDS
        ended: set[int] = set()
        while rest := set(self._left_behind()):
            for pid in rest - ended:
                children.send(pid, signal.SIGTERM)
            ended |= rest
            if self._is_given_up or time.monotonic() >= deadline:
                return
            self._turn(_LOOK_SECONDS)

    def _left_behind(self) -> list[int]:
        return children.left_behind(os.getpid(), self._session, self._apart)

    def _has_children(self) -> bool:
        self._reap()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return True
        return False

    def _finish_output(self, seconds: float) -> None:
        """Pass on what is there. A slow reader is waited for, unless we are asked to leave."""
        had, self.was_asked = self.was_asked, False
        deadline = time.monotonic() + seconds
        while True:
            for inlet in self._streams.inlets:
                inlet.drain()
            if not any(each.has_waiting for each in self._outlets) or self.was_asked:
                break
            if time.monotonic() >= deadline:
                break
            self._turn(deadline - time.monotonic())
        self.was_asked |= had

    @property
    def has_hung(self) -> bool:
        return self._hangs.has_hung

    def has_answered(self, status: int) -> bool:
        """Whether this is the end that was asked for, and not another one before it."""
        numbers = (*self._passed, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        expected = {REQUEUE, *(128 + n for n in numbers), *(-n for n in numbers)}
        return self.was_asked and status in expected

    def has_lost_its_reader(self, status: int) -> bool:
        """Whether it has ended because the reader of its output has left."""
        is_so = status in (-signal.SIGPIPE, 128 + signal.SIGPIPE)
        return is_so and any(each.is_closed for each in self._outlets)

    def say(self, message: str) -> None:
        """A line of ours on standard error, after the output so far; it never blocks."""
        outlet = next((each for each in self._outlets if each.is_for_errors), None)
        if outlet is not None:
            outlet.add(f"holdfast: {message}\n".encode(errors="replace"))
