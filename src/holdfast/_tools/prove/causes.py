"""From what differs to the likely cause: by the recorded states, never by the script's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

Leaf = list[Any]  # [hash or text, norm or value or None, count of numbers]: a fingerprint as JSON
Items = Mapping[str, Leaf]

# Of several kinds that differ at once, the earlier one causes the later ones.
ORDER = ("moment", "scheduler", "scaler", "setting", "weight", "module", "value", "buffer")
_COUNTS_IN_THE_END = ("weight", "moment", "setting", "scheduler", "scaler", "buffer")
_NUMBERED = ("weight", "moment", "setting", "scheduler", "gradient")  # by their optimizer
_OF_TENSORS = 3  # the weight of a container that holds tensors
_ROUNDING = 0.003  # closer norms are the same sum, added up in another order
_CAUSE_OF_KIND = {
    "moment": "optimizer-state-lost",
    "scheduler": "scheduler-not-saved",
    "scaler": "scaler-not-saved",
    "buffer": "buffers-not-saved",
    "module": "state-not-saved",
    "value": "state-not-saved",
}
_FORMATS = {
    "weight": "weights {parameter}",
    "moment": "optimizer state {parts[2]} of {parameter}",
    "setting": "{parts[2]} of the optimizer",
    "scheduler": "{parts[2]} of the scheduler",
    "scaler": "{parts[1]} of the gradient scaler",
    "gradient": "the gradients",
    "generator": "random generator {rest}",
    "value": "tensor {rest}",
    "index": "tensor {rest}",
    "input": "input {name} of the model",
}
_BY_WEIGHT = ("input", "number", "value", "index", "generator", "module", "buffer")


# -- what was recorded of one rank ------------------------------------------------


@dataclass(frozen=True)
class UpdateRecord:
    """Everything that decides one update, read just before it."""

    optimizer: int
    items: Items
    batches: tuple[dict[str, Any], ...]
    counters: Mapping[str, float]
    boundary_id: tuple[str, int] | None  # the run of holdfast, and its step
    is_unbuilt: bool = False  # its moments were made by the update itself

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> UpdateRecord:
        boundary_id = event.get("boundary_id")
        return cls(
            optimizer=event["optimizer"],
            items=event["items"],
            batches=tuple(event["batches"]),
            counters=event["counters"],
            boundary_id=None if boundary_id is None else (boundary_id[0], boundary_id[1]),
            is_unbuilt=event.get("unbuilt", False),
        )

    @property
    def numbers(self) -> dict[str, Leaf]:
        return {f"number/{k}": [repr(v), float(v), 1] for k, v in self.counters.items()}

    def renumbered(self, numbers: Mapping[int, int]) -> UpdateRecord:
        """With the optimizer's number in the undisturbed run: a restart may make fewer."""
        if numbers.get(self.optimizer, self.optimizer) == self.optimizer:
            return self
        return replace(
            self,
            optimizer=numbers[self.optimizer],
            items=renumber(self.items, numbers),
        )


def completes_step(key: str) -> bool:
    """Whether the boundary of this key completes a step; else it is the end of an epoch."""
    return not key.endswith("-turn")


