"""State that is a value: handed over by `run.update`, and what goes wrong where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from holdfast._adapters.registry import adapters
from holdfast._errors import HoldfastError
from holdfast._state.capture import capture, is_stateful


class StateView(Mapping[str, Any]):
    """The state by name; it knows what of it somebody has asked for, in one attempt."""

    def __init__(self, state: dict[str, Any], attempt: int) -> None:
        self.attempt = attempt
        self.names: set[str] = set()
        self.looked_at: set[str] = set()  # at their first update
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


def hand_over(
    state: dict[str, Any], values: Mapping[str, Any], restored: StateView | None
) -> list[str]:
    """Replace values of the state; what cannot be stored is refused now, not at the next save.

    Called for every step, so a value of the same form as the one before is not looked into.
    `restored` is there if the state was. Returns what to say.
    """
    unknown = [name for name in values if name not in state]
    if unknown:
        raise HoldfastError(
            f"{unknown[0]} is not part of this run's state.\n"
            f"Give it to Run first; there is: {', '.join(state) or 'nothing'}."
        )
    formed = _that_know_forms()
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict) and is_stateful(state[name]):
            kind = type(state[name]).__name__
            raise HoldfastError(
                f"run.update({name}=…) was given a dict for an object, a {kind}.\n"
                "The object itself is saved, as it is at each save: leave it out of run.update()."
            )
        if restored is not None and name not in restored.looked_at:
            lines += _look_for_forgotten(formed, state[name], name, restored)
            restored.looked_at.add(name)
        if not any(adapter.same_form(state[name], value) for adapter in formed):
            capture({name: value})
    state.update(values)
    return lines


def _that_know_forms() -> list[ModuleType]:
    return [adapter for adapter in adapters() if hasattr(adapter, "same_form")]


def _look_for_forgotten(
    formed: list[ModuleType], value: Any, name: str, restored: StateView
) -> list[str]:
    """A restored value that nobody has taken is about to be replaced: by one that was made anew."""
    if name in restored.names or isinstance(value, dict | list) or is_stateful(value):
        return []  # the script's own containers and objects were filled with what was stored
    if not any(adapter.has_arrays(value) for adapter in formed):
        return []
    fact = f"{name} was restored, and run.update() {{}} a value that does not come from it"
    remedy = f'Take it first, before the loop: {name} = run.state["{name}"]'
    if restored.names:  # it may be one that every step computes from the others alone
        more = "needless if each step computes it from the rest alone"
        return [f"{fact.format('has replaced it by')}.\n{remedy} ({more})"]
    raise HoldfastError(
        f"{fact.format('is about to replace it by')}: the training would begin anew.\n{remedy}"
    )
