"""State given by `run.update`; warns of state or an optimizer that the script forgot to give."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import adapters, array_adapter, exact_types
from holdfast._errors import HoldfastError
from holdfast._state.capture import PLAIN_TYPES, Captured, capture, is_stateful
from holdfast._store.format.checksum import digest


class StateView(Mapping[str, Any]):
    """The state by name; records which names the script has read in one attempt."""

    __slots__ = ("_state", "attempt", "checked", "names")  # so that run.state.x = 1 is an error

    def __init__(self, state: dict[str, Any], attempt: int) -> None:
        self.attempt = attempt
        self.names: set[str] = set()
        self.checked: set[str] = set()  # names whose first update was checked
        self._state = state

    def __getitem__(self, name: str) -> Any:
        value = self._state[name]
        self.names.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(self._state)


_MOST_DEPTH = 20  # of a value whose form is compared
Forms = dict[str, Hashable]


def hand_over(
    state: dict[str, Any], values: Mapping[str, Any], restored: StateView | None, forms: Forms
) -> list[str]:
    """Replace values of the state; refuse now, not at the next save, what cannot be stored.

    Called for every step, so a value of the same form as the last one is not inspected: `forms` has
    those that were. `restored` is None in a new run. Returns lines to say.
    """
    unknown = [name for name in values if name not in state]
    if unknown:
        raise HoldfastError(
            f"{unknown[0]} is not part of this run's state.\n"
            f"Give it to Run first; there is: {', '.join(state) or 'nothing'}."
        )
    formed = [adapter for adapter in adapters() if adapter.arrays_are_values]
    arrays = exact_types(adapters())
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict) and is_stateful(state[name]):
            kind = type(state[name]).__name__
            raise HoldfastError(
                f"run.update({name}=…) was given a dict for an object, a {kind}.\n"
                "The object itself is saved, as it is at each save: leave it out of run.update()."
            )
        if restored is not None and name not in restored.checked:
            lines += _check_replaced(formed, name, state[name], value, restored)
            restored.checked.add(name)
        if any(adapter.same_form(state[name], value) for adapter in formed):
            continue
        form = _form_of(value, arrays)
        if form is None or form != forms.get(name):
            capture({name: value})
            forms[name] = form
    state.update(values)
    return lines


def _form_of(value: Any, arrays: Mapping[type, Adapter], depth: int = 0) -> Hashable:
    """What decides whether a value can be stored: its types and keys; None if that is not known."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return str(kind)
    if kind in (dict, list, tuple):
        if depth == _MOST_DEPTH:
            return None
        items = value.values() if kind is dict else value
        parts: set[Hashable] = set(map(type, items))
        if not parts <= PLAIN_TYPES:
            parts = {_form_of(item, arrays, depth + 1) for item in items}
        keys = frozenset(value) if kind is dict else None
        return None if None in parts else (str(kind), keys, frozenset(parts))
    if kind not in arrays:
        adapter = array_adapter(value)
        if adapter is None or adapter.is_sharded(value):
            return None
    return kind, value.dtype, getattr(value, "layout", None), getattr(value, "is_meta", None)


def _check_replaced(
    formed: list[Adapter], name: str, value: Any, new: Any, restored: StateView
) -> list[str]:
    """A restored value that the script never read is about to be replaced by a fresh one."""
    if name in restored.names or isinstance(value, dict | list) or is_stateful(value):
        return []  # the script's own objects were filled in place
    is_number = type(value) in (int, float) and new != value
    if not is_number and not any(adapter.has_arrays(value) for adapter in formed):
        return []
    fact = f"{name} was restored, and run.update() {{}} a value that does not come from it"
    remedy = f'Take it first, before the loop: {name} = run.state["{name}"]'
    if is_number or restored.names:  # each step may compute it from the others alone
        more = "needless if each step computes it from the rest alone"
        return [f"{fact.format('has replaced it by')}.\n{remedy} ({more})"]
    raise HoldfastError(
        f"{fact.format('is about to replace it by')}: the training would start over.\n{remedy}"
    )


# -- State that a script has forgotten: it changes, but not in what is saved -----------------------
# A resumed run would go on inexactly, and nothing would fail. So the first attempt says it once,
# with the line to write.


_STEPS = 10  # within which a value that changes is handed over at least once
_STEPS_OF_NUMBERS = 100  # the same for a number, such as the best loss so far, or an array
_MOST_DIGESTED_BYTES = 16 << 20  # of one array; larger ones are not looked at
_MOST_NAMED = 4


def watch_optimizers(hear: Callable[[Any], None]) -> Callable[[], None]:
    """Call `hear` with every optimizer that has stepped; returns a function that ends that."""
    if not hasattr(sys.modules.get("torch"), "__version__"):
        return lambda: None
    from holdfast.torch.stepping import hear_steps

    return hear_steps(hear)


