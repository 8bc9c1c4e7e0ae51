"""Follows an interrupted training along the undisturbed one, sight by sight.

Some things decide an update and must be equal at once: weights, rates, batches, gradients. Others
may differ without consequence for a while, or for good: they are remembered, and count when
something that decides differs later, or when they still differ in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast._tools.prove.causes import Case, Judged, Latent, counts_in_the_end, judge, judge_end
from holdfast._tools.prove.history import History, Items, Leaf, Sight, renumber, weights_key

DECIDES = ("weight", "setting", "gradient")
_MOST_NOTES = 3


@dataclass(frozen=True)
class Finding:
    """The first thing that differs, with its cause."""

    item: str
    step: int | None
    after: int | None
    expected: Leaf | None
    found: Leaf | None
    cause: str
    is_ambiguous: bool = False  # another interruption may tell more
    others: tuple[str, ...] = ()  # where the cause is not sure: all else that differs


class Trail:
    """One rank of an interrupted training, over all its lives."""

    def __init__(self, reference: History, volatile: frozenset[str] = frozenset()) -> None:
        self._reference = reference
        self._volatile = volatile
        self._latent: dict[str, Latent] = {}
        self._after: int | None = None
        self._expected_start = 0
        self._saved_in_handler = False
        self._since_start = 0
        self._numbers: dict[int, int] = {}  # of optimizers: in this life, and undisturbed
        self._passed: set[str] = set()  # boundaries, in all lives
        self.notes: list[str] = []
        self.finding: Finding | None = None
        self.started_at: int | None = None  # of this life
        self.place = 0  # updates of the undisturbed run that are made
        self.reached = 0  # the furthest place of all lives

    def begin_life(self, after: int | None, expected_start: int, saved_in_handler: bool) -> None:
        self._after = after
        self._expected_start = expected_start
        self._saved_in_handler = saved_in_handler
        self._since_start = 0
        self._numbers.clear()
        self.started_at = None

    def see(self, sight: Sight) -> None:
        """Compare what decides the next update."""
        known = self._reference.sights
        if self.started_at is None:
            self.started_at = self.place = self._align(sight)
        place, self.place = self.place, self.place + 1
        self.reached = max(self.reached, place)
        if self.finding is None and place < len(known):
            self._numbers.setdefault(sight.optimizer, known[place].optimizer)
            self._compare(sight.renumbered(self._numbers), known[place], place)
        self._since_start += 1

    def see_boundary(self, key: str, step: int, items: Items) -> None:
        """Compare a boundary of a run of holdfast, which knows its own step."""
        self._passed.add(key)
        expected = self._reference.boundaries.get(key)
        if expected is None or self.finding is not None:
            return
        for item, leaf in expected.items():
            found = items.get(item)
            if item in self._volatile or item.startswith("input/"):
                continue  # what went in is a sign of the cause, and no difference by itself
            if found is None or found[0] != leaf[0]:
                cause = "metric-differs" if item.startswith("metric/") else "state-not-named"
                case = self._case(None, max(0, self.place - 1), [item])
                judged = judge(case) if case is not None else None
                if judged is not None and judged.cause != "unknown":
                    self._find_judged(judged)
                else:
                    self._find_at_boundary(item, step, expected, items, cause)
                return

    def _find_at_boundary(
        self, item: str, step: int, expected: Items, items: Items, cause: str
    ) -> None:
        """What is in the state was given to the run: behind it is something that was not."""
        others = [i for i, leaf in expected.items() if items.get(i, [None])[0] != leaf[0]]
        held = [i for i in others if i.startswith("input/") and i in items]
        item = (held or [item])[0]
        others = sorted(i for i in others if i != item and i not in self._volatile)
        found = items.get(item)
        self._find(item, step - 1, expected[item], found, cause, tuple(others))

    def finish(self, end: Items | None) -> None:
        """The script is over: all of it must have been trained, and the end be the same."""
        if self.finding is not None:
            return
        total = len(self._reference.sights)
        missing = self._reference.boundaries.keys() - self._passed
        if missing:
            here = [f"{len(self._passed)} boundaries", None, 1]
            there = [f"{len(self._reference.boundaries)} boundaries", None, 1]
            at = len(self._passed)
            self._find("number of steps", at, there, here, "other-number-of-steps")
            return
        if self.started_at is not None and self.place != total:
            found = [f"{self.place} steps", self.place, 1]
            is_one_off = abs(self.place - total) == 1
            cause = "off-by-one-step" if is_one_off else "other-number-of-steps"
            at = min(self.place, total)
            self._find("number of steps", at, [f"{total} steps", total, 1], found, cause)
            return
        renumbered = renumber(end or {}, self._numbers)
        for item, leaf in (self._reference.end or {}).items():
            other = renumbered.get(item)
            if other is None or item in self._volatile or other[0] == leaf[0]:
                continue
            latent = self._latent.get(item) or Latent(item, total, self._after, leaf, other)
            case = self._case(None, total - 1, [])
            if case is not None and counts_in_the_end(case, latent):
                self._find_judged(Judged(latent, judge_end(case, latent)))
                return
            if item in self._latent and leaf[2] > 1 and len(self.notes) < _MOST_NOTES:
                name = self._reference.display(item)
                self.notes.append(
                    f"{name} is not as undisturbed in the end, since interruption {latent.after}; "
                    "nothing else is, so it may be for display only."
                )

    def suspect(self) -> Finding | None:
        """What began anew in some life and was not seen to be right again, if anything."""
        case = self._case(None, len(self._reference.sights) - 1, [])
        for latent in self._latent.values():
            if case is not None and counts_in_the_end(case, latent):
                self._find_judged(Judged(latent, judge_end(case, latent)))
                return self.finding
        return None

    def _align(self, sight: Sight) -> int:
        """Where in the undisturbed run this life begins."""
        reference = self._reference
        places = reference.by_weights.get(weights_key(sight), [])
        if sight.mark is not None and sight.mark in reference.by_mark:
            marked = reference.by_mark[sight.mark]
            return next((place for place in marked if place in places), marked[0])
        if not places:
            return min(self._expected_start, max(0, len(reference.sights) - 1))

        def likeness(place: int) -> tuple[int, int]:
            items = reference.sights[place].items
            equal = sum(items.get(k, [None])[0] == v[0] for k, v in sight.items.items())
            return equal, -abs(place - self._expected_start)

        return max(places, key=likeness)

    def _compare(self, sight: Sight, expected: Sight, place: int) -> None:
        differing = []
        for item, leaf in expected.items.items():
            kind, found = item.partition("/")[0], sight.items.get(item)
            is_unseen = found is None and (kind != "moment" or sight.is_unbuilt)
            if item in self._volatile or is_unseen:
                continue
            if found is not None and found[0] == leaf[0]:
                self._latent.pop(item, None)
            elif kind in DECIDES:
                differing.append(item)
            elif item not in self._latent:
                self._latent[item] = Latent(item, place, self._after, leaf, found)
        if self._since_start == 0:
            self._note_numbers(sight, expected, place)
        if not same_batches(sight, expected, is_first=self._since_start == 0):
            differing.append("batch")
        if differing:
            case = self._case(sight, place, differing)
            if case is not None:
                self._find_judged(judge(case))

    def _note_numbers(self, sight: Sight, expected: Sight, place: int) -> None:
        """The numbers of the script that are others at the first update of a life."""
        for item, leaf in expected.numbers.items():
            found = sight.numbers.get(item)
            self._latent.pop(item, None)
            if found is not None and found[0] != leaf[0] and item not in self._volatile:
                self._latent[item] = Latent(item, place, self._after, leaf, found)

    def _case(self, sight: Sight | None, place: int, differing: list[str]) -> Case | None:
        known = self._reference.sights
        if not known:
            return None
        return Case(
            reference=self._reference,
            sight=sight,
            place=min(place, len(known) - 1),
            differing=differing,
            latent=self._latent,
            after=self._after,
            since_start=self._since_start,
            saved_in_handler=self._saved_in_handler,
        )

    def _find_judged(self, judged: Judged) -> None:
        latent = judged.item
        self.finding = Finding(
            latent.item,
            None if latent.place is None else latent.place + 1,
            latent.after,
            latent.expected,
            latent.found,
            judged.cause,
            judged.is_ambiguous,
            judged.others,
        )

    def _find(
        self,
        item: str,
        place: int,
        expected: Leaf | None,
        found: Leaf | None,
        cause: str,
        others: tuple[str, ...] = (),
    ) -> None:
        self.finding = Finding(item, place + 1, self._after, expected, found, cause, others=others)


def same_batches(sight: Sight, expected: Sight, *, is_first: bool) -> bool:
    """Whether the batches for an update are the same; those that a life has skipped come before.

    In the first update of a life those may be missing that were for nothing undisturbed.
    """
    count = len(expected.batches)
    if is_first and sight.batches:
        count = min(count, len(sight.batches))
    if not count:
        return True
    wanted = expected.batches[-count:]
    return [b["bytes"] for b in sight.batches[-count:]] == [b["bytes"] for b in wanted]
