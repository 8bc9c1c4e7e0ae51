"""From what differs to the likely cause: by the recorded states, never by the script's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

Leaf = list[Any]  # [hash or text, norm or value or None, count of numbers]: a fingerprint as JSON
Items = Mapping[str, Leaf]
MISSING: Leaf = ["missing", None, 1]

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


def unlike(one: Items, other: Items) -> list[str]:
    """The items that both have, and whose values differ."""
    return [item for item, leaf in one.items() if item in other and other[item][0] != leaf[0]]


def _kind_of(item: str) -> str:
    return item.partition("/")[0]


# -- what was recorded of one rank ------------------------------------------------


@dataclass(frozen=True)
class UpdateRecord:
    """Everything that decides one update, read just before it."""

    optimizer: int
    items: Items
    batches: Sequence[dict[str, Any]]
    counters: Mapping[str, float]
    boundary_id: str | None  # the run of holdfast, and its step
    unbuilt: bool = False  # its moments were made by the update itself

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> UpdateRecord:
        return cls(**{name: event[name] for name in cls.__dataclass_fields__ if name in event})

    @property
    def numbers(self) -> dict[str, Leaf]:
        return {f"number/{k}": [repr(v), float(v), 1] for k, v in self.counters.items()}

    @property
    def weights(self) -> list[tuple[str, str]]:
        """The hash of each weight, without the number of its optimizer."""
        weights = ((k, v[0]) for k, v in self.items.items() if k.startswith("weight/"))
        return sorted((k.split("/")[2], leaf) for k, leaf in weights)

    @property
    def batch_hashes(self) -> list[str]:
        return [batch["bytes"] for batch in self.batches]


def completes_step(key: str) -> bool:
    """Whether the boundary of this key completes a step; else it is the end of an epoch."""
    return not key.endswith("-turn")


@dataclass
class RankHistory:
    """The undisturbed run of one rank."""

    updates: list[UpdateRecord] = field(default_factory=list)
    boundaries: dict[str, Items] = field(default_factory=dict)  # of runs of holdfast
    end: Items = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of the trained parameters
    seeds: dict[str, str] = field(default_factory=dict)

    def record(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "sight":
            self.updates.append(UpdateRecord.from_event(event))
            self.names |= event["names"]
            self.seeds |= event["seeds"]
        elif kind == "boundary":
            self.boundaries[event["key"]] = event["items"]
        elif kind == "end":
            self.end = event["items"]

    def places_of_batch(self, batch: Mapping[str, Any]) -> list[int]:
        """The updates that this batch was for."""
        return [p for p, update in enumerate(self.updates) if batch["bytes"] in update.batch_hashes]

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


def renumber(items: Items, numbers: Mapping[int, int]) -> dict[str, Leaf]:
    """Items by the numbers of optimizers in the undisturbed run: a restart may make fewer."""
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
    expected: Leaf
    found: Leaf
    _: KW_ONLY
    cause: str = ""  # once it is judged
    others: tuple[str, ...] = ()  # where the cause is not sure: all else that differs
    is_in_later_epoch: bool = False  # than the one in which the attempt began

    @classmethod
    def of_texts(
        cls,
        cause: str,
        item: str,
        texts: tuple[str, str],
        after: int | None,
        place: int | None = None,
    ) -> Deviation:
        """For something that has no fingerprint, such as a file or the end of the script."""
        return cls(item, place, after, *([text, None, 1] for text in texts), cause=cause)

    @property
    def step(self) -> int | None:
        return None if self.place is None else self.place + 1

    def because(self, cause: str, others: tuple[str, ...] = ()) -> Deviation:
        return replace(self, cause=cause, others=others)


@dataclass
class RankAttempt:
    """One attempt of one rank, beside the undisturbed run."""

    after: int | None = None  # the number of the interruption before it
    expected_start: int = 0
    saved_in_handler: bool = False  # the checkpoint that it began with
    since_start: int = 0  # updates
    started_at: int | None = None  # which update of the undisturbed run
    numbers: dict[int, int] = field(default_factory=dict)  # of optimizers: here, and undisturbed


@dataclass(frozen=True)
class DeviationCase:
    """All that is known when something that decides an update differs."""

    reference: RankHistory
    attempt: RankAttempt
    deviations: Mapping[str, Deviation]  # those that had no consequence so far
    update: UpdateRecord | None
    place: int  # of the update, in the undisturbed run
    differing: Sequence[str] = ()

    @property
    def expected(self) -> UpdateRecord:
        return self.reference.updates[self.place]

    @property
    def has_run(self) -> bool:
        return self.expected.boundary_id is not None

    def judge(self) -> Deviation:
        if self.attempt.saved_in_handler and self.attempt.since_start <= 1:
            return self._first().because("saved-in-mid-step")
        if "batch" in self.differing and self.update is not None:
            return self._judge_batch(self.update)
        # A number that the script counts steps with is one step off.
        is_one_off = any(abs(offset) == 1 for _, offset in self._step_counters())
        generator = self._generator()
        for kind in ORDER:
            found = self._of_kind(kind)
            if found is None:
                continue
            if kind in ("setting", "weight") and is_one_off:
                return self._first().because("off-by-one-step")
            if kind == "setting":
                return found.because(self._cause_of_setting(found))
            if kind == "weight":
                is_first = self.attempt.since_start == 0
                return found.because("weights-not-restored" if is_first else "unknown")
            if kind in ("module", "value", "buffer") and not self._counts(found):
                continue
            if kind == "buffer" and (number := self._number_of_module(found)) is not None:
                return self._unsure(number, self._cause_of_number)
            if kind == "value" and generator is not None and self._is_initial(generator):
                continue  # it was drawn again
            return found.because(self.cause_of(found))
        if is_one_off:
            return self._first().because("off-by-one-step")
        held = self._held_input(generator)
        if held is not None:
            return held.because(self._cause_of_number)
        if self._has_value_of_a_neighbour():
            return self._first().because("off-by-one-step")
        numbers = self._initial_numbers()
        # Filling a container again draws random numbers, which moves the generator.
        is_filled_again = bool(numbers) and self._weight_of_number(numbers[0]) == _OF_TENSORS
        if generator is not None and (self._is_initial(generator) or not is_filled_again):
            return generator.because("generator-not-restored")
        if numbers:
            return self._unsure(numbers[0], self._cause_of_number)
        return self._unsure(self._first(), "unknown")

    def cause_of(self, deviation: Deviation) -> str:
        kind = _kind_of(deviation.item)
        if self.has_run and kind in _CAUSE_OF_KIND:
            return "state-not-named"
        if kind in ("module", "value") and self._is_average(deviation):
            return "ema-not-saved"
        if kind == "scheduler" and self._is_of_the_step_before(deviation):
            return "off-by-one-step"
        return _CAUSE_OF_KIND.get(kind, "unknown")

    def counts_in_the_end(self, deviation: Deviation) -> bool:
        """Whether a deviation at the end is a difference, though the training itself was equal.

        A copy of weights, made to be saved or evaluated, is not. Nor are other tensors, which
        mostly are for display, unless they are an average of the weights.
        """
        kind = _kind_of(deviation.item)
        if kind not in ("module", "value"):
            return kind in _COUNTS_IN_THE_END
        weights = (leaf for update in self.reference.updates for _, leaf in update.weights)
        if deviation.expected[0] in weights:
            return False
        return kind == "module" or (deviation.expected[2] > 1 and self._is_average(deviation))

    def _unsure(self, deviation: Deviation, cause: str) -> Deviation:
        others = [item for item in (*self.deviations, *self.differing) if item != deviation.item]
        order = {kind: number for number, kind in enumerate(_BY_WEIGHT)}
        others.sort(key=lambda item: order.get(_kind_of(item), len(order)))
        return deviation.because(cause, tuple(others))

    @property
    def _cause_of_number(self) -> str:
        return "state-not-named" if self.has_run else "state-not-saved"

    def _cause_of_setting(self, deviation: Deviation) -> str:
        if self.has_run:
            return "state-not-named"
        is_scheduled = any(item.startswith("scheduler/") for item in self.expected.items)
        is_lost = is_scheduled and self._is_initial(deviation)
        return "scheduler-not-saved" if is_lost else "setting-differs"

    def _generator(self) -> Deviation | None:
        """The first generator in use that differs."""
        return next((v for k, v in self.deviations.items() if is_in_use(k, v.expected)), None)

    def _held_input(self, generator: Deviation | None) -> Deviation | None:
        """An input of the model that the script kept from an earlier step, such as a hidden state.

        It is an input of another step of the undisturbed run. If that is the next step, it was
        drawn before the checkpoint and once more after it: then the generator is one draw ahead.
        """
        if self.attempt.since_start:
            return None
        for deviation in self._inputs():
            places = [
                place
                for place, update in enumerate(self.reference.updates)
                if update.items.get(deviation.item, MISSING)[0] == deviation.found[0]
            ]
            is_next = self.place + 1 in places
            is_near = is_next or self.place - 1 in places
            if generator is not None and is_next and not self._is_initial(generator):
                return deviation
            if generator is None and places and (0 in places or not is_near):
                return deviation
        return None

    def _inputs(self) -> list[Deviation]:
        return [
            deviation
            for item, deviation in self.deviations.items()
            if item.startswith("input/") and deviation.place == self.place
        ]

    def _initial_numbers(self) -> list[Deviation]:
        """The script's numbers that have their first value again, the likeliest cause first."""
        first = self.reference.updates[0].counters
        found = [
            deviation
            for item, deviation in self.deviations.items()
            if item.startswith("number/")
            and repr(first.get(item.removeprefix("number/"))) == deviation.found[0]
        ]
        return sorted(found, key=self._weight_of_number, reverse=True)

    def _weight_of_number(self, deviation: Deviation) -> int:
        """How likely a number decides an update."""
        name = deviation.item.removeprefix("number/")
        inside = name.removeprefix("len(").removesuffix(")")
        if name != inside:  # of a container: it counts if tensors are in it
            return _OF_TENSORS if any(f"/{inside}[" in item for item in self.deviations) else 0
        expected, found = deviation.expected[1], deviation.found[1]
        for other in self._inputs():
            # The size of an input has changed in proportion to the number.
            before, now = other.expected[2], other.found[2]
            if before != now and before * found == now * expected:
                return 2
        return 1

    def _number_of_module(self, buffer: Deviation) -> Deviation | None:
        """A number of the buffer's module that is not restored, while the buffer is."""
        if self._is_initial(buffer):
            return None
        module = buffer.item.removeprefix("buffer/").rpartition(".")[0]
        for number in self._initial_numbers():
            if number.item.removeprefix("number/").rpartition(".")[0] == module:
                return number
        return None

    def _is_of_the_step_before(self, deviation: Deviation) -> bool:
        if not deviation.place or self._is_initial(deviation):
            return False
        before = self.reference.updates[deviation.place - 1].items.get(deviation.item, MISSING)
        return bool(before[0] == deviation.found[0])

    def _is_average(self, deviation: Deviation) -> bool:
        """Whether it is like a copy of weights: made again from them, or from the initial ones."""
        updates = self.reference.updates
        if deviation.place is None:
            return False
        weights = {
            leaf[0]
            for place in {0, min(deviation.place, len(updates) - 1), max(0, deviation.place - 1)}
            for item, leaf in updates[place].items.items()
            if item.startswith(("weight/", "module/"))
        }
        first = updates[0].items.get(deviation.item, MISSING)
        return deviation.found[0] in weights or first[0] in weights

    def _counts(self, deviation: Deviation) -> bool:
        """Whether a tensor that differs can be the cause; a result of the same step cannot."""
        if deviation.place is None or deviation.place < self.place:
            return not deviation.item.startswith("value/") or self._is_initial(deviation)
        if deviation.item.startswith("module/"):
            return self.attempt.since_start == 0
        return not deviation.item.startswith("buffer/") and self._is_initial(deviation)

    def _is_initial(self, deviation: Deviation) -> bool:
        """Whether it has the value with which the undisturbed run began."""
        first = self.reference.updates[0].items.get(deviation.item)
        return first is not None and bool(first[0] == deviation.found[0])

    def _of_kind(self, kind: str) -> Deviation | None:
        found = [v for k, v in self.deviations.items() if _kind_of(k) == kind]
        if found:
            return min(found, key=lambda deviation: deviation.place or 0)
        return next((self._now(item) for item in self.differing if _kind_of(item) == kind), None)

    def _first(self) -> Deviation:
        """The weightiest deviation, for a cause that does not depend on it."""
        for kind in ("batch", "weight", *ORDER, "gradient"):
            if kind not in ("value", "module") and (found := self._of_kind(kind)) is not None:
                return found
        if self.differing:
            return self._now(self.differing[0])
        return next(iter(self.deviations.values()))

    def _now(self, item: str) -> Deviation:
        expected, found = self.expected.items.get(item, MISSING), MISSING
        if self.update is not None:
            found = self.update.items.get(item, MISSING)
            if item == "batch":
                expected, found = map(self._batch_leaf, (self.expected, self.update))
        return Deviation(item, self.place, self.attempt.after, expected, found)

    def _batch_leaf(self, update: UpdateRecord) -> Leaf:
        if not update.batches:
            return ["no batch", None, 1]
        text = f"number {update.batches[-1]['at'] + 1} of its pass"
        places = self.reference.places_of_batch(update.batches[-1])
        if places:
            nearest = min(places, key=lambda place: abs(place - self.place))
            text += f", that of step {nearest + 1}"
        return [text, None, 1]

    def _judge_batch(self, update: UpdateRecord) -> Deviation:
        batch = self._now("batch")
        if not update.batches:
            return batch.because("data-position-lost")
        expected, found = self.expected.batches[-1], update.batches[-1]
        places = self.reference.places_of_batch(found)
        is_near = self.place - 1 in places or self.place + 1 in places
        if self.attempt.since_start == 0 and is_near:
            is_start = found["at"] == 0 and expected["at"] == 1
            # By other counters than that of its pass: whether the script counts another step, too.
            offsets = [offset for value, offset in self._step_counters() if value != found["at"]]
            is_lost = is_start and (not offsets or 0 in offsets)
            return batch.because("data-position-lost" if is_lost else "off-by-one-step")
        if found["indices"] is not None and found["indices"] == expected["indices"] and not places:
            is_reseeded = bool(found["workers"])
            return batch.because("workers-reseeded" if is_reseeded else "generator-not-restored")
        generator = self._generator()
        if generator is not None and found["at"] == expected["at"]:
            return generator.because("generator-not-restored")  # the right place in another order
        is_lost = bool(places) or found["at"] != expected["at"]
        return batch.because("data-position-lost" if is_lost else "generator-not-restored")

    def _neighbours(self) -> list[UpdateRecord]:
        """The undisturbed updates before and after the first one of an attempt."""
        updates, place = self.reference.updates, self.place
        if self.update is None or self.attempt.since_start or not 0 < place < len(updates) - 1:
            return []
        return [updates[place - 1], updates[place + 1]]

    def _step_counters(self) -> Iterator[tuple[int, float]]:
        """The value of each number that counts steps, and by how many steps it is off."""
        if self.update is None or not (neighbours := self._neighbours()):
            return
        known = [each.counters for each in (neighbours[0], self.expected, neighbours[1])]
        for name, value in self.update.counters.items():
            if name.startswith("len(") or not all(name in counters for counters in known):
                continue
            before, here, behind = (counters[name] for counters in known)
            if all(isinstance(number, int) for number in (value, here, before)):
                stride = here - before
                if stride and behind - here == stride:
                    yield int(value), (value - here) / stride

    def _has_value_of_a_neighbour(self) -> bool:
        """Whether a tensor of the script, such as a batch cut by hand, is that of the next step."""
        return any(
            item.startswith("value/")
            and item in self.deviations
            and near.items.get(item, MISSING)[0] == leaf[0]
            for near in self._neighbours()
            for item, leaf in (self.update.items if self.update else {}).items()
        )


