"""What is said of ranks that met, and of those that did not."""

from __future__ import annotations

from typing import Any

from holdfast._tools.doctor.check import Check
from holdfast._tools.doctor.ranks import judge_ranks
from holdfast._tools.doctor.signals.chain import Probe


def rank(number: int, *more: dict[str, Any]) -> Probe:
    """A rank that has reported itself."""
    here: dict[str, Any] = {"what": "here", "time": 1.0, "pid": number, "host": "a"}
    here["variables"] = {"RANK": str(number), "WORLD_SIZE": "2"}
    return Probe([here, *more])


ENDED = ({"what": "met", "backend": "gloo"}, {"what": "done"})


def judge(*probes: Probe) -> Check:
    return judge_ranks(probes, 60)


def test_ranks_that_meet_are_counted():
    found = judge(rank(0, *ENDED), rank(1, *ENDED))
    assert (found.name, found.state) == ("all_reduce", "ok")
    assert found.found == "2 ranks on 1 host meet, and their sum is right"
    assert found.data["backend"] == "gloo"


def test_a_doctor_on_each_node_tells_of_its_own_ranks():
    assert "2 ranks (1 of them seen here)" in judge(rank(1, *ENDED)).found


def test_processes_that_know_nothing_of_each_other_do_not_reduce():
    alone = rank(0, {"what": "error", "kind": "import", "text": "no holdfast", "time": 1.0})
    alone.here["variables"] = {}
    assert judge(alone).found.startswith("one process")
    two = [rank(0, {"what": "done"}), rank(0, {"what": "done"})]
    for one in two:
        one.here["variables"] = {}
    assert "2 processes without RANK" in judge(*two).found


def test_the_first_error_is_the_one_that_is_told():
    why = {"what": "error", "kind": "RanksError", "text": "port 1 is taken.\nTake another.\n"}
    after = {"what": "error", "kind": "RuntimeError", "text": "connection closed", "time": 9.0}
    check = judge(rank(0, after), rank(1, {**why, "time": 5.0}))
    assert (check.state, check.found) == ("fail", "rank 1 of 2: port 1 is taken")
    assert check.remedy == "Take another"


def test_ranks_that_are_silent_are_counted():
    met = {"what": "met"}
    check = judge(rank(0, met), rank(1, met))
    assert "ranks 0 and 1 of 2 met, and did not end their all_reduce within 60 s" in check.found
    assert "did not meet" in judge(rank(0, met), rank(1)).found
