"""The lines of `holdfast status` for ranks, from what a heartbeat says."""

from __future__ import annotations

import time

from holdfast._report.status.parts import (
    RankDeath,
    describe_ranks,
    describe_straggler,
    read_ranks,
    read_straggler,
)


def beat(count, **of_rank):
    ranks = [
        {
            "rank": rank,
            "host": f"node{rank // 8}",
            "pid": 100 + rank,
            "step": 50,
            "memory_step": 48,
            "phase": None,
            "boundary_age_seconds": 0.5,
            "ended": None,
            **of_rank.get(f"r{rank}", {}),
        }
        for rank in range(count)
    ]
    return {"time": time.time(), "ranks": ranks}


def lines(count, **of_rank):
    return describe_ranks(read_ranks(beat(count, **of_rank)), [], is_live=True).splitlines()


def test_a_few_ranks_have_a_line_each():
    found = lines(2, r1={"phase": "eval", "boundary_age_seconds": 3.0})
    assert found[0] == "2 on node0"
    assert found[1].startswith("rank 0: step 50, 48 in memory, made 5")
    assert found[2] == "rank 1: step 50, 48 in memory, in eval since 3.0 s"


def test_of_many_ranks_those_that_are_gone_and_the_slowest_are_shown():
    found = lines(64, r17={"ended": "was killed by SIGKILL"}, r40={"step": 47}, r41={"step": 48})
    assert found[0] == "64 on 8 hosts"
    assert len(found) == 7
    assert "rank 17 on node2: step 50, 48 in memory, was killed by SIGKILL" in found
    assert any(line.startswith("rank 40 on node5: step 47") for line in found)
    assert any(line.startswith("rank 41 on node5: step 48") for line in found)
    assert found[-1] == "and 59 more, at step 50"


def test_a_rank_that_nothing_is_known_of_has_a_line_too():
    assert lines(2, r1={"step": None})[2] == "rank 1: not heard of yet"


def test_of_a_run_that_has_ended_only_deaths_are_told():
    death = RankDeath(1, "node0", "was killed by SIGKILL", 40)
    found = describe_ranks(read_ranks(beat(2)), [death], is_live=False)
    assert found.splitlines() == ["2 on node0", "rank 1 on node0 was killed by SIGKILL at step 40"]


def test_a_straggler_is_named_with_the_time_that_the_others_wait():
    found = read_straggler({"straggler": {"rank": 3, "host": "node0", "seconds": 0.05}})
    expected = "rank 3 on node0: the others wait 50 ms for it in each step"
    assert describe_straggler(found) == expected
    assert describe_straggler(read_straggler({"straggler": None})) == ""


def test_a_heartbeat_of_one_process_has_no_ranks():
    assert read_ranks({"time": 0.0, "step": 3}) == []
    assert describe_ranks([], [], is_live=True) == ""


def test_a_heartbeat_that_is_none_is_no_error():
    assert read_ranks({"ranks": [None, "x"], "straggler": 3}) == []
    assert read_straggler({"straggler": {"rank": "x"}}) is None