def is_in_use(item: str, leaf: Leaf) -> bool:
    """Whether it is a generator that was drawn from or seeded."""
    return item.startswith("generator/") and leaf[0] != "untouched"


def judge_repeat(first: RankHistory, again: RankHistory) -> Deviation | None:
    """The first thing in which two undisturbed runs differ; None if they are the same."""
    for place, (one, other) in enumerate(zip(first.updates, again.updates, strict=False)):
        kinds: dict[str, str] = {}
        for item in unlike(one.items, other.items):
            if _kind_of(item) != "generator" or is_in_use(item, one.items[item]):
                kinds.setdefault(_kind_of(item), item)
        is_other_batch = one.batch_hashes != other.batch_hashes
        if not is_other_batch and not kinds.keys() & {"weight", "setting", "gradient", "moment"}:
            continue
        cause = "nondeterministic-kernels"
        if {k: first.seeds.get(k) for k in again.seeds} != again.seeds:
            cause = "time-or-pid-in-seed"
        elif "generator" in kinds or ("weight" in kinds and place == 0):
            cause = "unseeded-generator"
        elif is_other_batch or any(
            _is_other_data(item, one.items[item], other.items[item])
            for item in unlike(one.items, other.items)
        ):
            cause = "data-order-not-fixed"
        kind = next((k for k in ("weight", *ORDER, "generator", "gradient") if k in kinds), "batch")
        item = "batch" if is_other_batch and "weight" not in kinds else kinds.get(kind, "batch")
        leaves = [one.items.get(item, MISSING), other.items.get(item, MISSING)]
        if item == "batch":
            leaves = [["".join(each.batch_hashes)[:16], None, 0] for each in (one, other)]
        return Deviation(item, place, None, *leaves, cause=cause)
    counts = len(first.updates), len(again.updates)
    if counts[0] != counts[1]:
        leaves = [[f"{count}", count, 1] for count in counts]
        return Deviation("number of steps", min(counts), None, *leaves, cause="unknown")
    for place, (key, items) in enumerate(first.boundaries.items()):
        found = again.boundaries.get(key, {})
        differing = unlike(items, found)
        state = [item for item in differing if not item.startswith(("metric/", "generator/"))]
        if state:
            is_random = any(item.startswith("generator/") for item in differing)
            cause = "unseeded-generator" if is_random or place == 0 else "nondeterministic-kernels"
            return Deviation(state[0], place, None, items[state[0]], found[state[0]], cause=cause)
    return None


