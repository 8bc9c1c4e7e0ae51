"""A process that only waits for a processor does not hang, however long it takes."""

from __future__ import annotations

from typing import Any

from tests.unit.hang_scene import BUSY, Scene, make_look


def test_time_for_which_its_main_thread_waits_for_a_processor_is_not_counted():
    """It computes at one line: reported after 80 s in which it could run, which take 1600 s."""
    scene = Scene()
    scene.looks[0] = make_look(0, BUSY)
    scene.starved = 0.95
    scene.stuck()
    scene.wait(1100)
    assert scene.filed == []
    scene.wait(200)
    assert [record["activity"] for record in scene.filed] == ["busy"]


def _with_worker(waits: float) -> dict[str, Any]:
    look = make_look(0)
    worker = {"tid": 9, "is_main": True, "state": "R", "waits": waits, "moved": False}
    look["processes"].append({"pid": 9, "state": "R", "cpu": 1.0 - waits, "threads": [worker]})
    worker["frames"] = [{"file": "data.py", "line": 3, "name": "decode"}]
    return look


def test_one_whose_worker_waits_for_a_processor_has_as_much_longer_as_that_waits():
    scene = Scene()
    scene.looks[0] = _with_worker(0.95)  # a twentieth of a core is its own
    scene.stuck()
    scene.wait(1500)
    assert scene.filed == []
    scene.wait(100)
    assert len(scene.filed) == 1, "80 s of work were enough for a worker that nobody disturbs"


def test_a_worker_that_nobody_disturbs_has_no_longer():
    scene = Scene()
    scene.looks[0] = _with_worker(0.0)
    scene.stuck()
    scene.wait(70)
    assert len(scene.filed) == 1


def test_what_waits_for_a_processor_is_not_idle_however_little_it_computes():
    scene = Scene(policy="restart")
    look = make_look(0)
    look["processes"][0]["threads"][0]["waits"] = 1.0
    scene.looks[0], scene.starved = look, 1.0
    scene.stuck(how="given", patience=1.0, stood=1.0)
    scene.wait(3600)
    assert (scene.restarted, scene.notes) == ([], [])


def test_a_keeper_that_says_that_it_still_looks_is_waited_for():
    scene = Scene(2)
    scene.looks[1] = None
    scene.stuck(0)
    scene.wait(1)
    for _ in range(20):
        scene.judge.on_looking(1, round=scene.judge._count)
        scene.wait(5)
    assert scene.filed == []
    scene.judge.on_looked(1, round=scene.judge._count, look=make_look(1))
    scene.looks[1] = make_look(1)
    scene.wait(5)
    assert [record["missing"] for record in scene.filed] == [[]]
