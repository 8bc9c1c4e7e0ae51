"""Containers, numbers and text of every kind come back as they were."""

from __future__ import annotations

import contextlib
import enum
import math
import os
import string
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._run.saving.snapshots import Snapshots
from holdfast._state.capture import capture
from holdfast._state.restore import restore_state
from holdfast._store.format.checksum import digest_all
from holdfast._store.read.verify import verify_image
from tests.frameworks.roundtrip import assert_same, restore, round_trip, store

Point = namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 7


class Mode(enum.StrEnum):
    FAST = "fast"


def same(a, b):
    """Equal with the same types throughout, NaNs and signed zeros included."""
    if isinstance(b, torch.Tensor):
        assert_same(a, b)
        return True
    if type(a) is not type(b):
        return False
    if isinstance(b, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(b, float):
        return (
            math.isnan(a)
            if math.isnan(b)
            else a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


VALUES = {
    "int keys": {1: "a", -5: "b", 2**70: "c"},
    "keys of all kinds": {None: 1, True: 2, 2.5: 3, (1, "x"): 4, b"k": 5, frozenset({1}): 6},
    "keys that look like our tags": {"$t": 0, "$state": [], "$": {"$tuple": [1]}, "$dict": "x"},
    "empty containers": [[], {}, (), set(), frozenset(), OrderedDict(), "", b"", bytearray()],
    "tuples": (1, (2, (3, [4, (5,)]))),
    "sets": {1, "a", (2, 3), None, 2.5},
    "frozenset": frozenset({"a", 1}),
    "ordered": OrderedDict([("z", 1), ("a", [2]), (3, 4)]),
    "order of a dict": {"z": 1, "a": 2, "m": 3},
    "big ints": [2**63, -(2**64), 10**400, 10**5000, -(10**5000)],
    "floats": [math.inf, -math.inf, math.nan, -0.0, 0.0, 5e-324, 1.7976931348623157e308, 0.1],
    "complex": [1 + 2j, complex(math.inf, -0.0), complex(math.nan, 1)],
    "text": ["", "Zürich", "漢字", "🙂", '\x00\n"\\', "\ud800 alone", "\udcff"],
    "bytes": [b"", b"\x00\xff", bytes(range(256)) * 20, b"x" * 1024, b"x" * 1025],
    "bytearrays": [bytearray(b"small"), bytearray(b"large" * 1000)],
    "none and bool": [None, True, False],
    "NumPy scalars": [np.float32(0.1), np.int64(-3), np.bool_(True), np.float64("nan")],
    "torch's own": [torch.float16, torch.device("cpu")],
    "tensors in places": {"a": [torch.ones(2), (torch.zeros(1), {3: torch.full((2,), 3)})]},
}
VALUES["deep"] = None
for _ in range(70):
    VALUES["deep"] = [{"in": VALUES["deep"]}, {"k": 1}]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """All values in one checkpoint, taken back without anything to put them into."""
    folder = tmp_path_factory.mktemp("values") / "run"
    store(folder, value=VALUES)
    return restore(folder, value=None)["value"], restore(folder, value={})["value"]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_types(stored, name):
    as_new, into_empty = stored
    assert same(as_new[name], VALUES[name])
    assert same(into_empty[name], VALUES[name])


def test_the_containers_that_the_script_holds_are_filled_in_place(tmp_path):
    saved = {
        "list": [1, [2]],
        "dict": {"a": {"b": 1}},
        "set": {1, 2},
        "bytes": bytearray(b"abc"),
        "ordered": OrderedDict(a=1),
        "default": defaultdict(list, a=[1]),
        "large": bytearray(b"abc" * 1000),
    }
    inner = {"b": 0}
    fresh = {
        "list": [7],
        "dict": {"a": inner, "gone": 1},
        "set": {9},
        "bytes": bytearray(),
        "ordered": OrderedDict(),
        "default": defaultdict(list),
        "large": bytearray(),
    }
    held = dict(fresh)
    round_trip(tmp_path / "run", saved, fresh)
    assert fresh == saved
    for name, container in held.items():
        assert fresh[name] is container
    assert inner == {"b": 1}
    assert fresh["default"]["new"] == []


def test_a_named_tuple_keeps_its_type_where_the_script_has_one(tmp_path):
    fresh = round_trip(tmp_path / "run", [Point(1, torch.ones(2))], [Point(0, torch.zeros(2))])
    assert type(fresh[0]) is Point
    assert fresh[0].x == 1
    assert_same(fresh[0].y, torch.ones(2))


def test_members_of_number_and_text_enums_come_back_equal(tmp_path):
    fresh = round_trip(tmp_path / "run", [Color.RED, Mode.FAST], [None, None])
    assert fresh == [Color.RED, Mode.FAST]


def test_a_value_whose_kind_has_changed_is_what_was_stored(tmp_path):
    saved = {"a": (1, 2), "b": {1}, "c": math.nan, "d": [1], "e": {"k": 1}, "f": b"x"}
    fresh = {"a": {}, "b": {}, "c": {}, "d": {}, "e": [5], "f": {}}
    restored = round_trip(tmp_path / "run", saved, fresh)
    assert same(restored, saved)


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_objects_inside_containers_are_loaded_and_not_replaced(tmp_path):
    def make(start):
        return {
            "list": [Counter(start), torch.nn.Linear(2, 2)],
            "tuple": (Counter(start + 1), 5),
            3: {"deep": [Counter(start + 2)]},
        }

    saved, fresh = make(10), make(0)
    objects = [fresh["list"][0], fresh["list"][1], fresh["tuple"][0], fresh[3]["deep"][0]]
    restored = round_trip(tmp_path / "run", saved, fresh)
    now = [restored["list"][0], restored["list"][1], restored["tuple"][0], restored[3]["deep"][0]]
    assert all(a is b for a, b in zip(now, objects, strict=True))
    assert [now[0].count, now[2].count, now[3].count] == [10, 11, 12]
    assert_same(now[1].weight, saved["list"][1].weight)


# -- by property, through an arena and without a keeper ---------------------------------


def through_memory(saved, fresh):
    """Copy a state into a slot and restore it from there; also what did not stay."""
    said = []
    snapshots = Snapshots(
        run_id=os.urandom(16).hex(), attempt=1, announce=lambda *_: None, say=said.append
    )
    try:
        taken = snapshots.take(capture({"value": saved}), {"metrics": {}}, 1)
        assert taken is not None, said
        arena, backing = snapshots.arena
        plan, image = arena.plan(taken.slot), arena.image(taken.slot)
        views = [image[e.offset : e.offset + e.size_bytes] for e in plan.extents()]
        loaded = verify_image(image, plan, digest_all(views), "here")
        state = {"value": fresh}
        told = restore_state(state, loaded)
        return state["value"], told
    finally:
        with contextlib.suppress(UnboundLocalError):
            backing.remove()
        snapshots.close()


def tensors():
    def make(values, dtype):
        return torch.tensor(values, dtype=torch.float64).to(dtype)

    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64])
    return st.builds(make, st.lists(st.floats(width=32), max_size=4), dtypes)


