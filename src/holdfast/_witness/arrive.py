"""The first thing in a process that is watched: wait for torch to be imported, then watch it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

from holdfast._save.capture import capture_generators
from holdfast._witness.handlers import note_handlers
from holdfast._witness.leaves import digest_of


def arrive() -> None:
    if "torch" in sys.modules:
        _watch_torch()
    else:
        sys.meta_path.insert(0, _AfterTorch())
    note_fresh_generators()
    note_seeds(random, "seed", "python")
    note_handlers()


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and adds what is to be done once it is there."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _watch_torch()

            # The loader stays torch's own: nobody who looks at it sees another.
            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch_torch() -> None:
    from holdfast._witness.eye import find_eye
    from holdfast._witness.torch_watch import watch

    eye = find_eye()  # closed in a child, until that turns out to be a rank
    if eye is not None:
        watch(eye)


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
