"""Signal handlers: they record the signal number; the next step boundary acts on it.

A handler may run between any two bytecodes, while the thread it interrupts
holds any lock. So ours appends a number and returns: no saving, no printing.
`set_wakeup_fd` carries the number to the
keeper at C level, so that the clock of a deadline starts even while the main
thread sits in a long call.

It raises at once only outside the user's loop, where no boundary will come, and for
the second Ctrl-C where no keeper answers it, or at a prompt or in a notebook, whose
process must go on.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import faulthandler
import functools
import math
import os
import signal
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, TypeVar

from holdfast import _errors
from holdfast._environment import variables
from holdfast._environment.processes.libc import c_handler, libc
from holdfast._environment.processes.proc import stat_fields
from holdfast._environment.processes.threads import STACKS_FILE
from holdfast._errors import Stopped, is_interactive
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.folder.requests import SAME_PRESS_SECONDS, StopRequest, request_from_signal
from holdfast._text import say

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


_SIGQUIT = getattr(signal, "SIGQUIT", None)
_SIGHUP = getattr(signal, "SIGHUP", None)
_LONG_SECONDS = 120.0
_Handler = Callable[[int, Any], Any] | int | None

# To be undone in a forked child; at most one run owns the signals.
_installed: Guard | None = None
_masks = threading.local()  # of the thread that forks, while it does
_is_asked = False  # True: a signal has come since the newest run was opened


_Function = TypeVar("_Function", bound=Callable[..., Any])
_uninterruptible: set[int] = set()  # the ids of code objects


def uninterruptible(function: _Function) -> _Function:
    """A second Ctrl-C does not interrupt this function or anything that it calls.

    The handler looks for its code among the frames that it interrupts: a call costs nothing more.
    """
    _uninterruptible.add(id(function.__code__))
    return function


def _is_uninterruptible(frame: FrameType | None) -> bool:
    while frame is not None and id(frame.f_code) not in _uninterruptible:
        frame = frame.f_back
    return frame is not None


class InstalledHandlers:
    """Our handlers and wakeup descriptor, and what they have replaced; none before `install`."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        # One object: each access to a method makes a new one, and they are compared by identity.
        self._handler = handler
        self.replaced: dict[int, _Handler] = {}
        self.quit: int | None = None
        self._replaced_quit: _Handler = None  # only of a process 1
        self._at_c_level: dict[int, bytes] = {}
        self._wakeup = self._replaced_wakeup = -1

    def install(
        self, numbers: tuple[int, ...], wakeup: int, stacks: IO[bytes], quit_as_first: _Handler
    ) -> None:
        for number in numbers:
            former = signal.getsignal(number)
            # A signal that was ignored stays so: Ctrl-C of a background job, SIGHUP under nohup.
            is_ignored = former is signal.SIG_IGN and number in (signal.SIGINT, _SIGHUP)
            if number == _SIGQUIT or is_ignored:
                continue
            self.replaced[number] = former
            self._set(number)
        if wakeup >= 0:
            self._wakeup = wakeup
            self._replaced_wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        if _SIGQUIT is not None and _SIGQUIT in numbers:
            self.quit = _SIGQUIT
            if os.getpid() == 1:
                # Process 1 cannot die of a signal, and its end would end the keeper. So Python
                # tells the keeper, which saves and ends it.
                self._replaced_quit = signal.signal(_SIGQUIT, quit_as_first)
            # At C level: it works while a call holds the GIL. With `chain` the process then dies
            # of the signal, as Ctrl-\ should do. Only this thread's stack: the others change
            # meanwhile, and reading them can be a SIGSEGV.
            faulthandler.register(_SIGQUIT, file=stacks, all_threads=False, chain=True)

    def _set(self, number: int) -> None:
        signal.signal(number, self._handler)
        self._at_c_level[number] = c_handler(number)

    def call_users(self, number: int, frame: FrameType | None = None) -> bool:
        """Call the user's handler: the state is durable, or no boundary will come. False: none."""
        former = self.replaced.get(number)
        if not callable(former) or former is signal.default_int_handler:
            return False
        former(number, frame)
        return True

    def reinstall(self) -> None:
        """Reinstall what another library has replaced, and say so."""
        if not _in_main_thread():
            return
        taken = []
        # IPython installs these around each cell and prompt: no user asked for them.
        defaults = (signal.default_int_handler, signal.SIG_IGN, -1) if is_interactive() else ()
        for number in tuple(self.replaced):
            found = signal.getsignal(number)
            if found is self._handler and c_handler(number) == self._at_c_level[number]:
                continue
            if found is not self._handler and callable(found):
                self.replaced[number] = found  # the user's newest handler, called at the boundary
            if number != signal.SIGINT or found not in defaults:
                taken.append(f"the handler of {signal.Signals(number).name}")
            self._set(number)
        if self._wakeup >= 0:
            descriptor = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            if descriptor != self._wakeup:
                self._replaced_wakeup = descriptor
                if descriptor not in defaults:
                    taken.append("the wakeup descriptor")
        for what in taken:
            say(f"{what} had been replaced by another library; it is restored now.")

    def put_back(self) -> None:
        if self._wakeup >= 0:
            try:
                signal.set_wakeup_fd(self._replaced_wakeup)
            except (ValueError, OSError):  # closed meanwhile by its owner
                signal.set_wakeup_fd(-1)
        for number, former in self.replaced.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL if former is None else former)
        self.replaced.clear()
        if self.quit is not None:
            faulthandler.unregister(self.quit)
            if self._replaced_quit is not None:
                signal.signal(self.quit, self._replaced_quit)


