"""State that a script has forgotten: it changes, and what is saved of it does not.

A resumed run would go on inexactly, and nothing would fail. So it is said in the first life, once,
with the line to write.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast._adapters.registry import adapters
from holdfast._state.capture import Captured, capture

_STEPS = 10  # of which a value that changes is handed over in one at least


def hear_optimizers(hear: Callable[[Any], None]) -> Callable[[], None]:
    """Call `hear` with every optimizer that has stepped; returns what ends that."""
    if not hasattr(sys.modules.get("torch"), "__version__"):
        return lambda: None
    from holdfast.torch.stepping import hear_steps

    return hear_steps(hear)


class Forgotten:
    """What of a state does not change while the training goes on."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._handed: set[str] = set()
        self._first_update: int | None = None
        self._stepped: dict[int, tuple[weakref.ref[Any], int]] = {}  # optimizers, by their id
        self._suspects: list[weakref.ref[Any]] = []  # have stepped in two steps of the run
        self._known: list[weakref.ref[Any]] | None = None  # a reference would keep their memory
        self._known_at = 0
        self._has_moved = False

    def note_update(self, names: Iterable[str], step: int) -> None:
        """Values were handed over by run.update."""
        self._handed.update(names)
        if self._first_update is None:
            self._first_update = step

    def note_optimizer(self, optimizer: Any, step: int) -> None:
        """An optimizer has stepped. One that lives for a single step has no state to keep."""
        known, first = self._stepped.get(id(optimizer), (None, step))
        if known is None:
            self._stepped[id(optimizer)] = weakref.ref(optimizer), step
        elif 0 <= first < step:
            self._stepped[id(optimizer)] = known, -1
            self._suspects.append(known)

    def look(self, captured: Captured, step: int) -> Iterator[str]:
        """What to say, when a state is captured."""
        if self._suspects:
            yield from self._look_at_optimizers()
        if not self._has_moved:
            yield from self._look_for_standstill(captured, step)
        if self._first_update is not None and step - self._first_update >= _STEPS:
            yield from self._look_at_arrays()

    def look_at_numbers(self) -> Iterator[str]:
        """What to say when the first life ends."""
        numbers = [name for name, value in self._state.items() if type(value) in (int, float)]
        for name in sorted(set(numbers) - self._handed):
            yield (
                f"{name} is a number, and no step has handed over a new one: the next start finds "
                f"{self._state[name]} again.\n"
                f"Where it changes, write: run.update({name}={name})"
            )

    def _look_at_optimizers(self) -> Iterator[str]:
        from holdfast.torch.stepping import is_forgotten

        tensors = capture(self._state, replicas=True).values
        suspects, self._suspects = self._suspects, []
        for optimizer in [found for each in suspects if (found := each()) is not None]:
            if not is_forgotten(optimizer, self._state, tensors):
                continue
            kind, name = type(optimizer).__name__, self._name_of_copy()
            if name is None:
                yield (
                    f"an optimizer ({kind}) steps and is not part of the state: a restart "
                    "would lose what it has gathered.\n"
                    "Give it to Run as well: holdfast.Run(…, optimizer=optimizer)"
                )
            else:
                yield (
                    f"{name} is the state_dict() of an optimizer ({kind}): a copy, which does not "
                    "change as it steps.\n"
                    f"Give the object itself to Run: holdfast.Run(…, {name}=optimizer)"
                )

    def _name_of_copy(self) -> str | None:
        for name, value in self._state.items():
            if isinstance(value, dict) and {"state", "param_groups"} <= value.keys():
                return name
        return None

    def _look_at_arrays(self) -> Iterator[str]:
        """Values that run.update leaves out, while it hands over others."""
        self._first_update, all_names = None, ", ".join(f"{n}={n}" for n in self._state)
        for name, value in self._state.items():
            is_array = any(adapter.has_arrays(value) for adapter in adapters())
            if is_array and name not in self._handed:
                yield (
                    f"{name} is never handed over by run.update(): the next start finds it as Run "
                    "was given it.\n"
                    f"If it changes, write: run.update({all_names})"
                )

    def _look_for_standstill(self, captured: Captured, step: int) -> Iterator[str]:
        """Arrays that cannot change in place, and are the same at two boundaries."""
        kinds = {adapter.kind for adapter in adapters() if adapter.arrays_are_values}
        pairs = zip(captured.specs, captured.values, strict=True) if kinds else ()
        arrays = [value for spec, value in pairs if spec.kind in kinds]
        if not arrays:
            return
        if self._known is None:
            self._known, self._known_at = [weakref.ref(array) for array in arrays], step
            return
        same = len(arrays) == len(self._known) and all(
            reference() is array for reference, array in zip(self._known, arrays, strict=True)
        )
        if same and step == self._known_at:
            return
        self._has_moved = True
        if same:
            yield (
                f"no array of the state has changed from step {self._known_at} to step {step}. JAX "
                "makes new arrays, so a step must hand them over:\n"
                "run.update(params=params, opt_state=opt_state), by the names that Run was given."
            )
