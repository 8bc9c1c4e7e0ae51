"""What is called a hang, and what is not: the judge, with made-up looks."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._keeper.hangs.judge import ANSWER_SECONDS
from holdfast._keeper.hangs.record import shorten
from tests.unit.hang_scene import BUSY, DISK, MOVING, STOPPED, TRACED, Scene, make_look


def test_one_that_is_idle_twice_hangs():
    scene = Scene()
    scene.stuck()
    scene.wait(1)
    assert scene.filed == []
    scene.wait(4)
    (record,) = scene.filed
    assert (record["activity"], record["how"], record["missing"]) == ("idle", "learned", [])
    assert scene.notes == ["hang"]
    assert scene.said == ["hang"]
    assert scene.judge.beat()["hang"]["sentence"] == "It waits."
    scene.wait(100)
    assert len(scene.filed) == 1
    assert scene.restarted == []
    assert scene.saved == 1  # what is in memory is made durable: no step may come any more


def _awaits(*pids: int) -> dict[str, Any]:
    look = make_look(0)
    look["processes"][0]["threads"][0]["call"] = "wait4"
    look["processes"] += [{"pid": pid, "state": "S", "cpu": 0.0} for pid in pids]
    return look


def test_a_script_whose_programs_come_and_go_is_waited_for():
    scene = Scene()
    scene.looks[0] = _awaits(20, 21)
    scene.stuck()
    for pid in range(22, 200):
        scene.wait(1)
        scene.looks[0] = _awaits(20, pid)
    assert scene.filed == []
    scene.wait(2000)
    assert len(scene.filed) == 1, "the last of them does not end"


def test_a_program_of_another_language_that_computes_is_waited_for():
    scene = Scene()
    look = make_look(0)
    look["processes"].append({"pid": 20, "state": "R", "cpu": 1.0, "threads": []})
    scene.looks[0] = look
    scene.stuck()
    scene.wait(500)
    assert scene.filed == []


@pytest.mark.parametrize(
    ("told", "seconds"),
    [({}, 300), ({"how": "given", "patience": 2.0, "stood": 2.0}, 15)],
    ids=["learned", "given"],
)
def test_what_computes_is_ended_only_after_many_looks(told, seconds):
    scene = Scene(policy="restart")
    scene.looks[0] = make_look(0, BUSY)
    scene.stuck(**told)
    scene.wait(seconds - 30 if seconds > 30 else 10)
    assert scene.restarted == []
    scene.wait(40)
    assert scene.restarted == [0]


def test_a_run_whose_output_nobody_reads_is_held_and_not_ended():
    scene = Scene(ranks=2, policy="restart")
    look = make_look(0)
    look["processes"][0]["threads"][0]["unread"] = [1]
    scene.looks[0] = look
    scene.stuck()
    scene.stuck(1)
    scene.wait(600)
    assert (scene.restarted, scene.filed, scene.said) == ([], [], ["paused"])
    assert scene.judge.beat()["held"]["by"] == "its own output, which no process reads"
    # What this step takes is no measure, on any rank.
    assert {(0, "guard"), (1, "guard")} <= set(scene.orders)


def test_a_dead_disk_is_as_idle():
    scene = Scene()
    scene.looks[0] = make_look(0, DISK)
    scene.stuck()
    scene.wait(5)
    assert scene.filed[0]["activity"] == "disk"


def test_a_step_after_all_ends_it():
    scene = Scene()
    scene.stuck()
    scene.wait(5)
    scene.going()
    assert scene.filed[-1]["ended"] is not None
    assert scene.notes == ["hang", "hang-over"]
    assert scene.judge.beat()["hang"] is None


def test_one_that_leaves_without_a_step_stays_a_hang():
    scene = Scene()
    scene.stuck()
    scene.wait(5)
    scene.going(moved=False)
    assert scene.notes == ["hang"]
    assert scene.filed[-1]["ended"] is None


def test_one_that_computes_at_one_place_has_four_times_the_patience():
    scene = Scene()
    scene.looks[0] = make_look(0, BUSY)
    scene.stuck()
    scene.wait(55)
    assert scene.filed == []
    scene.wait(10)
    assert scene.filed[0]["activity"] == "busy"


def test_one_that_computes_at_different_places_is_slow():
    scene = Scene()
    scene.stuck()
    for line in range(300):
        scene.looks[0] = make_look(0, BUSY, line)
        scene.wait(5)
    assert scene.notes == ["slow"]
    looked = sum(kind == "look" for _, kind in scene.orders)
    assert looked < 20, "less and less often"


def test_one_that_moves_is_slow_and_then_may_hang():
    scene = Scene()
    scene.looks[0] = make_look(0, MOVING)
    scene.stuck()
    scene.wait(10)
    assert scene.notes == ["slow"]
    scene.looks[0] = make_look(0)
    scene.wait(30)
    assert scene.notes == ["slow", "hang"]


@pytest.mark.parametrize(("does", "is_guarded"), [(STOPPED, True), (TRACED, True)])
def test_what_somebody_holds_is_said_once_and_waited_for(does, is_guarded):
    scene = Scene(2, policy="restart")
    scene.looks[1] = make_look(1, does)
    scene.stuck(0)
    scene.stuck(1)
    scene.wait(3600)
    assert scene.notes == scene.said == ["paused"]
    assert ((1, "guard") in scene.orders) is is_guarded
    assert scene.judge.beat()["held"]["rank"] == 1
    scene.looks[1] = make_look(1)
    scene.going(1, moved=False)
    assert scene.notes == ["paused", "resumed"]
    assert {rank for rank, kind in scene.orders if kind == "restart-clock"} == {0, 1}
    assert scene.restarted == []


def test_a_rank_in_a_debugger_needs_no_look():
    scene = Scene(2)
    scene.stuck(1, paused="pdb")
    assert scene.judge.beat()["held"]["by"] == "pdb"
    scene.stuck(0)
    scene.looks[1] = make_look(1, paused="pdb")
    scene.wait(3600)
    assert scene.notes == ["paused"]
    scene.going(1)
    assert scene.notes == ["paused", "resumed"]


def test_ranks_are_as_active_as_the_most_active_of_them():
    scene = Scene(4, policy="restart")
    scene.looks[2] = make_look(2, MOVING)
    for rank in (0, 1, 3):
        scene.stuck(rank)
    scene.wait(15)
    assert scene.notes == ["slow"]
    scene.looks[2] = make_look(2)
    scene.wait(30)
    assert scene.restarted == [0]
    assert [look["rank"] for look in scene.filed[0]["looks"]] == [0, 1, 2, 3]


def test_a_rank_in_a_phase_is_waited_for_as_long_as_the_phase_may_take():
    scene = Scene(2)
    scene.looks[0] = make_look(0, rests=True, stretch="phase", patience=600.0, stood=30.0)
    scene.stuck(1)
    scene.wait(500)
    assert scene.notes == []
    scene.looks[0] = make_look(0, rests=True, stretch="phase", patience=600.0, stood=601.0)
    scene.wait(70)
    assert scene.notes == ["hang"]


def test_a_rank_that_goes_on_alone_does_not_excuse_another():
    scene = Scene(2)
    scene.looks[0] = make_look(0, MOVING, boundary_age=0.1)
    scene.stuck(1)
    scene.wait(5)
    assert scene.notes == ["hang"]


def test_a_keeper_that_does_not_answer_is_named():
    scene = Scene(3)
    scene.looks[2] = None
    scene.stuck(0)
    scene.stuck(1)
    scene.wait(2 * ANSWER_SECONDS + 10)
    assert scene.filed[0]["missing"] == [2]


def test_without_any_answer_nothing_is_judged():
    scene = Scene(2, policy="restart")
    scene.looks = {0: None, 1: None}
    scene.stuck(1)
    scene.wait(300)
    assert scene.notes == []


def test_ranks_that_go_on_end_the_wait_for_one_that_was_held():
    scene = Scene(2)
    scene.looks[1] = make_look(1, paused="pdb")
    scene.stuck(0)
    scene.wait(1)
    assert scene.notes == ["paused"]
    scene.going(0)
    assert scene.notes == ["paused", "resumed"]
    assert scene.judge.beat()["held"] is None


def test_a_new_keeper_of_the_only_stuck_rank_begins_anew():
    scene = Scene(2)
    scene.stuck(1)
    scene.wait(1)
    scene.judge.on_going(1, moved=False)
    scene.wait(100)
    assert scene.notes == []


def test_what_turns_out_to_be_slow_is_no_hang():
    scene = Scene(policy="restart")
    scene.cause = "slow"
    scene.stuck()
    scene.wait(5)
    assert scene.notes == ["slow"]
    assert scene.restarted == []


def test_nothing_seen_is_no_proof():
    scene = Scene(policy="restart")
    scene.looks[0] = {"rank": 0, "by": "none", "processes": []}
    scene.stuck()
    scene.wait(100)
    assert scene.notes == ["slow"]


def test_a_large_look_is_made_to_fit():
    frames = [{"file": "x" * 100, "line": n, "name": "f"} for n in range(60)]
    threads = [{"tid": n, "is_main": n == 9, "frames": frames} for n in range(10)]
    look = {"processes": [{"pid": n, "threads": threads} for n in range(40)]}
    small = shorten(look, ranks=1000)
    assert len(str(small)) < 100_000
    assert small["processes"][0]["threads"][0]["is_main"]
    assert shorten({"processes": []}, 1) == {"processes": []}


def _loop(*lines: int, name: str = "step", step_cpu: float | None = None) -> dict[str, Any]:
    """It computes, and was seen at these lines of one function."""
    look = make_look(0, {**BUSY, **MOVING}, lines[0])
    main = look["processes"][0]["threads"][0]
    main["frames"][0]["name"] = name
    main["lines"] = list(lines)
    return {**look, "step_cpu": step_cpu, "usual_step_seconds": 0.02}


def test_one_that_computes_at_a_few_lines_of_one_function_has_six_times_the_patience():
    scene = Scene()
    scene.looks[0] = _loop(9, 10, 9, step_cpu=60.0)
    scene.stuck()
    scene.wait(95)
    assert scene.filed == []
    scene.wait(10)
    assert [record["activity"] for record in scene.filed] == ["loops"]


def test_a_given_patience_counts_three_times_and_is_over_sooner():
    scene = Scene()
    scene.looks[0] = _loop(9, 10, 9, step_cpu=20.0)
    scene.stuck(how="given", patience=8.0, stood=8.0)
    scene.wait(15)
    assert scene.filed == []
    scene.wait(3)
    assert scene.notes == ["hang"]


def test_a_loop_that_is_seen_at_one_line_at_a_time_is_a_loop():
    scene = Scene()
    scene.stuck()
    for n in range(60):
        scene.looks[0] = make_look(0, BUSY, 9 + n % 2)
        scene.wait(5)
    assert scene.notes[-1] == "hang"
    assert scene.filed[0]["activity"] == "loops"


def test_work_that_leaves_the_function_is_slow():
    scene = Scene()
    scene.stuck()
    for n in range(300):
        scene.looks[0] = _loop(9, 10, 9, name=f"stage{n}", step_cpu=100.0)
        scene.wait(5)
    assert scene.notes == ["slow"]


def test_a_long_function_that_does_not_come_back_to_a_line_is_slow():
    scene = Scene()
    scene.stuck()
    for n in range(0, 600, 2):
        scene.looks[0] = _loop(n, n + 1, step_cpu=100.0)
        scene.wait(5)
    assert scene.notes == ["slow"]


def test_a_loop_that_has_hardly_computed_is_slow():
    """It waits for a processor: its time on one is that of some usual steps."""
    scene = Scene()
    scene.looks[0] = _loop(9, 10, 9, step_cpu=0.1)
    scene.stuck()
    scene.wait(600)
    assert scene.notes == ["slow"]


def test_a_loop_is_ended_only_after_half_an_hour():
    """It may be an evaluation that is no phase."""
    scene = Scene(policy="restart")
    scene.looks[0] = _loop(9, 10, 9, step_cpu=100.0)
    scene.stuck()
    scene.wait(1700)
    assert scene.restarted == []
    scene.wait(100)
    assert scene.restarted == [0]


def test_a_child_that_works_excuses_a_loop():
    scene = Scene()
    look = _loop(9, 10, 9, step_cpu=100.0)
    worker = {"tid": 9, "is_main": True, "frames": [], "moved": True}
    look["processes"].append({"pid": 9, "state": "R", "cpu": 1.0, "threads": [worker]})
    scene.looks[0] = look
    scene.stuck()
    scene.wait(600)
    assert scene.notes == ["slow"]
