"""From what differs to the likely cause: by the states alone, never by the script's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast._tools.prove.history import History, Leaf, Sight

# Of what differs at once, what comes first decides the rest.
ORDER = ("moment", "scheduler", "scaler", "setting", "weight", "module", "value", "buffer")
_COUNTS_IN_THE_END = ("weight", "moment", "setting", "scheduler", "scaler", "buffer")
_OF_TENSORS = 3  # the weight of a container that holds tensors
_CAUSE_OF_KIND = {
    "moment": "optimizer-state-lost",
    "scheduler": "scheduler-not-saved",
    "scaler": "scaler-not-saved",
    "buffer": "buffers-not-saved",
    "module": "state-not-saved",
    "value": "state-not-saved",
}


@dataclass(frozen=True)
class Latent:
    """Something that differs, since when, and after which interruption."""

    item: str
    place: int | None
    after: int | None
    expected: Leaf | None
    found: Leaf | None


@dataclass(frozen=True)
class Case:
    """All that is known when something that decides an update differs."""

    reference: History
    sight: Sight | None
    place: int  # of the update, in the undisturbed run
    differing: list[str]
    latent: Mapping[str, Latent]
    after: int | None
    since_start: int  # updates of this life before it
    saved_in_handler: bool  # the checkpoint that this life began with

    @property
    def expected(self) -> Sight:
        return self.reference.sights[self.place]

    @property
    def has_run(self) -> bool:
        return self.expected.mark is not None


@dataclass(frozen=True)
class Judged:
    item: Latent
    cause: str
    is_ambiguous: bool = False
    others: tuple[str, ...] = ()  # where the cause is not sure: all else that differs


def judge(case: Case) -> Judged:
    """The first thing that differs, and why."""
    if case.saved_in_handler and case.since_start <= 1:
        return Judged(_first(case), "saved-in-mid-step")
    if "batch" in case.differing and case.sight is not None:
        return _judge_batch(case, case.sight)
    offset = _counter_offset(case)
    generator = next((v for k, v in case.latent.items() if is_in_use(k, v.expected)), None)
    for kind in ORDER:
        found = _of_kind(case, kind)
        if found is None:
            continue
        if kind in ("setting", "weight") and offset:
            return Judged(_first(case), "off-by-one-step")
        if kind == "setting":
            return Judged(found, _judge_setting(case, found))
        if kind == "weight":
            return Judged(found, "weights-not-restored" if case.since_start == 0 else "unknown")
        if kind in ("module", "value", "buffer") and not _counts(case, found):
            continue
        if kind == "buffer" and (number := _number_beside(case, found)) is not None:
            return _unsure(case, number, _cause_of_number(case))
        if kind == "value" and generator is not None and _is_anew(case, generator):
            continue  # it was drawn anew
        return Judged(found, _cause_of(case, found))
    if offset:
        return Judged(_first(case), "off-by-one-step")
    held = _held_input(case, generator)
    if held is not None:
        return Judged(held, _cause_of_number(case))
    if _value_offset(case):
        return Judged(_first(case), "off-by-one-step")
    numbers = _numbers_anew(case)
    # A container that is filled again draws on the way: the generator is not where it was, then.
    is_filled_again = bool(numbers) and _weight_of_number(case, numbers[0]) == _OF_TENSORS
    if generator is not None and (_is_anew(case, generator) or not is_filled_again):
        return Judged(generator, "generator-not-restored")
    if numbers:
        return _unsure(case, numbers[0], _cause_of_number(case))
    return _unsure(case, _first(case), "unknown")


def _unsure(case: Case, latent: Latent, cause: str) -> Judged:
    others = [item for item in (*case.latent, *case.differing) if item != latent.item]
    return Judged(latent, cause, others=tuple(sorted(others, key=_by_weight)))


def _by_weight(item: str) -> int:
    kinds = ("input", "number", "value", "index", "generator", "module", "buffer")
    kind = item.partition("/")[0]
    return kinds.index(kind) if kind in kinds else len(kinds)


def _cause_of_number(case: Case) -> str:
    return "state-not-named" if case.has_run else "state-not-saved"


def _held_input(case: Case, generator: Latent | None) -> Latent | None:
    """An input of the model that the script held from an earlier step, such as a hidden state.

    It is one of the undisturbed run, and of another step. Where it is that of the next step, it
    was drawn before the checkpoint, and was drawn again: then the generator is one further.
    """
    if case.since_start:
        return None
    sights = case.reference.sights
    for latent in _inputs(case):
        found = None if latent.found is None else latent.found[0]
        places = [p for p, s in enumerate(sights) if s.items.get(latent.item, [None])[0] == found]
        is_next = case.place + 1 in places
        is_beside = is_next or case.place - 1 in places
        if generator is not None and is_next and not _is_anew(case, generator):
            return latent
        if generator is None and places and (0 in places or not is_beside):
            return latent
    return None


def _inputs(case: Case) -> list[Latent]:
    return [
        latent
        for item, latent in case.latent.items()
        if item.startswith("input/") and latent.place == case.place
    ]


def _judge_setting(case: Case, latent: Latent) -> str:
    """A rate without a scheduler that differs: set by hand, or not set again."""
    if case.has_run:
        return "state-not-named"
    scheduled = any(item.startswith("scheduler/") for item in case.expected.items)
    return "scheduler-not-saved" if scheduled and _is_anew(case, latent) else "setting-differs"


def _numbers_anew(case: Case) -> list[Latent]:
    """The numbers of the script that have their first value again, the likeliest cause first."""
    first = case.reference.sights[0].counters
    found = [
        latent
        for item, latent in case.latent.items()
        if item.startswith("number/")
        and latent.found is not None
        and repr(first.get(item.removeprefix("number/"))) == latent.found[0]
    ]
    return sorted(found, key=lambda latent: -_weight_of_number(case, latent))


def _weight_of_number(case: Case, latent: Latent) -> int:
    """How likely a number decides an update; one that only counts decides nothing."""
    name = latent.item.removeprefix("number/")
    inside = name.removeprefix("len(").removesuffix(")")
    if name != inside:  # of a container: it counts if tensors are in it
        return _OF_TENSORS if any(f"/{inside}[" in item for item in case.latent) else 0
    assert latent.expected is not None
    assert latent.found is not None
    for other in _inputs(case):
        if other.expected is not None and other.found is not None:
            # The size of what goes into the model has changed as the number has.
            sizes, numbers = (
                (other.expected[2], other.found[2]),
                (latent.expected[1], latent.found[1]),
            )
            if sizes[0] != sizes[1] and sizes[0] * numbers[1] == sizes[1] * numbers[0]:
                return 2
    return 1


def _number_beside(case: Case, buffer: Latent) -> Latent | None:
    """A number of the buffer's module that is not restored, while the buffer is."""
    if _is_anew(case, buffer):
        return None
    module = buffer.item.removeprefix("buffer/").rpartition(".")[0]
    names = (
        latent.item.removeprefix("number/").rpartition(".")[0] for latent in _numbers_anew(case)
    )
    return next(
        (n for n, name in zip(_numbers_anew(case), names, strict=True) if name == module), None
    )


