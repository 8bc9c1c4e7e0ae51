"""What is only slow is called slow, with the reason, and never a hang."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.verdict import Cause
from tests import cgroups
from tests.support import wait_until

_SWAP_LIMIT_BYTES = 80 << 20


def _check(stage, *says):
    verdict = stage.why_until(Cause.SLOW, *says)
    text = "\n".join([verdict["sentence"], *verdict["evidence"]])
    assert verdict["cause"] == Cause.SLOW.value, text
    for each in says:
        assert each in text, text
    assert verdict["advice"]
    assert not stage.layout.hang(1).exists()
    return verdict


@pytest.mark.nightly  # tests/unit/diagnose/test_why_live.py
@pytest.mark.parametrize(
    ("how", "by"),
    [
        ("traced", "sys.settrace"),
        # A profiler is named in the same way: tests/unit/run/test_pulse.py.
        pytest.param("profiled", "sys.setprofile", marks=pytest.mark.nightly),
    ],
)
def test_steps_20_times_slower_since_something_looks_on(how, by, stage):
    """A step takes longer than what was given for it, and that is no hang either."""
    trainer = stage.start(how, "--timeout", 0.2, "--at", 150, "--sleep", 0.01)
    trainer.wait_for("hanging")
    usual = stage.pace["usual"]
    wait_until(lambda: (stage.pace.get("now") or 0) > 20 * usual, 60, "20 times slower steps")
    _check(stage, by)


@pytest.mark.nightly  # by its figures: tests/unit/diagnose/test_why_live.py
def test_more_threads_than_cores(stage):
    """Twelve that never end, and at times the main thread or our own beside them."""
    trainer = stage.start("many-threads", "--timeout", 1, "--at", 50)
    trainer.wait_for("hanging")
    verdict = _check(stage, "threads of it want to run on 1 core", "OMP_NUM_THREADS")
    (number,) = re.findall(r"(\d+) threads of it want to run", verdict["sentence"])
    assert int(number) in range(12, 15)


def test_more_threads_than_cores_by_figures():
    verdict = judge(_slow_run([_thread(tid, "R", waits=0.9) for tid in range(12)], cores=1))
    assert verdict.cause is Cause.SLOW
    assert "12 threads of it want to run on 1 core" in verdict.sentence
    assert "OMP_NUM_THREADS=1" in verdict.advice[0]


def test_other_processes_on_the_same_cores_by_figures():
    verdict = judge(_slow_run([_thread(0, "R", waits=0.95), _thread(1, "S")], cores=2))
    assert verdict.cause is Cause.SLOW
    assert "it waits for a processor 95% of the time: other processes have them" in verdict.sentence


def _thread(tid, state, **more):
    frame = {"file": "/home/ada/train.py", "line": 12, "name": "<module>"}
    told = {"tid": tid, "is_main": tid == 0, "state": state, "cpu": 0.05, "moved": False}
    return {**told, "frames": [frame] if tid == 0 else [], **more}


def _slow_run(threads, cores):
    """One whose steps take six times as long as before."""
    process = {"pid": 8732, "name": "python", "state": "R", "cpu": 0.1, "threads": threads}
    look = {
        **{"seconds": 0.5, "by": "py-spy", "cores": cores, "rank": 0, "step": 327},
        **{"boundary_age": 0.01, "pulse_age": 0.55, "in_loop": True, "usual_step_seconds": 0.02},
        "processes": [process],
    }
    evidence = Evidence(subject="runs/a", kind="run", is_live=True)
    evidence.beat = {"step": 327, "pace": {"usual": 0.02, "now": 0.12, "disturbed": []}}
    evidence.look = {"looks": [look], "missing": []}
    return evidence


@pytest.mark.nightly  # by its figures: below
def test_more_memory_than_fits(stage):
    reason = cgroups.why_not()
    if reason is None and len(Path("/proc/swaps").read_text().splitlines()) < 2:
        reason = "this machine has no swap; see the test below"
    if reason is not None:
        pytest.skip(reason)
    with cgroups.limited_memory(_SWAP_LIMIT_BYTES) as group:
        group.allow_swap()
        stage.prefix = group.prefix
        trainer = stage.start("swaps", "--timeout", 1, "--at", 100)
        trainer.wait_for("hanging")
        _check(stage, "swap", "pages a second")
        stage.end()


def test_more_memory_than_fits_by_figures_of_a_machine_that_had_swap():
    process = {
        **{
            "pid": 8732,
            "parent": 8688,
            "name": "python",
            "state": "R",
            "wchan": None,
            "cpu": 0.107,
        },
        **{"io": 6500352, "wakes": 2850.994, "rss": 83824640, "swap": 100999168},
        **{"major_faults": 3228, "frozen": False, "tracer": 0, "threads_count": 4},
    }
    frame = {"file": "/home/ada/train.py", "line": 12, "name": "<module>"}
    thread = {"tid": 8732, "is_main": True, "state": "R", "cpu": 0.1, "frames": [frame]}
    process["threads"] = [{**thread, "moved": True}]
    look = {
        **{"seconds": 0.562, "by": "py-spy", "cores": 2, "load": 6.34, "rank": 0, "step": 327},
        **{"boundary_age": 0.01, "pulse_age": 0.55, "in_loop": True, "usual_step_seconds": 0.02},
        "processes": [process],
    }
    evidence = Evidence(subject="runs/a", kind="run", is_live=True)
    evidence.beat = {"step": 327, "pace": {"usual": 0.02, "now": 0.11, "disturbed": []}}
    evidence.look = {"looks": [look], "missing": []}
    verdict = judge(evidence)
    assert verdict.cause is Cause.SLOW
    assert re.search(r"swapping: \d+ MB .* 5744 pages a second", verdict.sentence)
