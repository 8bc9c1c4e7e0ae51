"""One command in the process of the tests: the program's own `main`, with streams of its own.

The descriptors are replaced, and not only `sys.stdout`: so a child process of the command writes to
the same place, and `fileno()` and `isatty()` answer as in the program. Afterwards the process is as
before: streams, environment, current folder, signal handlers, caches. All of these belong to the
whole process, so one command runs at a time, in the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

from holdfast._tools.cli import main


def run_main(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    given: str = "",
    stdout: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Call `main` with these words (the first is the program), and return how a process would end.

    `given` is what standard input has. `stdout` is a descriptor for standard output, such as a
    terminal; without it, what is printed is returned. An exception that `main` lets through is
    raised here: the program would leave with a traceback.
    """
    assert threading.current_thread() is threading.main_thread(), "take holdfast_process"
    with (
        tempfile.TemporaryFile() as read,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        read.write(given.encode())
        read.seek(0)
        with (
            _environment(env),
            _folder(cwd),
            _handlers(),
            warnings.catch_warnings(),
            mock.patch.object(tempfile, "tempdir", None),
            mock.patch.object(sys, "argv", list(words)),
            _streams(read.fileno(), out.fileno() if stdout is None else stdout, err.fileno()),
        ):
            _forget()
            status = _status()
        return subprocess.CompletedProcess(list(words), status, _text(out), _text(err))


def _status() -> int:
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    else:
        status = 0
    # The interpreter prints any other code, and leaves with 1.
    assert isinstance(status, int), status
    return status


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    former = dict(os.environ)
    for name in former.keys() | wanted.keys():
        # The interpreter reads these when it starts: only a process shows what they do.
        if name.startswith("PYTHON") and former.get(name, "") != wanted.get(name, ""):
            raise AssertionError(f"{name} differs: take holdfast_process")
    _set_environment(wanted)
    try:
        yield
    finally:
        _set_environment(former)


def _set_environment(wanted: Mapping[str, str]) -> None:
    # One by one: other threads never see an empty environment.
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    with contextlib.chdir(wanted):
        yield


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in former.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _streams(read: int, out: int, err: int) -> Iterator[None]:
    """Descriptors 0, 1 and 2, and the objects for them as the interpreter makes them."""
    sys.stdout.flush()
    sys.stderr.flush()
    former = [os.dup(number) for number in range(3)]
    try:
        for number, descriptor in enumerate((read, out, err)):
            os.dup2(descriptor, number)
        with (
            _open(0, "r") as stdin,
            _open(1, "w") as stdout,
            _open(2, "w", errors="backslashreplace", line_buffering=True) as stderr,
            contextlib.ExitStack() as changes,
        ):
            for stream in (stdin, stdout, stderr):
                name = ("stdin", "stdout", "stderr")[stream.fileno()]
                changes.enter_context(mock.patch.object(sys, name, stream))
                changes.enter_context(mock.patch.object(sys, f"__{name}__", stream))
            yield
    finally:
        for number, descriptor in enumerate(former):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _open(number: int, mode: str, **options: Any) -> io.TextIOWrapper:
    binary = open(number, f"{mode}b", closefd=False)  # noqa: SIM115  a descriptor
    options.setdefault("line_buffering", binary.isatty())
    return io.TextIOWrapper(binary, encoding="utf-8", **options)


def _forget() -> None:
    """Empty the caches of holdfast: a process begins without them."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "holdfast":
            continue
        for value in list(vars(module).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    # As subprocess reads it: every end of a line is \n.
    return file.read().decode().replace("\r\n", "\n").replace("\r", "\n")
