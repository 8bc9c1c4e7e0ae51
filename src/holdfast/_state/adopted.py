"""The first start from a checkpoint that another library wrote, and that `holdfast adopt` took.

Such a state knows its objects only by the way to them. Here it becomes an ordinary one: that of
the objects of today, with the stored values in it. From there on nothing tells the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import StateMismatch
from holdfast._state.capture import Captured, capture
from holdfast._state.fit import name_some
from holdfast._state.restore import decode_state
from holdfast._state.tf_object_graph import OBJECTS
from holdfast._store.format.checksum import digest_all
from holdfast._store.format.image import TensorSpec
from holdfast._store.read.verify import Loaded, SentAhead


def settle_adopted(loaded: Loaded, state: dict[str, Any]) -> tuple[Loaded, list[str]]:
    """The stored state as it would be of these objects, and what is to be said of it."""
    adopted = loaded.head.get("adopted")
    if adopted is None:
        return loaded, []
    if adopted.get("kind"):
        return _settle_foreign(loaded, state, adopted)
    matched, captured, sources = _look(loaded, state, adopted, builds=False)
    if matched.unbuilt:
        matched, captured, sources = _look(loaded, state, adopted, builds=True)
    by_name = _numbers(loaded)
    tree = dict(captured.tree["state"])
    for name in matched.by_path.keys() & tree.keys():
        tree[name] = _number(loaded, by_name[matched.by_path[name]], name, state[name])
    pairs = zip(captured.specs, captured.values, strict=True)
    # Copies: the live values are about to change, and these are what is compared with.
    own = [memoryview(bytearray(adapter_of(s.kind).bytes_of(value))) for s, value in pairs]
    views = tuple(
        memoryview(bytearray(view.nbytes))
        if id(value) in matched.zeros
        else (view if source is None else loaded.data(source))
        for view, value, source in zip(own, captured.values, sources, strict=True)
    )
    extra = {k: v for k, v in loaded.head["tree"]["extra"].items() if k != OBJECTS}
    whole = _as_stored(loaded, captured.specs, views, {"state": tree, "extra": extra})
    names = [spec.name for spec in captured.specs]
    made_here = [name for name, source in zip(names, sources, strict=True) if source is None]
    begun = [name for name in matched.fresh if "." not in name]
    begun += [n for n in made_here if n.partition(".")[0] not in begun]
    return whole, _lines(begun, matched.unused)


def _settle_foreign(
    loaded: Loaded, state: dict[str, Any], adopted: dict[str, Any]
) -> tuple[Loaded, list[str]]:
    """Of torch, Lightning, Hugging Face, Orbax: no graph, but names that the objects know."""
    from holdfast._state.foreign import settle

    # What travels beside it has tensors of its own, which keep their numbers behind the others.
    settled = settle(decode_state(loaded), state, adopted)
    captured = settled.captured
    extra, numbers = _renumbered(loaded.head["tree"]["extra"], len(captured.specs))
    specs = [*captured.specs, *(loaded.plan.specs[number] for number in numbers)]
    views = [
        # Those of the script are about to change, and are what is compared with.
        memoryview(bytearray(view)) if spec.name.partition(".")[0] in settled.fresh else view
        for spec, value in zip(captured.specs, captured.values, strict=True)
        if (view := adapter_of(spec.kind).bytes_of(value)) is not None
    ]
    views += [loaded.data(number) for number in numbers]
    tree = {"state": captured.tree["state"], "extra": extra}
    return _as_stored(loaded, specs, tuple(views), tree), _lines(settled.fresh, settled.unused)


def _renumbered(encoded: Any, first: int) -> tuple[Any, list[int]]:
    """A tree whose tensors are numbered from `first`, and the numbers that they had."""
    numbers: list[int] = []

    def walk(item: Any) -> Any:
        if isinstance(item, list):
            return [walk(each) for each in item]
        if not isinstance(item, dict):
            return item
        if item.keys() == {"$t"}:
            numbers.append(item["$t"])
            return {"$t": first + len(numbers) - 1}
        return {key: walk(each) for key, each in item.items()}

    return walk(encoded), numbers


def _as_stored(
    loaded: Loaded, specs: Sequence[TensorSpec], views: tuple[memoryview, ...], tree: Any
) -> Loaded:
    """The same checkpoint with another state in it."""
    names = [spec.name for spec in specs]
    return replace(
        loaded,
        plan=replace(loaded.plan, specs=tuple(specs)),
        tensors=views,
        memory=(*loaded.memory, *(view for view in views if view.nbytes)),
        sent=SentAhead(),
        head={**loaded.head, "tree": tree},
        digests=dict(zip(names, digest_all(list(views)), strict=True)),
    )


def _numbers(loaded: Loaded) -> dict[str, int]:
    return {spec.name: number for number, spec in enumerate(loaded.plan.specs)}


def _look(
    loaded: Loaded, state: dict[str, Any], adopted: dict[str, Any], *, builds: bool
) -> tuple[Any, Captured, list[int | None]]:
    """What belongs together, and for each tensor of today the number of the stored one."""
    adapter_of("tensorflow")  # says how to install it
    from holdfast.tensorflow.graph import Graph
    from holdfast.tensorflow.match import match

    encoded = loaded.head["tree"]["extra"][OBJECTS]
    graph = Graph.from_bytes(bytes(loaded.data(encoded["$t"])))
    matched = match(graph, state, adopted["fresh"], builds=builds)
    captured = capture(state)
    by_name = _numbers(loaded)
    sources = [by_name.get(_source(matched, captured, n)) for n in range(len(captured.specs))]
    reshaped = [
        _tell(spec, loaded.plan.specs[source])
        for spec, source in zip(captured.specs, sources, strict=True)
        if source is not None and not _is_alike(spec, loaded.plan.specs[source])
    ]
    _refuse(adopted, matched, reshaped)
    return matched, captured, sources


def _source(matched: Any, captured: Captured, number: int) -> str:
    """The stored tensor for one of those that were captured; empty if there is none."""
    found: str | None = matched.by_key.get(id(captured.values[number]))
    return found or str(matched.by_path.get(captured.specs[number].name, ""))


def _is_alike(now: TensorSpec, then: TensorSpec) -> bool:
    # Of a copy in NumPy the type may be written in another way; the bytes are the same.
    is_same_type = now.dtype == then.dtype or now.kind != then.kind
    return is_same_type and (now.shape, now.item_bytes) == (then.shape, then.item_bytes)


def _tell(now: TensorSpec, then: TensorSpec) -> str:
    return f"{now.name} ({then.dtype} {list(then.shape)} → {now.dtype} {list(now.shape)})"


def _number(loaded: Loaded, source: int, name: str, live: Any) -> Any:
    from holdfast.tensorflow.match import number_in

    spec = loaded.plan.specs[source]
    try:
        return number_in(adapter_of("tensorflow").own(spec, loaded.data(source)), live)
    except ValueError as error:
        raise StateMismatch(
            f"{name}: the adopted checkpoint has {spec.dtype} {list(spec.shape)} for it, and "
            f"{error}.\nGive Run a tf.Variable of that kind, or adopt with --fresh {name}."
        ) from error


def _refuse(adopted: dict[str, Any], matched: Any, reshaped: list[str]) -> None:
    reshaped = reshaped + matched.unlike
    if not (matched.missing or matched.unexpected or reshaped):
        return
    lines = [f"the adopted checkpoint {adopted['from']} does not fit the state that Run was given."]
    for what, names in (
        ("not in the checkpoint", matched.missing),
        ("only in the checkpoint", matched.unexpected),
        ("changed", reshaped),
        ("names that Run does not have", matched.unused),
    ):
        if names:
            lines.append(f"  {what}: {name_some(names)}")
    lines.append(
        "Nothing was changed. Build the objects as they were (a Keras model: call it once before "
        "Run), or adopt into a new folder, with --name NEW=OLD for another name and --fresh NAME "
        "for what is to begin anew."
    )
    raise StateMismatch(
        "\n".join(lines),
        missing=tuple(matched.missing),
        unexpected=tuple(matched.unexpected),
        reshaped=tuple(reshaped),
    )


def _lines(begun: list[str], unused: list[str]) -> list[str]:
    lines = []
    for what, names in (
        ("begins as the script made it, for the adopted checkpoint does not have it", begun),
        ("in the adopted checkpoint, and not used by this run", unused),
    ):
        if names:
            lines.append(f"{what}: {name_some(names)}.")
    return lines
