"""Trees and arrays that are compared: what differs first, and how far apart it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holdfast._tools.prove.results import distance, first_difference

torch = pytest.importorskip("torch", reason="pip install 'holdfast[torch]'")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_tree_does_not_differ_from_itself(tree):
    assert first_difference("f", tree, tree) is None


@given(VALUES, VALUES)
def test_trees_that_are_not_equal_differ_in_both_directions(one, other):
    forth, back = first_difference("f", one, other), first_difference("f", other, one)
    assert (forth is None) == (back is None)


@pytest.mark.parametrize(
    ("expected", "found", "words"),
    [
        ([1.0, 2.0], [1.0, 2.0], "not at all"),
        ([0.0], [-0.0], "only by the signs of zeros or the bits of NaNs"),
        ([3.0, 4.0], [3.0, 4.5], "up to 0.5, 10% of its norm"),
        ([1.0, 1.0], [1.0, 1.0 + 1e-9], "up to 1e-09, 7.1e-10 of its norm"),
        ([1e-9], [1.0], "up to 1, 1e+09 times its norm"),
        ([1.0, 1.0], [1.0, math.nan], "1 of 2 are NaN or infinite on one side only"),
        (
            [math.inf, 1.0],
            [-math.inf, 2.0],
            "1 of 2 are NaN or infinite on one side only, up to 1, 100% of its norm",
        ),
        ([math.nan, 0.0], [math.nan, 1.0], "up to 1, and all of it should be zero"),
        ([1e300, 0.0], [-1e300, 0.0], "up to 2e+300"),
        ([1, 2, 3], [1, 5, 6], "2 of 3 elements"),
        ([True], [False], "1 of 1 elements"),
        ([1.0], [1.0, 2.0], "shape 2 in place of 1"),
        ([1.0], [1], "int64 in place of float64"),
        ([1j], [2j], "up to 1, 100% of its norm"),
    ],
)
def test_distances_are_told_in_words(expected, found, words):
    assert distance(np.array(expected), np.array(found)) == words


FLOATS = arrays.arrays(np.float32, arrays.array_shapes(max_dims=2, max_side=4))


@given(FLOATS)
def test_an_array_is_not_away_from_itself(array):
    assert distance(array, array.copy()) == "not at all"


@given(FLOATS, FLOATS)
def test_any_two_arrays_have_a_distance(one, other):
    assert distance(one, other)
