"""Arrays of every type and layout come back to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
from tests.frameworks.roundtrip import restore, round_trip, store

BYTES = np.arange(240, dtype=np.uint8)
NUMBERS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
OTHERS = (">f4", ">i8", ">c8", "S5", "M8[ns]", "m8[s]", "V3", "longdouble")
ARRAYS = {name: np.frombuffer(BYTES.tobytes(), dtype=name) for name in (*NUMBERS, *OTHERS)}
ARRAYS |= {
    "U3": np.array(["", "abc", "漢字"]),
    "bool": np.array([True, False]),
    "no dimension": np.array(-0.0),
    "no element": np.empty((3, 0, 2), np.int16),
    "NaN payloads": np.array([0x7FC00001, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32),
    "special": np.array([np.inf, -np.inf, np.nan, -0.0, 5e-324]),
    "F order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "strided": np.arange(20.0)[::3],
    "backwards": np.arange(5.0)[::-1],
    "broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
    "read only": np.arange(3.0),
}
ARRAYS["read only"].flags.writeable = False


def assert_same(now, then):
    assert type(now) is type(then)
    assert now.dtype == then.dtype
    assert now.dtype.byteorder == then.dtype.byteorder
    assert now.shape == then.shape
    assert now.tobytes() == then.tobytes()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """All arrays in one checkpoint: taken back in place, and as new ones."""
    folder = tmp_path_factory.mktemp("arrays") / "run"
    store(folder, value=ARRAYS)
    live = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
    held = dict(live)
    return restore(folder, value=live)["value"], held, restore(folder, value={})["value"]


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_type_comes_back_in_place_to_the_bit(stored, name):
    in_place, held, _ = stored
    assert in_place[name] is held[name]
    assert_same(in_place[name], ARRAYS[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_type_comes_back_as_a_new_one_to_the_bit(stored, name):
    fresh = stored[2][name]
    assert_same(fresh, ARRAYS[name])
    assert fresh.flags.writeable
    assert fresh.flags.owndata or fresh.base.flags.owndata  # its own memory, not the image's


@pytest.mark.parametrize("name", ["F order", "transposed"])
def test_the_order_of_the_axes_in_memory_is_kept(stored, name):
    assert stored[2][name].strides == ARRAYS[name].strides


@pytest.mark.parametrize(
    "scalar",
    [np.float32(0.1), np.float64("nan"), np.int8(-3), np.bool_(True), np.complex64(1 + 2j)],
    ids=lambda s: type(s).__name__,
)
def test_a_numpy_scalar_stays_one(tmp_path, scalar):
    assert_same(round_trip(tmp_path / "run", scalar, type(scalar)(0)), scalar)


def test_a_memory_map_is_an_array_like_any_other(tmp_path):
    saved = np.memmap(tmp_path / "map", np.float32, "w+", shape=(4,))
    saved[:] = [1, 2, 3, 4]
    fresh = np.zeros(4, np.float32)
    assert round_trip(tmp_path / "run", saved, fresh) is fresh
    assert fresh.tolist() == [1, 2, 3, 4]


def test_an_array_that_cannot_be_written_is_replaced_and_not_touched(tmp_path):
    live = np.zeros(3)
    live.flags.writeable = False
    restored = round_trip(tmp_path / "run", np.arange(3.0), live)
    assert restored.tolist() == [0, 1, 2]
    assert live.tolist() == [0, 0, 0]


def test_one_array_under_two_names_stays_one(tmp_path):
    shared = np.arange(4.0)
    fresh = round_trip(tmp_path / "run", {"a": shared, "b": [shared]}, {})
    assert fresh["a"] is fresh["b"][0]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([object()]), "Python objects"),
        (np.array([1, "a"], dtype=object), "Python objects"),
        (np.zeros(2, dtype=[("x", "f4"), ("y", "i4")]), "structured"),
        (np.array(["a"], dtype=np.dtypes.StringDType()), "cannot be stored"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "masked"),
    ],
)
def test_what_cannot_be_stored_is_named_when_the_run_is_made(tmp_path, array, said):
    with pytest.raises(holdfast.UnstorableState, match=said) as refused:
        holdfast.Run(tmp_path / "run", state={"deep": [1, array]})
    assert refused.value.path == "state.deep.1"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("live", [np.zeros(4), np.zeros(3, np.float32), np.zeros((3, 1))])
def test_an_array_of_another_shape_or_type_is_a_mismatch(tmp_path, live):
    before = live.copy()
    store(tmp_path / "run", weights=np.arange(3.0))
    with pytest.raises(holdfast.StateMismatch, match="weights") as refused:
        restore(tmp_path / "run", weights=live)
    assert len(refused.value.reshaped) == 1
    assert np.array_equal(live, before)
