"""From what differs to the likely cause: by the states alone, never by the script's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast._prove.history import History, Leaf, Sight

# Of what differs at once, what comes first decides the rest.
_ORDER = ("moment", "scheduler", "scaler", "setting", "weight", "module", "value", "buffer")
_COUNTS_IN_THE_END = ("weight", "moment", "setting", "scheduler", "scaler", "buffer")
_ROUNDING = 0.003  # what is closer than that is the same sum, added up in another order
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


def judge(case: Case) -> Judged:
    """The first thing that differs, and why."""
    if case.saved_in_handler and case.since_start <= 1:
        return Judged(_first(case), "saved-in-mid-step")
    if "batch" in case.differing and case.sight is not None:
        return _judge_batch(case, case.sight)
    offset = _counter_offset(case)
    generator = next((v for k, v in case.latent.items() if _is_in_use(k, v.expected)), None)
    for kind in _ORDER:
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
        if kind == "value" and generator is not None and _is_anew(case, generator):
            continue  # it was drawn anew
        return Judged(found, _cause_of(case, found))
    if offset or _value_offset(case):
        return Judged(_first(case), "off-by-one-step")
    if generator is not None:
        return Judged(generator, "generator-not-restored")
    number = _number_anew(case)
    if number is not None:
        return Judged(number, "state-not-named" if case.has_run else "state-not-saved")
    return Judged(_first(case), "unknown")


def _judge_setting(case: Case, latent: Latent) -> str:
    """A rate without a scheduler that differs: set by hand, or not set again."""
    if case.has_run:
        return "state-not-named"
    scheduled = any(item.startswith("scheduler/") for item in case.expected.items)
    return "scheduler-not-saved" if scheduled and _is_anew(case, latent) else "setting-differs"


def _number_anew(case: Case) -> Latent | None:
    """A number of the script that has its first value again."""
    if case.sight is None or case.since_start:
        return None
    first, here = case.reference.sights[0].counters, case.expected.counters
    for name, value in case.sight.counters.items():
        if name in here and first.get(name) == value != here[name]:
            leaves = [[repr(number), float(number), 1] for number in (here[name], value)]
            return Latent(f"number/{name}", case.place, case.after, *leaves)
    return None


def _is_in_use(item: str, leaf: Leaf | None) -> bool:
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
    for kind in ("batch", "weight", *_ORDER, "gradient"):
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
        if not (name in before and name in here and name in behind):
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


def judge_repeat(first: History, again: History) -> Judged | None:
    """The first thing in which two undisturbed runs differ; None if they are the same."""
    for place, (one, other) in enumerate(zip(first.sights, again.sights, strict=False)):
        kinds = {
            kind: item
            for item, leaf in reversed(list(one.items.items()))
            if (kind := item.partition("/")[0])
            and item in other.items
            and other.items[item][0] != leaf[0]
            and (kind != "generator" or _is_in_use(item, leaf))
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
        kind = next(
            (k for k in ("weight", *_ORDER, "generator", "gradient") if k in kinds), "batch"
        )
        item = "batch" if batch and "weight" not in kinds else kinds.get(kind, "batch")
        leaves = [one.items.get(item), other.items.get(item)]
        if item == "batch":
            hashes = [[b["bytes"] for b in sight.batches] for sight in (one, other)]
            leaves = [["".join(found)[:16], None, 0] for found in hashes]
        return Judged(Latent(item, place, None, *leaves), cause)
    counts = len(first.sights), len(again.sights)
    if counts[0] != counts[1]:
        latent = Latent("number of steps", min(counts), None, *([f"{n}", n, 1] for n in counts))
        return Judged(latent, "unknown")
    return _judge_repeated_boundaries(first, again)


def _is_other_data(item: str, one: Leaf, other: Leaf) -> bool:
    """Whether two tensors are not even nearly the same."""
    if item.startswith("index/"):
        return bool(one[0] != other[0])
    if one[0] == other[0] or one[1] is None or other[1] is None:
        return False
    return bool(abs(one[1] - other[1]) > _ROUNDING * max(abs(one[1]), abs(other[1])))


def _judge_repeated_boundaries(first: History, again: History) -> Judged | None:
    for place, (key, items) in enumerate(first.boundaries.items()):
        other = again.boundaries.get(key, {})
        differing = {i for i, leaf in items.items() if i in other and other[i][0] != leaf[0]}
        state = [i for i in items if i in differing and not i.startswith(("metric/", "generator/"))]
        if not state:
            continue
        is_random = any(item.startswith("generator/") for item in differing)
        cause = "unseeded-generator" if is_random or place == 0 else "nondeterministic-kernels"
        return Judged(Latent(state[0], place, None, items[state[0]], other[state[0]]), cause)
    return None


def volatile_items(first: History, again: History) -> frozenset[str]:
    """What differs between two undisturbed runs without consequence, such as a time."""
    found = set()
    pairs = [(a.items, b.items) for a, b in zip(first.sights, again.sights, strict=False)]
    pairs += [(v, again.boundaries.get(k, {})) for k, v in first.boundaries.items()]
    pairs += [(first.end or {}, again.end or {})]
    for one, other in pairs:
        found |= {i for i, leaf in one.items() if i in other and other[i][0] != leaf[0]}
    return frozenset(found)