class Guard:
    """Handles the signals of one run while it is open, if it was opened in the main thread."""

    def __init__(
        self, numbers: tuple[int, ...], wakeup: int, stacks: Path, *, in_job: bool = False
    ) -> None:
        global _installed
        self.noted: list[int] = []
        self.leave: Callable[[int], BaseException] | None = None  # set: raised at once
        self.leaves_when_nudged = False  # True: all ranks decide together when to leave
        self.sets_children_apart = False  # True: each child gets a process group of its own
        self._in_job = in_job
        self._is_alone = False  # True: there is no keeper
        self._defers = True  # False: outside the loop, where a signal acts at once
        self._holds_warnings = False  # True: a scheduler's warning is only recorded
        self._is_nudged = False  # the next SIGINT comes from our own thread
        self._ends_the_step = False  # True: the nudge does not wait for the boundary
        self._pressed_at = math.inf  # the first Ctrl-C
        self.handlers = InstalledHandlers(self._note)
        self._is_main = _in_main_thread()
        if not self._is_main:
            _tell_of_thread()
            return
        self._path = stacks
        self._stacks = os.fdopen(open_plain(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")
        self.handlers.install(numbers, wakeup, self._stacks, self._quit_as_first)
        self._outer, _installed = _installed, self  # of a run around this one
        _guard_output()
        self._crashes = CrashStacks(self._stacks)
        self._unshield = _shield_children(self, numbers)
        self._is_over = threading.Event()
        if os.getpid() == 1:
            threading.Thread(
                target=_reap_orphans, args=(self._is_over,), name="holdfast-reaper", daemon=True
            ).start()

    def defer(self, defers: bool, *, holds_warnings: bool = False) -> None:
        """True: signals wait for a boundary. False: they act at once, but for warnings if asked."""
        self._defers, self._holds_warnings = defers, holds_warnings
        if defers and is_interactive():  # the run may be open since an earlier cell
            self.handlers.reinstall()

    def nudge(self, *, ends_the_step: bool = False) -> None:
        """From another thread: act in the main thread as if (a second) Ctrl-C had come."""
        if not self._is_main:
            return
        self._is_nudged, self._ends_the_step = True, ends_the_step
        if hasattr(signal, "pthread_kill"):  # also interrupts a system call
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            _thread.interrupt_main(signal.SIGINT)

    def reinstall(self, is_alone: bool) -> None:
        self._is_alone = is_alone
        self.handlers.reinstall()

    def request(self, asked: StopRequest | None) -> StopRequest | None:
        """The stop that a signal has asked for, or `asked`.

        In a job a person's request comes first: a signal after it would requeue the job.
        """
        by_person = asked is not None and asked.status == _errors.PERSON
        if not self.noted or (self._in_job and by_person):
            return asked
        return request_from_signal(self.noted[0])

    def ignore_from_now(self, number: int) -> None:
        """Make `remove` ignore this signal: the process leaves already."""
        if number in self.handlers.replaced:
            self.handlers.replaced[number] = signal.SIG_IGN

    def remove(self) -> None:
        global _installed
        if not self._is_main:
            return
        self._unshield()
        if _in_main_thread():
            if _installed is self:
                _installed = self._outer
            self.handlers.put_back()
            if os.getpid() == 1:
                die_by_signals()  # from now on no handler of ours answers them
        self._is_over.set()
        self._crashes.remove()
        self._stacks.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()

    def _note(self, number: int, frame: FrameType | None) -> None:
        global _is_asked
        _is_asked = True
        if self._defers:
            nudged, self._is_nudged = self._is_nudged, False
            again = False
            if not nudged:
                self.noted.append(number)
            if number == signal.SIGINT and not nudged:
                now = time.monotonic()
                self._pressed_at = min(self._pressed_at, now)
                again = now - self._pressed_at > SAME_PRESS_SECONDS
            if self.leave is not None and (nudged or not self.leaves_when_nudged):
                raise self.leave(number)
            if again and self._is_alone:
                raise KeyboardInterrupt  # no keeper acts on the second Ctrl-C
            at_once = again or (nudged and self._ends_the_step)
            if at_once and is_interactive() and not _is_uninterruptible(frame):
                raise KeyboardInterrupt  # the keeper would end the process, and so the kernel
            return
        if self._holds_warnings and _errors.status_of_signal(number) == _errors.REQUEUE:
            self.noted.append(number)
            return
        if self.handlers.call_users(number, frame):
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(_errors.status_of_signal(number), signal.Signals(number).name)

    def _quit_as_first(self, number: int, _: FrameType | None) -> None:
        if not self._defers or self._is_alone:
            os._exit(128 + number)


def _block_signals() -> None:
    # What reaches a child before its handlers are put back would be noted by ours and
    # lost, and be told to the keeper as if it had come for the trainer.
    if _installed is not None and _installed._defers:
        handlers = _installed.handlers
        numbers = {*handlers.replaced, *(() if handlers.quit is None else (handlers.quit,))}
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_signals() -> None:
    before = _masks.__dict__.pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _undo_in_child() -> None:
    # A forked worker must neither run our handler nor write into our descriptor:
    # one Ctrl-C with two workers would arrive three times.
    global _installed
    guard, _installed = _installed, None
    if guard is not None:
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
            for number, former in guard.handlers.replaced.items():
                signal.signal(number, signal.SIG_DFL if former is None else former)
            if guard.handlers.quit is not None:
                faulthandler.unregister(guard.handlers.quit)
    _unblock_signals()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_undo_in_child
    )


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _tell_of_thread() -> None:
    if is_led():
        return
    if variables.text("RAY_RAYLET_PID"):
        say(
            "the run was opened in a worker of Ray, which takes `holdfast stop` for a failure and "
            "starts again, and keeps a relative folder among its temporary files.\n"
            "Use holdfast.ray.fit(trainer) in place of trainer.fit()."
        )
        return
    say(
        "the run was opened outside the main thread, where Python allows no signal "
        "handlers: it is stopped by `holdfast stop` or run.stop() only."
    )


def announce_signal(
    number: int,
    step: int,
    held: int | None = None,
    durable: int | None = None,
    *,
    grace: float | None = None,
    needed: float | None = None,
) -> None:
    """Say at once what will happen, and what a second Ctrl-C does.

    `held` is the newest step in memory, `durable` the newest on disk. `grace` are the seconds until
    the kill, `needed` those that a write takes.
    """
    kept = "nothing new" if held is None else f"step {held}"
    doing = f"step {step} is being finished and saved"
    if number == signal.SIGINT and is_interactive():
        say(f"interrupted: {doing}. Another interrupt does not wait for it and keeps {kept}.")
    elif number == signal.SIGINT:
        say(f"Ctrl-C: {doing}, then the run leaves. Ctrl-C again leaves at once and keeps {kept}.")
    elif grace is not None:
        # Only a durable step is certain after a kill at the end of the grace time.
        certain = "nothing is durable yet"
        if durable is not None:
            certain = f"step {durable} is durable already"
        if grace >= _LONG_SECONDS:
            certain = ""
        elif needed is not None and needed > grace:
            takes = f" A save takes about {needed:.0f} s here, and there are {grace:.0f} s"
            certain = f"{takes}: {certain}."
        elif held is None or held == durable:
            certain = f" If {grace:.0f} s are not enough, {certain}."
        else:
            likely = f" If {grace:.0f} s are not enough, step {held} is likely kept."
            certain = f"{likely} {certain.capitalize()}."
        say(f"{signal.Signals(number).name}: {doing}.{certain}")


# -- Output whose terminal or reader is gone -------------------------------------------------------
# Each write to a closed terminal fails: before its SIGHUP has arrived too, and in a disowned job.
# Ctrl-C also ends `tee` in `python train.py | tee log`. A print must not fail the step that is to
# be finished, and the flush at the end must not change the exit status.


_guarded: list[Any] = []  # streams; another wrapper may be around ours
_SIGNAL_SECONDS = 0.5  # a launcher passes a signal on after the reader has died of it


def _guard_output() -> None:
    global _is_asked
    _is_asked = False
    streams: list[Any] = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    for stream in streams:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it has no descriptor
            descriptor = stream.fileno()
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            gone = errno.EIO if os.isatty(descriptor) else errno.EPIPE
            if is_file or any(each is stream for each in _guarded):
                continue
            for name in ("write", "flush"):
                setattr(stream, name, _guarded_call(getattr(stream, name), descriptor, gone))
            _guarded.append(stream)


def _guarded_call(call: Callable[..., Any], descriptor: int, gone: int) -> Callable[..., Any]:
    """`write` or `flush` of a stream. It goes to /dev/null once the other end is gone."""

    def guarded(*text: str) -> Any:
        try:
            return call(*text)
        except OSError as error:
            if error.errno != gone:
                raise
            deadline = time.monotonic() + _SIGNAL_SECONDS
            while not _is_asked and gone != errno.EIO:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
            return sum(map(len, text))

    return guarded


# -- A training loop in a thread of a host process, such as a worker of Ray Train ------------------
# The main thread and its signal handlers belong to the host. So do the working folder and the
# process itself, which goes on after the loop.


_folder: Path | None = None  # working folder of the script that asked for the training


def set_host(folder: str | None) -> None:
    """Loops of this process are hosted, for a script with this working folder; None: no longer."""
    global _folder
    _folder = None if folder is None else Path(folder)


def is_led() -> bool:
    """True if the host handles a stop (`holdfast.ray`)."""
    return _folder is not None


def as_the_script_means(folder: Path) -> Path:
    """Resolve a relative folder as the script means it: the host may have another cwd."""
    return folder if _folder is None else _folder / folder


# -- The trainer's children are protected from signals of the terminal -----------------------------
# Ctrl-C goes to every process of the foreground group. Data-loader workers would die of it, and the
# step that is to be finished would lack its data. So while a run is open, multiprocessing starts
# children with those signals blocked: unlike a handler, a mask survives fork and exec. SIGTERM
# stays open, since it is how workers are ended.
#
# A launcher such as torchrun sends SIGTERM to the whole group of a rank. There the children get
# process groups of their own.


@contextlib.contextmanager
def children_deferred() -> Iterator[list[int]]:
    """Defer the user's SIGCHLD handler until our own work is done; clear the list to drop it.

    torch's handler raises as soon as a worker has died, between any two lines: a slot would stay
    locked, or a state would not be saved.
    """
    number = getattr(signal, "SIGCHLD", None)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(number) if number is not None and is_main else None
    heard: list[int] = []
    if number is None or not callable(handler):
        yield heard
        return
    signal.signal(number, lambda *_: heard.append(1))
    try:
        yield heard
    finally:
        signal.signal(number, handler)
    if heard:
        handler(number, None)


def _shield_children(guard: Guard, numbers: tuple[int, ...]) -> Callable[[], None]:
    """Block signals in every child that multiprocessing starts; returns what ends that."""
    blocked = {n for n in numbers if n not in (signal.SIGTERM, _SIGQUIT)}
    if not hasattr(signal, "pthread_sigmask") or not blocked:
        return lambda: None
    from multiprocessing import process as processes  # slow to import

    former = processes.BaseProcess.start

    @uninterruptible
    @functools.wraps(former)
    def start(process: BaseProcess) -> None:
        if getattr(process, "_start_method", None) != "fork":
            # Its start unblocks signals, so it must run already.
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            former(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if guard.sets_children_apart and process.pid is not None:
            # A child that has called exec already sets its own group.
            with contextlib.suppress(OSError):
                os.setpgid(process.pid, process.pid)

    # The one method that starts every child of multiprocessing.
    processes.BaseProcess.start = start  # type: ignore[method-assign,assignment]  # wrapped
    return functools.partial(setattr, processes.BaseProcess, "start", former)


# -- The duties of process 1, for a trainer that is its container's first process ------------------
# A signal that process 1 does not handle does nothing, where any other process would die: after its
# run is closed, a script would ignore SIGTERM until it is killed. And orphans become its children,
# which it must reap.


_LOOK_SECONDS = 2.0
# Signals that end a process by default, and that people and systems send.
_DEADLY = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")


def die_by_signals() -> None:
    """Let unhandled signals end this process, as they would end any other."""
    for name in _DEADLY:
        number = getattr(signal, name)
        with contextlib.suppress(ValueError, OSError):  # only the main thread may
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _die)


def _die(number: int, _: object) -> None:
    if os.getpid() == 1:
        os._exit(128 + number)
    # A forked child has inherited this handler, and can die of the signal.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _reap_orphans(is_over: threading.Event) -> None:
    """Reap orphans that have ended, but no child that this process has started itself.

    The code that started a child needs its status. An orphan was seen below another process
    before: that tells them apart.
    """
    others: set[tuple[int, bytes]] = set()  # children of other processes, as (pid, start)
    while not is_over.wait(_LOOK_SECONDS):
        seen: set[tuple[int, bytes]] = set()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or not (fields := stat_fields(int(entry.name))):
                continue
            pid, state, parent, start = int(entry.name), fields[0], int(fields[1]), fields[19]
            if parent == os.getpid() and state == b"Z":
                if (pid, start) in others:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            elif parent != os.getpid() or (pid, start) in others:  # or an orphan that still runs
                seen.add((pid, start))
        others = seen


# -- The keeper may read the stacks of this process while a run is open ----------------------------
# By py-spy, which reads from outside: where the system allows that to a parent only, the keeper is
# permitted. And by a signal, on which faulthandler writes the stack of every thread into a file in
# memory that the keeper shares. That works at C level, even while a call holds the GIL. Forked
# workers have both too, so that the line of a stuck one can be named.


_FIRST = 7  # after SIGRTMIN: the C library and others use the first ones
_TRIES = 6
_PR_SET_PTRACER = 0x59616D61  # "Yama"
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class StackDump:
    """The signal in the name of its file makes this process write its stacks."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._number = 0
        self._at_c_level = b""
        self._keeper = 0
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._register()

    def admit(self, keeper: int) -> None:
        """Permit the keeper and its children to read ours; only one process can be permitted."""
        with contextlib.suppress(OSError):
            # Where Yama permits ptrace to parents only; elsewhere nothing is changed.
            if _SCOPE.read_bytes().strip() == b"1":
                self._keeper = keeper
                _allow(keeper)
                _inherited.add(self)

    def remove(self) -> None:
        _inherited.discard(self)
        if self._keeper:
            _allow(0)
            self._keeper = 0
        number, self._number = self._number, 0
        # Other code that has taken the signal over keeps it.
        if number and c_handler(number) == self._at_c_level:
            faulthandler.unregister(number)
            if self.descriptor is not None:
                os.close(self.descriptor)
        self.descriptor = None

    def after_fork(self) -> None:
        _allow(self._keeper)  # unlike the handler and the file, the permission is not inherited

    def _register(self) -> None:
        import fcntl  # not on Windows

        number = _find_unused()
        if number is None:
            return
        descriptor = os.memfd_create(f"{STACKS_FILE}{number}", os.MFD_CLOEXEC)
        try:
            # Append mode: the keeper truncates it, and workers write to it too.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
            faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor, self._number = descriptor, number
        self._at_c_level = c_handler(number)


def _find_unused() -> int | None:
    if sys.platform != "linux":
        return None
    default = bytes(len(c_handler(signal.SIGRTMIN + _FIRST)))
    for number in range(signal.SIGRTMIN + _FIRST, signal.SIGRTMIN + _FIRST + _TRIES):
        if number < signal.SIGRTMAX and c_handler(number) == default:
            return number
    return None


def _allow(pid: int) -> None:
    import ctypes

    words = [ctypes.c_ulong(each) for each in (pid, 0, 0, 0)]
    with contextlib.suppress(OSError, AttributeError):
        libc().prctl(_PR_SET_PTRACER, *words)


# -- Python stacks of a crash at C level, such as a segmentation fault -----------------------------
# A script that has enabled faulthandler itself keeps its own destination.


class CrashStacks:
    """While installed, a crash of this process writes the stack of every thread into a file."""

    def __init__(self, stacks: IO[bytes]) -> None:
        self._destination: weakref.ref[_Destination] | None = None
        if faulthandler.is_enabled():
            return
        destination = _Destination(stacks.fileno())
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable(file=destination, all_threads=True)
            self._destination = weakref.ref(destination)
            _inherited.add(self)

    def remove(self) -> None:
        # Only faulthandler holds the destination.
        if self._destination is not None and self._destination() is not None:
            faulthandler.disable()
        self._destination = None
        _inherited.discard(self)

    def after_fork(self) -> None:
        self.remove()  # a worker's crash must not look like the trainer's


class _Destination:
    """The part of a file object that faulthandler needs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        pass


# -- Forked children -------------------------------------------------------------------------------


_inherited: weakref.WeakSet[StackDump | CrashStacks] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_inherited):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
