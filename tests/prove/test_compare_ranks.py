"""Two runs of several ranks: the states of all ranks are compared, and a difference names one."""

from __future__ import annotations

import random

import numpy as np

from holdfast._tools.prove.results import compare_runs, unlike_generators
from tests.rank_folders import capture_of, make_run


def states(change=None):
    found = [{"common": np.ones(3), "own": np.full(2, float(rank))} for rank in range(3)]
    if change is not None:
        found[change]["own"][1] += 1.0
    return found


def test_runs_with_equal_ranks_are_equal(tmp_path):
    both = make_run(tmp_path / "a", states()), make_run(tmp_path / "b", states())
    assert compare_runs(*both) is None


def test_a_difference_names_the_rank(tmp_path):
    both = make_run(tmp_path / "a", states()), make_run(tmp_path / "b", states(change=2))
    found = compare_runs(*both)
    assert found is not None
    assert found.item.startswith("rank 2: own")


def test_another_number_of_ranks_is_a_difference(tmp_path):
    both = make_run(tmp_path / "a", states()), make_run(tmp_path / "b", states()[:2])
    found = compare_runs(*both)
    assert found is not None
    assert (found.item, found.expected, found.found) == ("the number of ranks", "3", "2")


def test_a_generator_that_is_unlike_on_one_rank_is_unlike(tmp_path):
    first = [capture_of(state) for state in states()]
    other = [*first[:2]]
    random.random()
    other.append(capture_of(states()[2]))
    both = make_run(tmp_path / "a", first), make_run(tmp_path / "b", other)
    assert unlike_generators(*both) == {"python"}
    assert compare_runs(*both, {"python"}) is None
    found = compare_runs(*both)
    assert found is not None
    assert found.item.startswith("rank 2: global generators")


def test_parts_of_a_sharded_tensor_are_compared_by_their_values(tmp_path):
    def sharded(value):
        captured = capture_of({"w": np.array([value, 1.0])})
        shard = {"t": 0, "size": [4], "dtype": "float64", "offsets": [0], "sizes": [2], "mesh": 0}
        captured.tree["state"]["w"] = {"$shard": shard}
        return captured

    both = (
        make_run(tmp_path / "a", [sharded(0.0)] * 2),
        make_run(tmp_path / "b", [sharded(0.0)] * 2),
    )
    assert compare_runs(*both) is None
    other = make_run(tmp_path / "c", [sharded(0.0), sharded(2.0)])
    found = compare_runs(both[0], other)
    assert found is not None
    assert found.item.startswith("rank 1: w")
