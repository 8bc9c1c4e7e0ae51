"""Compares an interrupted training with the undisturbed one, update by update.

Some values decide an update and must be equal at once: weights, rates, batches, gradients. Others
may differ without consequence, for a while or for good. They are remembered as deviations, and
count when a deciding value differs later, or when they still differ at the end.
"""

from __future__ import annotations

from holdfast._tools.prove.causes import (
    Deviation,
    DeviationCase,
    Items,
    JudgedDeviation,
    Leaf,
    RankHistory,
    UpdateRecord,
    cause_of,
    counts_in_the_end,
    judge,
    renumber,
    weights_key,
)

DECIDES = ("weight", "setting", "gradient")
_MOST_NOTES = 3


class RankComparison:
    """One rank of an interrupted training, over all its attempts."""

    def __init__(self, reference: RankHistory, volatile: frozenset[str] = frozenset()) -> None:
        self._reference = reference
        self._volatile = volatile
        self._deviations: dict[str, Deviation] = {}
        self._after: int | None = None
        self._expected_start = 0
        self._saved_in_handler = False
        self._since_start = 0
        self._numbers: dict[int, int] = {}  # of optimizers: in this attempt, and undisturbed
        self._passed: set[str] = set()  # boundaries, in all attempts
        self.notes: list[str] = []
        self.finding: JudgedDeviation | None = None
        self.started_at: int | None = None  # of this attempt
        self.place = 0  # updates of the undisturbed run that this attempt has made
        self.reached = 0  # the furthest place of all attempts

    def begin_attempt(self, after: int | None, expected_start: int, saved_in_handler: bool) -> None:
        self._after = after
        self._expected_start = expected_start
        self._saved_in_handler = saved_in_handler
        self._since_start = 0
        self._numbers.clear()
        self.started_at = None

    def compare_update(self, update: UpdateRecord) -> None:
        known = self._reference.updates
        if self.started_at is None:
            self.started_at = self.place = self._align(update)
        place, self.place = self.place, self.place + 1
        self.reached = max(self.reached, place)
        if self.finding is None and place < len(known):
            self._numbers.setdefault(update.optimizer, known[place].optimizer)
            self._compare(update.renumbered(self._numbers), known[place], place)
        self._since_start += 1

    def compare_boundary(self, key: str, step: int, items: Items) -> None:
        self._passed.add(key)
        expected = self._reference.boundaries.get(key)
        if expected is None or self.finding is not None:
            return
        for item, leaf in expected.items():
            found = items.get(item)
            if item in self._volatile or item.startswith("input/"):
                continue  # an input only hints at the cause
            if found is None or found[0] != leaf[0]:
                cause = "metric-differs" if item.startswith("metric/") else "state-not-named"
                case = self._case(None, max(0, self.place - 1), [item])
                finding = judge(case) if case is not None else None
                if finding is None or finding.cause == "unknown":
                    finding = self._boundary_finding(item, step, expected, items, cause)
                self.finding = finding
                return

    def _boundary_finding(
        self, item: str, step: int, expected: Items, items: Items, cause: str
    ) -> JudgedDeviation:
        """The run restores its state, so the cause is a value that was not given to it."""
        others = [i for i, leaf in expected.items() if items.get(i, [None])[0] != leaf[0]]
        held = [i for i in others if i.startswith("input/") and i in items]
        item = (held or [item])[0]
        others = sorted(i for i in others if i != item and i not in self._volatile)
        leaves = expected[item], items.get(item)
        return JudgedDeviation(item, step, self._after, *leaves, cause, others=tuple(others))

    def finish(self, end: Items | None) -> None:
        """The script is over: it must have made all steps, and its end be the same."""
        if self.finding is not None:
            return
        total = len(self._reference.updates)
        missing = self._reference.boundaries.keys() - self._passed
        if missing:
            here = [f"{len(self._passed)} boundaries", None, 1]
            there = [f"{len(self._reference.boundaries)} boundaries", None, 1]
            at = len(self._passed)
            self._find_count(at, there, here, "other-number-of-steps")
            return
        if self.started_at is not None and self.place != total:
            found = [f"{self.place} steps", self.place, 1]
            is_one_off = abs(self.place - total) == 1
            cause = "off-by-one-step" if is_one_off else "other-number-of-steps"
            at = min(self.place, total)
            self._find_count(at, [f"{total} steps", total, 1], found, cause)
            return
        renumbered = renumber(end or {}, self._numbers)
        for item, leaf in (self._reference.end or {}).items():
            other = renumbered.get(item)
            if other is None or item in self._volatile or other[0] == leaf[0]:
                continue
            deviation = self._deviations.get(item) or Deviation(
                item, total, self._after, leaf, other
            )
            case = self._case(None, total - 1, [])
            if case is not None and counts_in_the_end(case, deviation):
                self.finding = deviation.because(cause_of(case, deviation))
                return
            if item in self._deviations and leaf[2] > 1 and len(self.notes) < _MOST_NOTES:
                name = self._reference.display(item)
                self.notes.append(
                    f"{name} is not as undisturbed in the end, since interruption "
                    f"{deviation.after}; nothing else is, so it may be for display only."
                )

    def suspect(self) -> JudgedDeviation | None:
        """A deviation of some attempt that was never seen to be right again."""
        case = self._case(None, len(self._reference.updates) - 1, [])
        for deviation in self._deviations.values():
            if case is not None and counts_in_the_end(case, deviation):
                self.finding = deviation.because(cause_of(case, deviation))
                return self.finding
        return None

    def _align(self, update: UpdateRecord) -> int:
        """Where in the undisturbed run this attempt begins."""
        reference = self._reference
        places = reference.by_weights.get(weights_key(update), [])
        if update.boundary_id is not None and update.boundary_id in reference.by_boundary_id:
            marked = reference.by_boundary_id[update.boundary_id]
            return next((place for place in marked if place in places), marked[0])
        if not places:
            return min(self._expected_start, max(0, len(reference.updates) - 1))

        def likeness(place: int) -> tuple[int, int]:
            items = reference.updates[place].items
            equal = sum(items.get(k, [None])[0] == v[0] for k, v in update.items.items())
            return equal, -abs(place - self._expected_start)

        return max(places, key=likeness)

    def _compare(self, update: UpdateRecord, expected: UpdateRecord, place: int) -> None:
        differing = []
        for item, leaf in expected.items.items():
            kind, found = item.partition("/")[0], update.items.get(item)
            is_unseen = found is None and (kind != "moment" or update.is_unbuilt)
            if item in self._volatile or is_unseen:
                continue
            if found is not None and found[0] == leaf[0]:
                self._deviations.pop(item, None)
            elif kind in DECIDES:
                differing.append(item)
            elif item not in self._deviations:
                self._deviations[item] = Deviation(item, place, self._after, leaf, found)
        if self._since_start == 0:
            self._record_numbers(update, expected, place)
        if not same_batches(update, expected, is_first=self._since_start == 0):
            differing.append("batch")
        if differing:
            case = self._case(update, place, differing)
            if case is not None:
                self.finding = judge(case)

    def _record_numbers(self, update: UpdateRecord, expected: UpdateRecord, place: int) -> None:
        """The script's numbers that differ at the first update of an attempt."""
        numbers = update.numbers
        for item, leaf in expected.numbers.items():
            found = numbers.get(item)
            self._deviations.pop(item, None)
            if found is not None and found[0] != leaf[0] and item not in self._volatile:
                self._deviations[item] = Deviation(item, place, self._after, leaf, found)

    def _case(
        self, update: UpdateRecord | None, place: int, differing: list[str]
    ) -> DeviationCase | None:
        known = self._reference.updates
        if not known:
            return None
        return DeviationCase(
            reference=self._reference,
            update=update,
            place=min(place, len(known) - 1),
            differing=differing,
            deviations=self._deviations,
            after=self._after,
            since_start=self._since_start,
            saved_in_handler=self._saved_in_handler,
        )

    def _find_count(self, place: int, expected: Leaf, found: Leaf, cause: str) -> None:
        self.finding = Deviation("number of steps", place, self._after, expected, found).because(
            cause
        )


def same_batches(update: UpdateRecord, expected: UpdateRecord, *, is_first: bool) -> bool:
    """Whether the batches for an update are the same, not counting those skipped before it.

    In the first update of an attempt, batches may be missing that were for no update.
    """
    count = len(expected.batches)
    if is_first and update.batches:
        count = min(count, len(update.batches))
    if not count:
        return True
    wanted = expected.batches[-count:]
    return [b["bytes"] for b in update.batches[-count:]] == [b["bytes"] for b in wanted]