def _is_other_data(item: str, one: Leaf, other: Leaf) -> bool:
    """Whether two tensors that differ are not even nearly the same."""
    if item.startswith("index/"):
        return True
    if not item.startswith("value/") or one[1] is None or other[1] is None:
        return False
    return bool(abs(one[1] - other[1]) > _ROUNDING * max(abs(one[1]), abs(other[1])))


def volatile_items(first: RankHistory, again: RankHistory) -> frozenset[str]:
    """What differs between two undisturbed runs without consequence, such as a time."""
    found = unlike(first.end, again.end)
    for one, other in zip(first.updates, again.updates, strict=False):
        found += [*unlike(one.items, other.items), *unlike(one.numbers, other.numbers)]
    for key, items in first.boundaries.items():
        found += unlike(items, again.boundaries.get(key, {}))
    return frozenset(found)


#: Each cause with its sentence and its remedy. The words on the left never change.
CAUSES: dict[str, tuple[str, str]] = {
    "scheduler-not-saved": (
        "The scheduler starts over after the restart while the weights continue: it is not saved.",
        "Save scheduler.state_dict() in the checkpoint and load it before the loop.",
    ),
    "data-position-lost": (
        "The data goes on at another place after the restart: samples are repeated or left out.",
        "Save how many batches of the epoch are used and skip them; run.batches(loader) does it.",
    ),
    "generator-not-restored": (
        "A random generator is not in the state that it had, so it draws other numbers.",
        "Save and restore the generators in use: torch, numpy, random, CUDA, and of Keras layers.",
    ),
    "scaler-not-saved": (
        "The gradient scaler begins with its first scale again: it is not saved.",
        "Save scaler.state_dict() in the checkpoint and load it.",
    ),
    "ema-not-saved": (
        "A moving average or another copy of the weights starts over: it is not saved.",
        "Save the averaged or copied weights in the checkpoint and load them.",
    ),
    "off-by-one-step": (
        "One step is made twice or left out: its number and the weights were not saved together.",
        "Save the number of completed steps together with the weights, and begin with that one.",
    ),
    "torn-checkpoint": (
        "The process died while it wrote the checkpoint, and only the incomplete file is left.",
        "Write to a temporary file, flush it to disk, and rename it over the old one.",
    ),
    "workers-reseeded": (
        "The samples are right, but the loader's workers draw other random numbers for them.",
        "Seed each sample from (epoch, index), or restore the generator that seeds the workers.",
    ),
    "optimizer-state-lost": (
        "The optimizer's moments start over after the restart: they are not restored.",
        "Save optimizer.state_dict() and load it after the model; name it in tf.train.Checkpoint.",
    ),
    "saved-in-mid-step": (
        "A signal handler wrote the checkpoint within a step: half before the update, half after.",
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
        "The training ends at another step: what decides its end, such as patience, differs.",
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
        "Something that the run does not know of starts over: this, or what it is made from.",
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
        "It does not end as the given run: by the interruptions, or by other options or code.",
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
        "Equal weights, batch and random numbers give other gradients, as kernels do that add up "
        "in no fixed order.",
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