arrays = st.builds(lambda v: np.array(v, dtype=np.float64), st.lists(st.floats(), max_size=4))
keys = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["$t", "$state", "$tuple", "$dict"]),
    st.integers(),
    st.none(),
    st.tuples(st.integers(0, 3), st.text("ab", max_size=2)),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=6),
    st.binary(max_size=20),
    st.binary(min_size=1100, max_size=1100),
    st.builds(bytearray, st.binary(max_size=9)),
    st.frozensets(st.integers() | st.text(string.ascii_letters, max_size=2), max_size=3),
    tensors(),
    arrays,
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=80)
@given(trees)
def test_any_tree_of_values_comes_back_as_it_was(saved):
    restored, told = through_memory(saved, None)
    assert same(restored, saved)
    assert told == []


@settings(max_examples=100)
@given(trees, trees)
@example(saved={-1: None}, fresh=[])
def test_any_tree_comes_back_whatever_stood_in_its_place(saved, fresh):
    with contextlib.suppress(holdfast.StateMismatch):  # a tensor of another shape
        restored, _ = through_memory(saved, fresh)
        assert list(flat(restored)) == list(flat(saved))


def flat(value):
    """The plain leaves, in order."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield repr(key)
            yield from flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield repr((value.dtype, value.tolist()))
    elif isinstance(value, set | frozenset):
        yield repr(sorted(value, key=repr))
    else:
        yield repr(value)