def is_in_use(item: str, leaf: Leaf | None) -> bool:
    """Whether it is a generator that somebody has drawn from or seeded."""
    return item.startswith("generator/") and leaf is not None and leaf[0] != "untouched"


def judge_end(case: Case | None, latent: Latent) -> str:
    """The cause of something that differs in the end though the training went the same way."""
    if case is None:
        return "unknown"
    return _cause_of(case, latent)


def _cause_of(case: Case, latent: Latent) -> str:
    kind = latent.item.partition("/")[0]
    if case.has_run and kind in _CAUSE_OF_KIND:
        return "state-not-named"
    if kind in ("module", "value") and _is_average(case, latent):
        return "ema-not-saved"
    if kind == "scheduler" and _is_of_the_step_before(case, latent):
        return "off-by-one-step"
    return _CAUSE_OF_KIND.get(kind, "unknown")


def counts_in_the_end(case: Case, latent: Latent) -> bool:
    """Whether something is a difference by itself, though the training went the same way.

    A copy of weights, made to be saved or evaluated, is none; nor are other tensors, which as
    a rule are for display, unless they are an average of the weights.
    """
    kind = latent.item.partition("/")[0]
    if kind not in ("module", "value"):
        return kind in _COUNTS_IN_THE_END
    if latent.expected is None or latent.expected[0] in case.reference.weights:
        return False
    return kind == "module" or (latent.expected[2] > 1 and _is_average(case, latent))


def _is_of_the_step_before(case: Case, latent: Latent) -> bool:
    if not latent.place or latent.found is None or _is_anew(case, latent):
        return False
    before = case.reference.sights[latent.place - 1].items.get(latent.item)
    return before is not None and before[0] == latent.found[0]


def _is_average(case: Case, latent: Latent) -> bool:
    """Whether it is like a copy of weights: it was made anew from them, or from the first ones."""
    sights = case.reference.sights
    if latent.place is None or latent.found is None:
        return False
    weights = {
        leaf[0]
        for place in {0, min(latent.place, len(sights) - 1), max(0, latent.place - 1)}
        for item, leaf in sights[place].items.items()
        if item.startswith(("weight/", "module/"))
    }
    first = sights[0].items.get(latent.item)
    return latent.found[0] in weights or (first is not None and first[0] in weights)