class ForgottenState:
    """Finds parts of the state that do not change while the training goes on."""

    def __init__(self, state: dict[str, Any], *, is_new: bool) -> None:
        self._state = state
        self._watches_arrays = is_new  # in the first attempt only
        self._digests: dict[str, bytes] | None = None  # of arrays, at the first capture
        self._digested_at = 0
        self._handed: set[str] = set()
        self._first_update: int | None = None
        self._stepped: dict[int, tuple[weakref.ref[Any], int]] = {}  # optimizers, by their id
        self._suspects: list[weakref.ref[Any]] = []  # stepped in two steps of the run
        self._known: list[weakref.ref[Any]] | None = None  # weak: not to keep their memory
        self._known_at = 0
        self._has_moved = False
        self._first_step: int | None = None  # that this attempt has captured
        self._has_told_numbers = False

    def note_update(self, names: Iterable[str], step: int) -> None:
        self._handed.update(names)
        if self._first_update is None:
            self._first_update = step

    def note_optimizer(self, optimizer: Any, step: int) -> None:
        """An optimizer has stepped; one that exists for a single step has no state to keep."""
        known, first = self._stepped.get(id(optimizer), (None, step))
        if known is None:
            self._stepped[id(optimizer)] = weakref.ref(optimizer), step
        elif 0 <= first < step:
            self._stepped[id(optimizer)] = known, -1
            self._suspects.append(known)

    def check(self, captured: Captured, step: int, *, in_first_epoch: bool) -> Iterator[str]:
        """Lines to say when a state is captured."""
        if self._first_step is None:
            self._first_step = step
        is_late = not in_first_epoch  # many values change once an epoch
        if self._first_step < _STEPS_OF_NUMBERS <= step and is_late:  # in one attempt only
            yield from self.check_numbers()
        if self._watches_arrays:
            yield from self._check_unchanged(step, is_late=is_late)
        if self._suspects:
            yield from self._check_optimizers()
        if not self._has_moved:
            yield from self._check_standstill(captured, step)
        if self._first_update is not None and step - self._first_update >= _STEPS:
            yield from self._check_arrays()

    def check_numbers(self) -> Iterator[str]:
        """Lines to say after the first steps, or when the first attempt ends before that."""
        if self._has_told_numbers:
            return
        self._has_told_numbers = True
        numbers = [name for name, value in self._state.items() if type(value) in (int, float)]
        for name in sorted(set(numbers) - self._handed):
            yield (
                f"{name} is a number that run.update() never changed: the next start finds "
                f"{self._state[name]} again.\n"
                f"If your script changes it, write run.update({name}={name}) in the loop, and "
                f'before the loop: {name} = run.state["{name}"]'
            )

    def _check_unchanged(self, step: int, *, is_late: bool) -> Iterator[str]:
        """Arrays of their own in the state: the script may make new ones in place of them."""
        if self._digests is None:
            self._digests, self._digested_at = dict(self._digest_arrays()), step
        if not self._digests:
            self._watches_arrays = False
        if step - self._digested_at < _STEPS_OF_NUMBERS or not is_late:
            return
        self._watches_arrays, now = False, dict(self._digest_arrays())
        names = [
            name
            for name, found in self._digests.items()
            if now.get(name) == found and name not in self._handed
        ]
        if names:
            values = ", ".join(f"{name}={name}" for name in names[:_MOST_NAMED])
            yield (
                f"{', '.join(names)}: no change in the state from step {self._digested_at} to step "
                f"{step}, so the next start finds this as it was.\n"
                f"If your script makes new arrays ({names[0]} = …), write run.update({values}) in "
                f'the loop and {names[0]} = run.state["{names[0]}"] before it. Or change them in '
                f"place: {names[0]}[...] = …"
            )

    def _digest_arrays(self) -> Iterator[tuple[str, bytes]]:
        for name, value in self._state.items():
            adapter = array_adapter(value)
            if adapter is None or adapter.arrays_are_values or name in self._handed:
                continue
            if adapter.spec(name, value).size_bytes <= _MOST_DIGESTED_BYTES:
                yield name, digest(adapter.bytes_of(value))

    def _check_optimizers(self) -> Iterator[str]:
        from holdfast.torch.stepping import is_forgotten

        tensors = capture(self._state, replicas=True).values
        suspects, self._suspects = self._suspects, []
        for optimizer in [found for each in suspects if (found := each()) is not None]:
            if not is_forgotten(optimizer, self._state, tensors):
                continue
            kind, parts = type(optimizer).__name__, {"state", "param_groups"}
            copies = (
                n for n, v in self._state.items() if isinstance(v, dict) and parts <= v.keys()
            )
            name = next(copies, None)
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

    def _check_arrays(self) -> Iterator[str]:
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

    def _check_standstill(self, captured: Captured, step: int) -> Iterator[str]:
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
