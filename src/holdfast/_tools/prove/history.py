"""What was seen of one process of a training: its sights, in the order of its updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Leaf = list[Any]  # [hash or text, norm or value or None, how many numbers]
Items = Mapping[str, Leaf]
_NUMBERED = ("weight", "moment", "setting", "scheduler", "gradient")


@dataclass(frozen=True)
class Sight:
    """What decides one update, just before it."""

    optimizer: int
    items: Items
    batches: tuple[dict[str, Any], ...]
    counters: Mapping[str, float]
    mark: tuple[str, int] | None  # the run of holdfast, and its step
    is_unbuilt: bool = False  # its moments were made by the update itself

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Sight:
        mark = event.get("mark")
        return cls(
            optimizer=event["optimizer"],
            items=event["items"],
            batches=tuple(event["batches"]),
            counters=event["counters"],
            mark=None if mark is None else (mark[0], mark[1]),
            is_unbuilt=event.get("unbuilt", False),
        )

    @property
    def numbers(self) -> dict[str, Leaf]:
        """The counters, as items."""
        return {f"number/{k}": [repr(v), float(v), 1] for k, v in self.counters.items()}

    def renumbered(self, numbers: Mapping[int, int]) -> Sight:
        """With the optimizer's number in the undisturbed run: a life may not make all of them."""
        if numbers.get(self.optimizer, self.optimizer) == self.optimizer:
            return self
        return replace(
            self,
            optimizer=numbers[self.optimizer],
            items=renumber(self.items, numbers),
        )


@dataclass
class History:
    """The undisturbed run of one rank."""

    sights: list[Sight] = field(default_factory=list)
    boundaries: dict[str, Items] = field(default_factory=dict)  # of runs of holdfast
    end: Items | None = None
    names: dict[str, str] = field(default_factory=dict)  # of the trained parameters
    seeds: dict[str, str] = field(default_factory=dict)
    by_weights: dict[Any, list[int]] = field(default_factory=dict)
    by_mark: dict[Any, list[int]] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)  # each tensor's, of every step
    by_batch: dict[str, list[int]] = field(default_factory=dict)

    def note(self, event: Mapping[str, Any]) -> None:
        """Take in what a process has told."""
        kind = event["event"]
        if kind == "sight":
            self._note_sight(Sight.from_event(event))
            self.names |= event["names"]
            self.seeds |= event["seeds"]
        elif kind == "boundary":
            self.boundaries[event["key"]] = event["items"]
        elif kind == "end":
            self.end = event["items"]

    def _note_sight(self, sight: Sight) -> None:
        number = len(self.sights)
        self.sights.append(sight)
        self.by_weights.setdefault(weights_key(sight), []).append(number)
        if sight.mark is not None:
            self.by_mark.setdefault(sight.mark, []).append(number)
        self.weights |= {v[0] for k, v in sight.items.items() if k.startswith("weight/")}
        for batch in sight.batches:
            self.by_batch.setdefault(batch["bytes"], []).append(number)

    def display(self, item: str) -> str:
        """An item in words."""
        kind, _, rest = item.partition("/")
        parts = rest.split("/")
        parameter = self.names.get("/".join(parts[:2]), f"parameter {parts[-1]}")
        if kind == "weight":
            return f"weights {parameter}"
        if kind == "moment":
            return f"optimizer state {parts[2]} of {parameter}"
        if kind == "setting":
            return f"{parts[2]} of the optimizer"
        if kind == "scheduler":
            return f"{parts[2]} of the scheduler"
        if kind == "scaler":
            return f"{parts[1]} of the gradient scaler"
        if kind == "gradient":
            return "the gradients"
        if kind == "generator":
            return f"random generator {rest}"
        if kind in ("value", "index"):
            return f"tensor {rest}"
        if kind == "number":
            return rest if rest.startswith("len(") else f"variable {rest}"
        if kind == "input":
            return f"input {rest.partition('/')[2]} of the model"
        return f"{kind} {rest}" if rest else kind


def weights_key(sight: Sight) -> tuple[tuple[str, str], ...]:
    """The weights before an update, whichever number its optimizer has."""
    weights = ((k, v[0]) for k, v in sight.items.items() if k.startswith("weight/"))
    return tuple(sorted((k.split("/")[2], leaf) for k, leaf in weights))


def renumber(items: Items, numbers: Mapping[int, int]) -> dict[str, Leaf]:
    """Items by the numbers that the optimizers have in the undisturbed run."""
    found = {}
    for item, leaf in items.items():
        kind, _, rest = item.partition("/")
        if kind in _NUMBERED:
            number, _, rest = rest.partition("/")
            item = "/".join(filter(None, [kind, str(numbers.get(int(number), number)), rest]))
        found[item] = leaf
    return found