def _counts(case: Case, latent: Latent) -> bool:
    """Whether a tensor that differs can be the cause: one that the same step made cannot."""
    if latent.place is None or latent.place < case.place:
        return not latent.item.startswith("value/") or _is_anew(case, latent)
    if latent.item.startswith("module/"):
        return case.since_start == 0
    return not latent.item.startswith("buffer/") and _is_anew(case, latent)


def _is_anew(case: Case, latent: Latent) -> bool:
    """Whether it has the value with which the undisturbed run began."""
    first = case.reference.sights[0].items.get(latent.item)
    return first is not None and latent.found is not None and first[0] == latent.found[0]


def _of_kind(case: Case, kind: str) -> Latent | None:
    found = [v for k, v in case.latent.items() if k.startswith(f"{kind}/")]
    if found:
        return min(found, key=lambda latent: latent.place or 0)
    item = next((i for i in case.differing if i.partition("/")[0] == kind), None)
    return None if item is None else _now(case, item)


def _first(case: Case) -> Latent:
    """What differs, for a cause that is not told by it: the weightiest."""
    for kind in ("batch", "weight", *ORDER, "gradient"):
        found = _of_kind(case, kind) if kind not in ("value", "module") else None
        if found is not None:
            return found
    if case.differing:
        return _now(case, case.differing[0])
    return next(iter(case.latent.values()))


def _now(case: Case, item: str) -> Latent:
    expected = case.expected.items.get(item)
    found = None if case.sight is None else case.sight.items.get(item)
    if item == "batch" and case.sight is not None:
        expected, found = _batch_leaf(case, case.expected), _batch_leaf(case, case.sight)
    return Latent(item, case.place, case.after, expected, found)


def _batch_leaf(case: Case, sight: Sight) -> Leaf:
    if not sight.batches:
        return ["no batch", None, 1]
    last = sight.batches[-1]
    places = case.reference.by_batch.get(last["bytes"], [])
    text = f"number {last['at'] + 1} of its pass"
    if places:
        nearest = min(places, key=lambda place: abs(place - case.place))
        text += f", that of step {nearest + 1}"
    return [text, None, 1]


def _judge_batch(case: Case, sight: Sight) -> Judged:
    batch = _now(case, "batch")
    if not sight.batches:
        return Judged(batch, "data-position-lost")
    expected, found = case.expected.batches[-1], sight.batches[-1]
    places = case.reference.by_batch.get(found["bytes"], [])
    if case.since_start == 0 and (case.place - 1 in places or case.place + 1 in places):
        is_first = found["at"] == 0 and expected["at"] == 1
        return Judged(batch, "off-by-one-step", is_ambiguous=is_first)
    if found["indices"] is not None and found["indices"] == expected["indices"]:
        if found["workers"] and not places:
            return Judged(batch, "workers-reseeded")
        if not places:
            return Judged(batch, "generator-not-restored")
    generator = next((v for k, v in case.latent.items() if is_in_use(k, v.expected)), None)
    if generator is not None and found["at"] == expected["at"]:
        return Judged(generator, "generator-not-restored")  # the right place in another order
    if places or found["at"] != expected["at"]:
        return Judged(batch, "data-position-lost")
    return Judged(batch, "generator-not-restored")


def _counter_offset(case: Case) -> int:
    """-1 or 1 if a number that the script counts steps with is one off, else 0."""
    if case.sight is None or case.since_start or not 0 < case.place < _last(case):
        return 0
    sights = case.reference.sights
    before, here, behind = (sights[case.place + i].counters for i in (-1, 0, 1))
    for name, value in case.sight.counters.items():
        if name.startswith("len(") or not (name in before and name in here and name in behind):
            continue
        if not all(isinstance(number, int) for number in (value, here[name], before[name])):
            continue
        stride = here[name] - before[name]
        if (
            stride
            and behind[name] - here[name] == stride
            and abs(value - here[name]) == abs(stride)
        ):
            return int(value - here[name]) // int(stride)
    return 0


def _value_offset(case: Case) -> bool:
    """Whether a tensor of the script, such as a batch cut by hand, is that of the next step."""
    if case.sight is None or case.since_start or not 0 < case.place < _last(case):
        return False
    for item, leaf in case.sight.items.items():
        if not item.startswith("value/") or item not in case.latent:
            continue
        for place in (case.place - 1, case.place + 1):
            beside = case.reference.sights[place].items.get(item)
            if beside is not None and beside[0] == leaf[0]:
                return True
    return False


def _last(case: Case) -> int:
    return len(case.reference.sights) - 1
