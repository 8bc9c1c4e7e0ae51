"""Two undisturbed runs: the first thing in which they differ, and what differs for nothing."""

from __future__ import annotations

from holdfast._tools.prove.causes import ORDER, Judged, Latent, is_in_use
from holdfast._tools.prove.history import History, Leaf

_ROUNDING = 0.003  # what is closer than that is the same sum, added up in another order


def judge_repeat(first: History, again: History) -> Judged | None:
    """The first thing in which two undisturbed runs differ; None if they are the same."""
    for place, (one, other) in enumerate(zip(first.sights, again.sights, strict=False)):
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
    pairs += [(a.numbers, b.numbers) for a, b in zip(first.sights, again.sights, strict=False)]
    for one, other in pairs:
        found |= {i for i, leaf in one.items() if i in other and other[i][0] != leaf[0]}
    return frozenset(found)