@dataclass
class RankHistory:
    """The undisturbed run of one rank."""

    updates: list[UpdateRecord] = field(default_factory=list)
    boundaries: dict[str, Items] = field(default_factory=dict)  # of runs of holdfast
    end: Items | None = None
    names: dict[str, str] = field(default_factory=dict)  # of the trained parameters
    seeds: dict[str, str] = field(default_factory=dict)
    by_weights: dict[Any, list[int]] = field(default_factory=dict)
    by_boundary_id: dict[Any, list[int]] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)  # each tensor's, of every step
    by_batch: dict[str, list[int]] = field(default_factory=dict)

    def record(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "sight":
            self._record_update(UpdateRecord.from_event(event))
            self.names |= event["names"]
            self.seeds |= event["seeds"]
        elif kind == "boundary":
            self.boundaries[event["key"]] = event["items"]
        elif kind == "end":
            self.end = event["items"]

    def _record_update(self, update: UpdateRecord) -> None:
        number = len(self.updates)
        self.updates.append(update)
        self.by_weights.setdefault(weights_key(update), []).append(number)
        if update.boundary_id is not None:
            self.by_boundary_id.setdefault(update.boundary_id, []).append(number)
        self.weights |= {v[0] for k, v in update.items.items() if k.startswith("weight/")}
        for batch in update.batches:
            self.by_batch.setdefault(batch["bytes"], []).append(number)

    def display(self, item: str) -> str:
        kind, _, rest = item.partition("/")
        parts = rest.split("/")
        parameter = self.names.get("/".join(parts[:2]), f"parameter {parts[-1]}")
        if kind == "number":
            return rest if rest.startswith("len(") else f"variable {rest}"
        if kind in _FORMATS:
            name = rest.partition("/")[2]
            return _FORMATS[kind].format(parameter=parameter, parts=parts, rest=rest, name=name)
        return f"{kind} {rest}" if rest else kind


def weights_key(update: UpdateRecord) -> tuple[tuple[str, str], ...]:
    """The weights before an update, without the number of its optimizer."""
    weights = ((k, v[0]) for k, v in update.items.items() if k.startswith("weight/"))
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


# -- what differs, and why --------------------------------------------------------


@dataclass(frozen=True)
class Deviation:
    """Something that differs, since which update, after which interruption; and its cause."""

    item: str
    place: int | None  # of the update, in the undisturbed run
    after: int | None
    expected: Leaf | None
    found: Leaf | None
    _: KW_ONLY
    cause: str = ""  # once it is judged
    others: tuple[str, ...] = ()  # where the cause is not sure: all else that differs
    is_in_later_epoch: bool = False  # than the one in which the attempt began

    @classmethod
    def of_texts(cls, item: str, expected: str, found: str, after: int | None) -> Deviation:
        """For something that has no fingerprint, such as a file or the end of the script."""
        return cls(item, None, after, [expected, None, 1], [found, None, 1])

    @property
    def step(self) -> int | None:
        return None if self.place is None else self.place + 1

    def because(self, cause: str, others: tuple[str, ...] = ()) -> Deviation:
        return replace(self, cause=cause, others=others)


@dataclass(frozen=True)
class DeviationCase:
    """All that is known when something that decides an update differs."""

    reference: RankHistory
    update: UpdateRecord | None
    place: int  # of the update, in the undisturbed run
    differing: list[str]
    deviations: Mapping[str, Deviation]  # those that had no consequence so far
    after: int | None
    since_start: int  # updates of this attempt before it
    saved_in_handler: bool  # the checkpoint that this attempt began with

    @property
    def expected(self) -> UpdateRecord:
        return self.reference.updates[self.place]

    @property
    def has_run(self) -> bool:
        return self.expected.boundary_id is not None


def judge(case: DeviationCase) -> Deviation:
    if case.saved_in_handler and case.since_start <= 1:
        return _first(case).because("saved-in-mid-step")
    if "batch" in case.differing and case.update is not None:
        return _judge_batch(case, case.update)
    # A number that the script counts steps with is one step off.
    is_one_off = any(abs(offset) == 1 for _, offset in _step_counters(case))
    generator = next((v for k, v in case.deviations.items() if is_in_use(k, v.expected)), None)
    for kind in ORDER:
        found = _of_kind(case, kind)
        if found is None:
            continue
        if kind in ("setting", "weight") and is_one_off:
            return _first(case).because("off-by-one-step")
        if kind == "setting":
            return found.because(_judge_setting(case, found))
        if kind == "weight":
            return found.because("weights-not-restored" if case.since_start == 0 else "unknown")
        if kind in ("module", "value", "buffer") and not _counts(case, found):
            continue
        if kind == "buffer" and (number := _number_of_module(case, found)) is not None:
            return _unsure(case, number, _cause_of_number(case))
        if kind == "value" and generator is not None and _is_initial(case, generator):
            continue  # it was drawn again
        return found.because(cause_of(case, found))
    if is_one_off:
        return _first(case).because("off-by-one-step")
    held = _held_input(case, generator)
    if held is not None:
        return held.because(_cause_of_number(case))
    if _value_offset(case):
        return _first(case).because("off-by-one-step")
    numbers = _initial_numbers(case)
    # Filling a container again draws random numbers, which moves the generator.
    is_filled_again = bool(numbers) and _weight_of_number(case, numbers[0]) == _OF_TENSORS
    if generator is not None and (_is_initial(case, generator) or not is_filled_again):
        return generator.because("generator-not-restored")
    if numbers:
        return _unsure(case, numbers[0], _cause_of_number(case))
    return _unsure(case, _first(case), "unknown")


def _unsure(case: DeviationCase, deviation: Deviation, cause: str) -> Deviation:
    others = [item for item in (*case.deviations, *case.differing) if item != deviation.item]

    def weight(item: str) -> int:
        kind = item.partition("/")[0]
        return _BY_WEIGHT.index(kind) if kind in _BY_WEIGHT else len(_BY_WEIGHT)

    return deviation.because(cause, others=tuple(sorted(others, key=weight)))


def _cause_of_number(case: DeviationCase) -> str:
    return "state-not-named" if case.has_run else "state-not-saved"


def _held_input(case: DeviationCase, generator: Deviation | None) -> Deviation | None:
    """An input of the model that the script kept from an earlier step, such as a hidden state.

    It is an input of another step of the undisturbed run. If that is the next step, it was drawn
    before the checkpoint and once more after it: then the generator is one draw ahead.
    """
    if case.since_start:
        return None
    updates = case.reference.updates
    for deviation in _inputs(case):
        found = None if deviation.found is None else deviation.found[0]
        places = [
            p for p, s in enumerate(updates) if s.items.get(deviation.item, [None])[0] == found
        ]
        is_next = case.place + 1 in places
        is_near = is_next or case.place - 1 in places
        if generator is not None and is_next and not _is_initial(case, generator):
            return deviation
        if generator is None and places and (0 in places or not is_near):
            return deviation
    return None


def _inputs(case: DeviationCase) -> list[Deviation]:
    return [
        deviation
        for item, deviation in case.deviations.items()
        if item.startswith("input/") and deviation.place == case.place
    ]


def _judge_setting(case: DeviationCase, deviation: Deviation) -> str:
    if case.has_run:
        return "state-not-named"
    scheduled = any(item.startswith("scheduler/") for item in case.expected.items)
    return (
        "scheduler-not-saved" if scheduled and _is_initial(case, deviation) else "setting-differs"
    )


def _initial_numbers(case: DeviationCase) -> list[Deviation]:
    """The numbers of the script that have their first value again, the likeliest cause first."""
    first = case.reference.updates[0].counters
    found = [
        deviation
        for item, deviation in case.deviations.items()
        if item.startswith("number/")
        and deviation.found is not None
        and repr(first.get(item.removeprefix("number/"))) == deviation.found[0]
    ]
    return sorted(found, key=lambda deviation: -_weight_of_number(case, deviation))


def _weight_of_number(case: DeviationCase, deviation: Deviation) -> int:
    """How likely a number decides an update."""
    name = deviation.item.removeprefix("number/")
    inside = name.removeprefix("len(").removesuffix(")")
    if name != inside:  # of a container: it counts if tensors are in it
        return _OF_TENSORS if any(f"/{inside}[" in item for item in case.deviations) else 0
    assert deviation.expected is not None
    assert deviation.found is not None
    for other in _inputs(case):
        if other.expected is not None and other.found is not None:
            # The size of an input has changed in proportion to the number.
            sizes, numbers = (
                (other.expected[2], other.found[2]),
                (deviation.expected[1], deviation.found[1]),
            )
            if sizes[0] != sizes[1] and sizes[0] * numbers[1] == sizes[1] * numbers[0]:
                return 2
    return 1


def _number_of_module(case: DeviationCase, buffer: Deviation) -> Deviation | None:
    """A number of the buffer's module that is not restored, while the buffer is."""
    if _is_initial(case, buffer):
        return None
    module = buffer.item.removeprefix("buffer/").rpartition(".")[0]
    return next(
        (
            number
            for number in _initial_numbers(case)
            if number.item.removeprefix("number/").rpartition(".")[0] == module
        ),
        None,
    )


def is_in_use(item: str, leaf: Leaf | None) -> bool:
    """Whether it is a generator that was drawn from or seeded."""
    return item.startswith("generator/") and leaf is not None and leaf[0] != "untouched"


def cause_of(case: DeviationCase, deviation: Deviation) -> str:
    kind = deviation.item.partition("/")[0]
    if case.has_run and kind in _CAUSE_OF_KIND:
        return "state-not-named"
    if kind in ("module", "value") and _is_average(case, deviation):
        return "ema-not-saved"
    if kind == "scheduler" and _is_of_the_step_before(case, deviation):
        return "off-by-one-step"
    return _CAUSE_OF_KIND.get(kind, "unknown")


def counts_in_the_end(case: DeviationCase, deviation: Deviation) -> bool:
    """Whether a deviation at the end is a difference, though the training itself was equal.

    A copy of weights, made to be saved or evaluated, is not. Nor are other tensors, which mostly
    are for display, unless they are an average of the weights.
    """
    kind = deviation.item.partition("/")[0]
    if kind not in ("module", "value"):
        return kind in _COUNTS_IN_THE_END
    if deviation.expected is None or deviation.expected[0] in case.reference.weights:
        return False
    return kind == "module" or (deviation.expected[2] > 1 and _is_average(case, deviation))


def _is_of_the_step_before(case: DeviationCase, deviation: Deviation) -> bool:
    if not deviation.place or deviation.found is None or _is_initial(case, deviation):
        return False
    before = case.reference.updates[deviation.place - 1].items.get(deviation.item)
    return before is not None and before[0] == deviation.found[0]


def _is_average(case: DeviationCase, deviation: Deviation) -> bool:
    """Whether it is like a copy of weights: made again from them, or from the initial ones."""
    updates = case.reference.updates
    if deviation.place is None or deviation.found is None:
        return False
    weights = {
        leaf[0]
        for place in {0, min(deviation.place, len(updates) - 1), max(0, deviation.place - 1)}
        for item, leaf in updates[place].items.items()
        if item.startswith(("weight/", "module/"))
    }
    first = updates[0].items.get(deviation.item)
    return deviation.found[0] in weights or (first is not None and first[0] in weights)


def _counts(case: DeviationCase, deviation: Deviation) -> bool:
    """Whether a tensor that differs can be the cause; a result of the same step cannot."""
    if deviation.place is None or deviation.place < case.place:
        return not deviation.item.startswith("value/") or _is_initial(case, deviation)
    if deviation.item.startswith("module/"):
        return case.since_start == 0
    return not deviation.item.startswith("buffer/") and _is_initial(case, deviation)


def _is_initial(case: DeviationCase, deviation: Deviation) -> bool:
    """Whether it has the value with which the undisturbed run began."""
    first = case.reference.updates[0].items.get(deviation.item)
    return first is not None and deviation.found is not None and first[0] == deviation.found[0]


def _of_kind(case: DeviationCase, kind: str) -> Deviation | None:
    found = [v for k, v in case.deviations.items() if k.startswith(f"{kind}/")]
    if found:
        return min(found, key=lambda deviation: deviation.place or 0)
    item = next((i for i in case.differing if i.partition("/")[0] == kind), None)
    return None if item is None else _now(case, item)


def _first(case: DeviationCase) -> Deviation:
    """The weightiest deviation, for a cause that does not depend on it."""
    for kind in ("batch", "weight", *ORDER, "gradient"):
        found = _of_kind(case, kind) if kind not in ("value", "module") else None
        if found is not None:
            return found
    if case.differing:
        return _now(case, case.differing[0])
    return next(iter(case.deviations.values()))


def _now(case: DeviationCase, item: str) -> Deviation:
    expected = case.expected.items.get(item)
    found = None if case.update is None else case.update.items.get(item)
    if item == "batch" and case.update is not None:
        expected, found = _batch_leaf(case, case.expected), _batch_leaf(case, case.update)
    return Deviation(item, case.place, case.after, expected, found)


def _batch_leaf(case: DeviationCase, update: UpdateRecord) -> Leaf:
    if not update.batches:
        return ["no batch", None, 1]
    last = update.batches[-1]
    places = case.reference.by_batch.get(last["bytes"], [])
    text = f"number {last['at'] + 1} of its pass"
    if places:
        nearest = min(places, key=lambda place: abs(place - case.place))
        text += f", that of step {nearest + 1}"
    return [text, None, 1]


def _judge_batch(case: DeviationCase, update: UpdateRecord) -> Deviation:
    batch = _now(case, "batch")
    if not update.batches:
        return batch.because("data-position-lost")
    expected, found = case.expected.batches[-1], update.batches[-1]
    places = case.reference.by_batch.get(found["bytes"], [])
    if case.since_start == 0 and (case.place - 1 in places or case.place + 1 in places):
        is_start = found["at"] == 0 and expected["at"] == 1
        # By other counters than that of its pass: whether the script counts another step, too.
        offsets = [offset for value, offset in _step_counters(case) if value != found["at"]]
        is_step_wrong = bool(offsets) and 0 not in offsets
        is_lost = is_start and not is_step_wrong
        return batch.because("data-position-lost" if is_lost else "off-by-one-step")
    if found["indices"] is not None and found["indices"] == expected["indices"]:
        if found["workers"] and not places:
            return batch.because("workers-reseeded")
        if not places:
            return batch.because("generator-not-restored")
    generator = next((v for k, v in case.deviations.items() if is_in_use(k, v.expected)), None)
    if generator is not None and found["at"] == expected["at"]:
        return generator.because("generator-not-restored")  # the right place in another order
    if places or found["at"] != expected["at"]:
        return batch.because("data-position-lost")
    return batch.because("generator-not-restored")


def _step_counters(case: DeviationCase) -> Iterator[tuple[int, float]]:
    """The value of each number that counts steps, and by how many steps it is off."""
    if case.update is None or case.since_start or not 0 < case.place < _last(case):
        return
    updates = case.reference.updates
    before, here, behind = (updates[case.place + i].counters for i in (-1, 0, 1))
    for name, value in case.update.counters.items():
        if name.startswith("len(") or not (name in before and name in here and name in behind):
            continue
        if not all(isinstance(number, int) for number in (value, here[name], before[name])):
            continue
        stride = here[name] - before[name]
        if stride and behind[name] - here[name] == stride:
            yield int(value), (value - here[name]) / stride


def _value_offset(case: DeviationCase) -> bool:
    """Whether a tensor of the script, such as a batch cut by hand, is that of the next step."""
    if case.update is None or case.since_start or not 0 < case.place < _last(case):
        return False
    for item, leaf in case.update.items.items():
        if not item.startswith("value/") or item not in case.deviations:
            continue
        for place in (case.place - 1, case.place + 1):
            near = case.reference.updates[place].items.get(item)
            if near is not None and near[0] == leaf[0]:
                return True
    return False


def _last(case: DeviationCase) -> int:
    return len(case.reference.updates) - 1


def judge_repeat(first: RankHistory, again: RankHistory) -> Deviation | None:
    """The first thing in which two undisturbed runs differ; None if they are the same."""
    for place, (one, other) in enumerate(zip(first.updates, again.updates, strict=False)):
        kinds = {
            kind: item
            for item, leaf in reversed(list(one.items.items()))
            if (kind := item.partition("/")[0])
            and item in other.items
            and other.items[item][0] != leaf[0]
            and (kind != "generator" or is_in_use(item, leaf))
        }
        batch = [b["bytes"] for b in one.batches] != [b["bytes"] for b in other.batches]
        if not batch and not kinds.keys() & {"weight", "setting", "gradient", "moment"}:
            continue
        values = [i for i in one.items if i.startswith(("value/", "index/")) and i in other.items]
        cause = "nondeterministic-kernels"
        if {k: first.seeds.get(k) for k in again.seeds} != again.seeds:
            cause = "time-or-pid-in-seed"
        elif "generator" in kinds or ("weight" in kinds and place == 0):
            cause = "unseeded-generator"
        elif batch or any(_is_other_data(i, one.items[i], other.items[i]) for i in values):
            cause = "data-order-not-fixed"
        kind = next((k for k in ("weight", *ORDER, "generator", "gradient") if k in kinds), "batch")
        item = "batch" if batch and "weight" not in kinds else kinds.get(kind, "batch")
        leaves = [one.items.get(item), other.items.get(item)]
        if item == "batch":
            hashes = [[b["bytes"] for b in update.batches] for update in (one, other)]
            leaves = [["".join(found)[:16], None, 0] for found in hashes]
        return Deviation(item, place, None, *leaves).because(cause)
    counts = len(first.updates), len(again.updates)
    if counts[0] != counts[1]:
        deviation = Deviation(
            "number of steps", min(counts), None, *([f"{n}", n, 1] for n in counts)
        )
        return deviation.because("unknown")
    return _judge_repeated_boundaries(first, again)


def _is_other_data(item: str, one: Leaf, other: Leaf) -> bool:
    """Whether two tensors are not even nearly the same."""
    if item.startswith("index/"):
        return bool(one[0] != other[0])
    if one[0] == other[0] or one[1] is None or other[1] is None:
        return False
    return bool(abs(one[1] - other[1]) > _ROUNDING * max(abs(one[1]), abs(other[1])))


def _judge_repeated_boundaries(first: RankHistory, again: RankHistory) -> Deviation | None:
    for place, (key, items) in enumerate(first.boundaries.items()):
        other = again.boundaries.get(key, {})
        differing = {i for i, leaf in items.items() if i in other and other[i][0] != leaf[0]}
        state = [i for i in items if i in differing and not i.startswith(("metric/", "generator/"))]
        if not state:
            continue
        is_random = any(item.startswith("generator/") for item in differing)
        cause = "unseeded-generator" if is_random or place == 0 else "nondeterministic-kernels"
        return Deviation(state[0], place, None, items[state[0]], other[state[0]]).because(cause)
    return None


def volatile_items(first: RankHistory, again: RankHistory) -> frozenset[str]:
    """What differs between two undisturbed runs without consequence, such as a time."""
    found = set()
    pairs = [(a.items, b.items) for a, b in zip(first.updates, again.updates, strict=False)]
    pairs += [(v, again.boundaries.get(k, {})) for k, v in first.boundaries.items()]
    pairs += [(first.end or {}, again.end or {})]
    pairs += [(a.numbers, b.numbers) for a, b in zip(first.updates, again.updates, strict=False)]
    for one, other in pairs:
        found |= {i for i, leaf in one.items() if i in other and other[i][0] != leaf[0]}
    return frozenset(found)


#: Each cause with its sentence and its remedy. The words on the left never change.
CAUSES: dict[str, tuple[str, str]] = {
    "scheduler-not-saved": (
        "The scheduler starts over after the restart while the weights continue: it is not saved.",
        "Save scheduler.state_dict() in the checkpoint and load it before the loop.",
    ),
    "data-position-lost": (
        "After the restart the data comes from another place than the one that was reached: "
        "some samples are seen twice, others never.",
        "Save how many batches of the epoch are used and skip them, with the epoch's seed; "
        "run.batches(loader) of holdfast does both.",
    ),
    "generator-not-restored": (
        "A random generator is not in the state that it had, so it draws other numbers.",
        "Save and restore the states of the generators in use (torch, numpy, random, CUDA; those "
        "of Keras layers such as Dropout, which tf.train.Checkpoint leaves out).",
    ),
    "scaler-not-saved": (
        "The gradient scaler begins with its first scale again: it is not saved.",
        "Save scaler.state_dict() in the checkpoint and load it.",
    ),
    "ema-not-saved": (
        "A moving average or another copy of the weights starts over after the restart: it is not "
        "saved.",
        "Save the averaged or copied weights in the checkpoint and load them.",
    ),
    "off-by-one-step": (
        "After the restart one step is made twice or left out: the saved step number and the "
        "saved weights are not of the same moment.",
        "Save the number of completed steps together with the weights, and begin with that one.",
    ),
    "torn-checkpoint": (
        "The checkpoint was being written when the process died, and the half file is all that "
        "is left.",
        "Write to a temporary file, flush it to disk, and rename it over the old one.",
    ),
    "workers-reseeded": (
        "The samples are the right ones, but the loader's workers draw other random numbers for "
        "them after the restart.",
        "Seed each sample from (epoch, index), or restore the generator from which the loader "
        "draws the seeds of its workers.",
    ),
    "optimizer-state-lost": (
        "The optimizer's moments start over after the restart: they are not restored.",
        "Save optimizer.state_dict() in the checkpoint and load it after the model; with "
        "TensorFlow, name the optimizer in tf.train.Checkpoint.",
    ),
    "saved-in-mid-step": (
        "The checkpoint was written inside a signal handler, in the middle of a step: it mixes "
        "what was before the update with what was after it.",
        "Let the handler only note the signal, and save between two steps.",
    ),
    "weights-not-restored": (
        "The weights after the restart are those of no step of the undisturbed run.",
        "Save all of the weights at one moment, between two steps, and load all of them.",
    ),
    "buffers-not-saved": (
        "Buffers of a module start over after the restart.",
        "Save model.state_dict(), which has the buffers, and load it with strict=True.",
    ),
    "setting-differs": (
        "A setting of the optimizer, such as its learning rate, is another one after the restart.",
        "If it is computed from a counter, save the counter; if the restart sets it, do not.",
    ),
    "other-number-of-steps": (
        "The training ends at another step: what decides its end, such as a counter of epochs or "
        "of patience, is not as it was.",
        "Save what the loop's end depends on.",
    ),
    "progress-lost": (
        "A checkpoint is there but cannot be read, and the script starts over silently.",
        "Let an error in loading end the script, or fall back to an older checkpoint.",
    ),
    "state-not-saved": (
        "It starts over after the restart: it is not saved.",
        "Save it in the checkpoint and load it.",
    ),
    "state-not-named": (
        "After the restart something starts over that the run does not know of: this, or what it "
        "is made from.",
        "Give it to holdfast.Run as a keyword. A value that the script rebinds also needs "
        'x = run.state["x"] before the loop and run.update(x=x) in it.',
    ),
    "resume-fails": (
        "The script cannot be started again after an interruption.",
        "Start it by hand in the folder that --keep leaves, and read its last output.",
    ),
    "hangs": (
        "The script stopped making steps.",
        "Start it by hand in the folder that --keep leaves, and find where it waits.",
    ),
    "result-differs": (
        "The training ends the same, but a file that it leaves does not.",
        "Save what decides the file's content (such as the best value so far) in the checkpoint.",
    ),
    "reference-differs": (
        "The interrupted run does not end as the given one did: either the interruptions or "
        "other options, code or machines are the cause.",
        "Prove it without --reference: then the script is compared with itself.",
    ),
    "metric-differs": (
        "The training continues unchanged, but the logged values differ.",
        "Name what the metric is made of in the state.",
    ),
    "unseeded-generator": (
        "Random numbers are drawn from a generator that was never seeded.",
        "Seed all generators at the top: torch.manual_seed(0), random.seed(0), np.random.seed(0); "
        "keras.utils.set_random_seed(0) does it for TensorFlow.",
    ),
    "time-or-pid-in-seed": (
        "The seed itself is another one in each run, as one from the clock or the process id.",
        "Take a fixed seed, or one from the command line.",
    ),
    "nondeterministic-kernels": (
        "The same weights, batch and random numbers give other gradients: a kernel that does not "
        "add up in a fixed order.",
        "torch.use_deterministic_algorithms(True), and torch.set_num_threads(1) on the CPU; "
        "tf.config.experimental.enable_op_determinism().",
    ),
    "data-order-not-fixed": (
        "Something comes in another order though no generator that is seen differs, as from a set, "
        "a directory listing, threads, or a generator made without a seed.",
        "Sort what is iterated over, and give every generator a seed.",
    ),
    "unknown": (
        "No value that was observed before it differs.",
        "Replay it with --only and --keep, and compare what the script prints.",
    ),
}
