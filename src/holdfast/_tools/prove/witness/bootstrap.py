"""Runs first in a process that is observed: waits for a framework's import, then watches it."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import random
import signal
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from holdfast._run.witness.observer import digest_of
from holdfast._state.capture import capture_generators

#: The states of the generators at the start, by name. An unused one may differ.
FRESH: dict[str, str] = {}

#: The first seed of each generator, by name. One from the clock differs each time.
SEEDS: dict[str, str] = {}

_imported: set[str] = set()  # the frameworks whose import has ended
_handlers: set[Any] = set()  # the code of each function that was ever set as a signal handler


def bootstrap() -> None:
    for name in _WATCHES:
        if name in sys.modules:
            _watch(name)
        else:
            sys.meta_path.insert(0, _AfterImport(name, functools.partial(_watch, name)))
    record_fresh_generators()
    record_seeds(random, "seed", "python")
    _record_handlers()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a framework as the other finders do, and calls `watch` once it is imported."""

    def __init__(self, name: str, watch: Callable[[], None]) -> None:
        self._name = name
        self._watch = watch
        self._is_asking = False

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                # Not before: tensorflow only asks where Keras is, and imports it much later.
                sys.meta_path.remove(self)
                execute(module)
                self._watch()

            # The framework's own loader object stays, for code that inspects it.
            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]  # wrapped
        return spec


def _watch(framework: str) -> None:
    _imported.add(framework)
    if framework != "keras":
        _begin(framework)
    # Either of the two imports the other one before its own import ends. On another backend only
    # the run's boundaries are observed.
    is_pair = framework in _PAIR and _imported >= _PAIR
    if is_pair and sys.modules["keras"].backend.backend() == "tensorflow":
        _begin("keras")


def _begin(framework: str) -> None:
    from holdfast._run.witness.observer import find_observer

    module, function = _WATCHES[framework]
    observer = find_observer()  # closed in a child, which may still turn out to be a rank
    if observer is not None:
        getattr(importlib.import_module(f"{__package__}.{module}"), function)(observer)


_PAIR = {"tensorflow", "keras"}
_WATCHES = {
    "torch": ("torch_watch", "watch"),
    "tensorflow": ("tensorflow_watch", "watch"),
    "keras": ("tensorflow_watch", "watch_keras"),
}


def record_fresh_generators() -> None:
    for name, state in capture_generators(devices=False).items():
        FRESH.setdefault(name, digest_of(state))


def record_seeds(module: Any, name: str, generator: str) -> None:
    """Record the seed of the first call of a framework's function that seeds a generator."""
    seed = getattr(module, name)

    def seed_and_record(*arguments: Any, **named: Any) -> Any:
        value = next(iter([*arguments, *named.values()]), None)
        SEEDS.setdefault(generator, repr(value)[:40])
        return seed(*arguments, **named)

    setattr(module, name, seed_and_record)


def _record_handlers() -> None:
    """Record every handler that is ever set: one may uninstall itself before it saves."""
    set_handler = signal.signal

    def set_and_record(number: int, handler: Any) -> Any:
        inner = getattr(handler, "func", handler)  # of a partial
        inner = getattr(inner, "__func__", inner)  # of a method
        code = getattr(inner, "__code__", None)
        if code is not None:
            _handlers.add(code)
        return set_handler(number, handler)

    signal.signal = set_and_record  # type: ignore[assignment]  # wrapped


def in_handler(frame: FrameType | None) -> bool:
    """Whether a signal handler is on this stack: a checkpoint that it saves is suspect."""
    while frame is not None:
        if frame.f_code in _handlers:
            return True
        frame = frame.f_back
    return False
