"""The first thing in a process that is watched: wait for a framework's import, then watch it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast._run.witness.leaves import digest_of
from holdfast._state.capture import capture_generators
from holdfast._tools.prove.witness.handlers import note_handlers

if TYPE_CHECKING:
    from holdfast._run.witness.eye import Eye


def arrive() -> None:
    for name, watch in _WATCHES.items():
        if name in sys.modules:
            watch()
        else:
            sys.meta_path.insert(0, _After(name, watch))
    note_fresh_generators()
    note_seeds(random, "seed", "python")
    note_handlers()


class _After(importlib.abc.MetaPathFinder):
    """Finds a framework as everybody does, and adds what is to be done once it is there."""

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

            # The loader stays the framework's own: nobody who looks at it sees another.
            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch_torch() -> None:
    from holdfast._tools.prove.witness.torch_watch import watch

    _with_eye(watch)


def _watch_tensorflow() -> None:
    from holdfast._tools.prove.witness.tensorflow_watch import watch

    _with_eye(watch)


def _watch_keras() -> None:
    # On another backend a Keras script is seen by its run's boundaries only.
    if hasattr(sys.modules.get("tensorflow"), "__version__"):
        from holdfast._tools.prove.witness.tensorflow_watch import watch_keras

        _with_eye(watch_keras)


def _with_eye(watch: Callable[[Eye], None]) -> None:
    from holdfast._run.witness.eye import find_eye

    eye = find_eye()  # closed in a child, until that turns out to be a rank
    if eye is not None:
        watch(eye)


_WATCHES = {"torch": _watch_torch, "tensorflow": _watch_tensorflow, "keras": _watch_keras}


def note_fresh_generators() -> None:
    """Remember the generators as they are at the start: one that nobody uses differs for nobody."""
    for name, state in capture_generators(devices=False).items():
        FRESH.setdefault(name, digest_of(state))


def note_seeds(module: Any, name: str, generator: str) -> None:
    """Tell with which seed a generator is first seeded: one from the clock is another each time."""
    seed = getattr(module, name)
    told: list[int] = []

    def seed_and_tell(*arguments: Any, **named: Any) -> Any:
        value = next(iter([*arguments, *named.values()]), None)
        if not told:
            told.append(1)
            SEEDS.setdefault(generator, repr(value)[:40])
        return seed(*arguments, **named)

    setattr(module, name, seed_and_tell)


#: The states of the generators at the start, by name.
FRESH: dict[str, str] = {}

#: The first seed of each generator, by name.
SEEDS: dict[str, str] = {}
