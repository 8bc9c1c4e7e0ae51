"""A run that has not ended: it gets on, is slow, is held, or hangs."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Restart, Sure
from holdfast._keeper.hangs.judge import held_by
from tests.unit.hang_looks import (
    IDLE_LOADER_WORKER,
    LOADER,
    LOADER_WORKER,
    alone,
    collective,
    look,
    process,
    thread,
)
from tests.unit.why_evidence import GB, NOW

Record = dict[str, Any]

WORKING = look(process(100, thread("train.py:9 step", moved=True), cpu=0.9), boundary_age=0.02)
# It waits for a processor for a third of the time.
WAITING = {
    "processes": [process(100, thread("train.py:9 step", moved=True, waits=0.33), cpu=0.6)],
}
LOOP = ("train.py:10 project", "train.py:19 main")
STUCK = alone("train.py:10 two")


def live(*looks: Record, pace: Record | None = None, **beat: Any) -> Evidence:
    usual = {"usual": 0.05, "now": 0.052, "disturbed": []}
    told = {"step": 40, "durable_step": 30, "hang": None, "pace": {**usual, **(pace or {})}}
    return Evidence(
        kind="run",
        is_live=True,
        attempt=1,
        beat={**told, **beat},
        look={"looks": list(looks), "missing": []} if looks else {},
        lease={"process": {"host": "node3"}},
    )


def test_all_is_well():
    verdict = judge_strictly(live(WORKING))
    assert verdict.cause is Cause.RUNNING
    assert verdict.sentence == (
        "It has not ended: it is running, at step 40, with 52 ms a step, as ever."
    )
    assert (verdict.step, verdict.durable_step, verdict.host) == (40, 30, "node3")


def test_one_that_has_become_slow_long_ago_is_not_said_to_be_as_ever():
    verdict = judge_strictly(live(WORKING, pace={"best": 0.005}))
    assert verdict.sentence.endswith("with 52 ms a step; in its fastest time it was 5 ms.")


def test_nothing_but_an_old_heartbeat_is_no_error():
    verdict = judge_strictly(Evidence(kind="run", is_live=True, beat={"step": 3}))
    assert verdict.sentence == "It has not ended: it is running, at step 3."


def test_a_process_whose_steps_nobody_counts_is_told_by_what_it_does():
    counted = ("boundary_age", "step", "mark", "usual_step_seconds")
    seen = {key: value for key, value in STUCK.items() if key not in counted}
    evidence = Evidence(kind="pid", is_live=True, look={"looks": [seen], "missing": []})
    verdict = judge_strictly(evidence)
    assert verdict.cause is Cause.RUNNING
    assert "running; just now it waits" in verdict.sentence
    assert verdict.sure is Sure.LIKELY  # its steps are not counted
    assert "train.py:10 in two()" in verdict.sentence


def test_the_lines_to_type_have_the_folder():
    evidence = live(STUCK, hang={"since": NOW, "cause": "hang-lock", "sentence": "x"})
    evidence.subject = "runs/my run"
    advice = judge_strictly(evidence).advice
    assert any(line.endswith("holdfast stacks 'runs/my run' --all") for line in advice)


def test_a_phase_is_no_hang():
    evaluating = {**STUCK, "rests": True, "phase": "eval", "boundary_age": 300.0}
    verdict = judge_strictly(live(evaluating, phase="eval"))
    assert verdict.cause is Cause.RUNNING
    assert "in the phase eval" in verdict.sentence


def test_a_hang_that_the_watch_has_found():
    told = {"since": NOW, "cause": "hang-lock", "sentence": "No step for 21 s: x."}
    verdict = judge_strictly(live(STUCK, hang=told))
    assert (verdict.cause, verdict.restart) == (Cause.HANG_LOCK, Restart.BACKOFF)
    assert "train.py:10 in two()" in verdict.sentence
    assert any("holdfast stacks" in line for line in verdict.advice)
    assert any("--hang-timeout" in line for line in verdict.advice)


def test_a_hang_without_a_fresh_look_is_told_by_the_records():
    told = {"since": NOW, "cause": "hang-lock", "sentence": "No step for 21 s: x."}
    verdict = judge_strictly(live(hang=told))
    assert (verdict.cause, verdict.sentence) == (Cause.HANG_LOCK, "No step for 21 s: x.")
    evidence = live(hang=told)
    evidence.hang = {"ended": None, "looks": [STUCK], "cause": "hang-lock"}
    assert "train.py:10 in two()" in judge_strictly(evidence).sentence


def test_the_record_of_a_hang_is_there_before_the_heartbeat_tells_it():
    evidence = live({**STUCK, "time": NOW + 22, "boundary_age": 22.0}, time=NOW + 20)
    evidence.hang = {"ended": None, "began": NOW, "found": NOW + 21, "looks": [STUCK]}
    assert judge_strictly(evidence).cause is Cause.HANG_LOCK
    evidence.look = {}
    assert judge_strictly(evidence).cause is Cause.HANG_LOCK


def test_one_after_which_a_step_was_made_is_over_whatever_the_record_says():
    evidence = live({**WORKING, "time": NOW + 60}, time=NOW + 60)
    evidence.hang = {"ended": None, "began": NOW, "found": NOW + 21, "looks": [STUCK]}
    assert judge_strictly(evidence).cause is Cause.RUNNING
    evidence.look = {}
    assert judge_strictly(evidence).cause is Cause.RUNNING


def test_a_hang_that_computes_is_one_as_long_as_its_stack_stands():
    told = {"since": NOW, "cause": "hang-computing", "sentence": "x."}
    busy = thread("train.py:4 fit", state="R", cpu=1.0)
    verdict = judge_strictly(live(look(process(100, busy, state="R", cpu=1.0)), hang=told))
    assert verdict.cause is Cause.HANG_COMPUTING
    moving = {**busy, "moved": True}
    verdict = judge_strictly(live(look(process(100, moving, state="R", cpu=1.0)), hang=told))
    assert verdict.cause is Cause.SLOW


def test_what_stands_is_named_before_the_watch_calls_it_a_hang():
    verdict = judge_strictly(live({**STUCK, "boundary_age": 9.0}))
    assert verdict.cause is Cause.HANG_LOCK
    assert any("does not call it one yet" in line for line in verdict.evidence)
    unknown = live({**STUCK, "usual_step_seconds": None, "patience": 1800}, pace={"usual": None})
    verdict = judge_strictly(unknown)  # after too few steps to know how long one takes
    assert verdict.cause is Cause.HANG_LOCK
    assert any("before 30 min are over" in line for line in verdict.evidence)
    assert verdict.sentence.startswith("No step for ")
    short = judge_strictly(live({**STUCK, "boundary_age": 0.06}))
    assert short.cause is Cause.RUNNING


@pytest.mark.parametrize(
    ("seen", "cause", "said"),
    [
        ({**STUCK, "paused": "pdb"}, Cause.DEBUGGER, "held by pdb at train.py:10"),
        (look(process(100, thread("a.py:1"), state="T")), Cause.STOPPED, "kill -CONT 100"),
        (look(process(100, thread("a.py:1"), frozen=True)), Cause.FROZEN, "frozen"),
        (
            look(process(100, thread("a.py:1"), tracer=9, tracer_name="strace")),
            Cause.DEBUGGER,
            "strace (pid 9)",
        ),
    ],
)
def test_what_somebody_holds_is_no_hang(seen, cause, said):
    verdict = judge_strictly(live(seen))
    assert (verdict.cause, verdict.restart) == (cause, Restart.DONE)
    assert said in verdict.sentence


def test_a_batch_that_a_worker_could_not_send_is_told_with_the_shm_that_was_full():
    idle = process(101, thread(*IDLE_LOADER_WORKER, wchan="poll_schedule_timeout"))
    seen = look(process(100, thread(*LOADER)), idle, shm={"free": 60 << 20, "total": 64 << 20})
    verdict = judge_strictly(live(seen))
    assert verdict.cause is Cause.HANG_LOADER
    assert "A batch is lost" in verdict.sentence
    assert "a full /dev/shm, which has only 67 MB" in verdict.sentence
    evidence = live(seen)
    evidence.signs = read_signs(
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_16_27_61>: No space "
        "left on device (28)\n"
    )
    verdict = judge_strictly(evidence)
    assert (verdict.cause, verdict.sure) == (Cause.SHM_FULL, Sure.LIKELY)
    assert verdict.sentence.startswith("/dev/shm was full, and a worker of the data loader could")
    assert "train.py:30 in train()" in verdict.sentence
    assert any("--shm-size=8g" in line for line in verdict.advice)


PDB = "py/pdb.py:366 Pdb.interaction"


def test_a_debugger_in_a_worker_is_told_with_the_line_of_the_worker():
    worker = process(101, thread(PDB, "data.py:7 Samples.__getitem__", *LOADER_WORKER))
    verdict = judge_strictly(live(look(process(100, thread(*LOADER)), worker)))
    assert verdict.cause is Cause.DEBUGGER
    assert "its process (pid 101) is held by pdb at data.py:7 in __getitem__()" in verdict.sentence
    assert held_by("PAUSED", look(process(100), worker)) == "pdb in its process 101"


def test_a_debugpy_that_waits_for_a_client_is_told_as_such():
    waits = "/venv/site-packages/debugpy/_vendored/pydevd/pydevd.py:1 _wait_for_attach"
    verdict = judge_strictly(live(alone(waits, "train.py:3 f")))
    assert "held by debugpy, which waits for a client at train.py:3 in f()" in verdict.sentence
    assert "Attach an editor to it" in verdict.sentence


def test_a_debugger_is_known_by_the_heartbeat_alone():
    verdict = judge_strictly(live(paused={"by": "debugpy", "rank": 2, "since": NOW}))
    assert (verdict.cause, verdict.rank) == (Cause.DEBUGGER, 2)
    assert verdict.sentence.startswith("Rank 2 is held by debugpy.")


def test_a_profiler_that_makes_it_slow_is_named_with_its_own_undisturbed_pace():
    seen = {**WORKING, "disturbed": ["torch.profiler"], "boundary_age": 0.6}
    verdict = judge_strictly(live(seen, pace={"now": 1.0, "disturbed": ["torch.profiler"]}))
    assert (verdict.cause, verdict.restart) == (Cause.SLOW, Restart.DONE)
    assert verdict.sentence == (
        "It is slow: a step takes 1.0 s, 20 times its usual 50 ms; torch.profiler is at work in "
        "it. Give torch.profiler a schedule, so that it records a few steps only."
    )


def test_what_a_profiler_uses_itself_is_not_named_in_its_place():
    names = ["sys.setprofile", "torch.profiler", "a TensorBoard writer"]
    verdict = judge_strictly(live(WORKING, pace={"now": 1.0, "disturbed": names}))
    assert "torch.profiler is at work" in verdict.sentence
    assert not any("sys.setprofile" in line for line in verdict.advice)


def test_the_memory_of_a_profiler_is_told_against_that_of_before():
    pace = {"disturbed": ["memory recording"], "memory": {"usual": GB, "now": 3 * GB}}
    verdict = judge_strictly(live(WORKING, pace=pace))
    assert verdict.cause is Cause.RUNNING
    assert "3.0 GB instead of 1.0 GB because of memory recording" in verdict.sentence
    assert any("_record_memory_history" in line for line in verdict.advice)


def test_too_many_threads_for_the_cores():
    threads = [thread("t.py:1 f", name=f"omp-{n}", state="R", cpu=0.08) for n in range(12)]
    main = thread("py/threading.py:1119 Thread.join", "train.py:3 step")
    seen = look(process(100, main, *threads, cpu=0.97, state="S"), cores=1, load=12.0)
    verdict = judge_strictly(live(seen, pace={"now": 0.9}))
    assert verdict.cause is Cause.SLOW
    assert "12 threads of it want to run on 1 core" in verdict.sentence
    assert "OMP_NUM_THREADS=1" in verdict.sentence


def test_swapping_is_slow_whatever_the_pace():
    swapped = process(100, thread("a.py:4 f", state="D"), major_faults=900, swap=3 * GB, state="D")
    verdict = judge_strictly(live(look(swapped, boundary_age=0.1)))
    assert verdict.cause is Cause.SLOW
    assert verdict.sentence.startswith("It is slow: it is swapping: 3.0 GB of it are on disk")


def test_a_storm_of_recompilations():
    main = thread(
        "torch/_dynamo/convert_frame.py:600 _compile",
        "torch/_dynamo/eval_frame.py:736 compile_wrapper",
        "model.py:12 forward",
        state="R",
        moved=True,
        cpu=1.0,
        wchan=None,
    )
    seen = look(process(100, main, cpu=1.0), compiles=31)
    verdict = judge_strictly(live(seen, pace={"now": 4.0}))
    assert verdict.cause is Cause.SLOW
    assert "again and again at model.py:12 in forward(): 31 pieces" in verdict.sentence
    assert "TORCH_LOGS=recompiles" in verdict.sentence


def test_a_slow_loader():
    worker = process(8211, thread("data.py:9 decode", *LOADER_WORKER, moved=True, cpu=1.0), cpu=1.0)
    seen = look(process(100, thread(*LOADER)), worker, boundary_age=0.5)
    verdict = judge_strictly(live(seen, pace={"now": 0.8}))
    assert verdict.cause is Cause.SLOW
    assert "; it waits for its data loader at train.py:30" in verdict.sentence
    assert "data.py:9 in decode()" in verdict.sentence


def test_slow_without_a_reason_says_so():
    verdict = judge_strictly(live(WORKING, pace={"now": 1.0}))
    assert verdict.cause is Cause.SLOW
    assert "nothing is seen that would explain it" in verdict.sentence
    assert verdict.advice


def test_twenty_times_slower_is_slow_though_it_has_been_so_for_long():
    seen = {**WORKING, "usual_step_seconds": 1.0}
    verdict = judge_strictly(live(seen, pace={"usual": 1.0, "now": 1.0, "best": 0.05}))
    assert verdict.cause is Cause.SLOW
    assert "20 times" in verdict.sentence


@pytest.mark.parametrize(
    ("seen", "beat", "told"),
    [
        ({"cpu_quota": {"cores": 0.5, "throttled": 0.93}}, {}, "may use 0.5 cores"),
        ({**WAITING, "load": 52.0, "cores": 4}, {}, "a load of 52 on 4 cores"),
        ({}, {"straggler": {"rank": 3, "host": "n7", "seconds": 0.4}}, "rank 3 on n7 comes 400 ms"),
    ],
)
def test_what_makes_it_slow_is_named(seen, beat, told):
    verdict = judge_strictly(live({**WORKING, **seen}, pace={"now": 0.9}, **beat))
    assert verdict.cause is Cause.SLOW
    assert told in verdict.sentence
    assert verdict.advice
    # As fast as ever nothing of that matters.
    assert judge_strictly(live({**WORKING, **seen}, **beat)).cause is Cause.RUNNING


def test_the_straggler_that_only_the_journal_has_is_named():
    evidence = live(WORKING, pace={"now": 0.9})
    evidence.journal = [{"event": "straggler", "rank": 2, "seconds": 0.3}]
    assert "rank 2 comes 300 ms later" in judge_strictly(evidence).sentence


def test_a_load_is_no_reason_for_one_that_sleeps():
    """It reads a record per second: that is what takes the time."""
    main = thread("train.py:8 read", wchan="anon_pipe_read", call="read", call_path="/data/t.bin")
    seen = look(process(100, main), boundary_age=0.5, load=14.0)
    verdict = judge_strictly(live(seen, pace={"usual": 0.02, "now": 1.0}))
    assert verdict.cause is Cause.SLOW
    assert verdict.sentence.endswith(
        "; it waits for a message of another process (/data/t.bin) at train.py:8 in read(). "
        "See what the other process does, and give the wait a timeout."
    )
    assert "load" not in "".join(verdict.evidence)


def test_a_rank_that_waits_for_the_others_is_no_reason():
    main = thread(*collective("all_reduce", 24))
    seen = look(process(100, main), boundary_age=0.5, load=14.0)
    verdict = judge_strictly(live(seen, pace={"usual": 0.02, "now": 1.0}))
    assert verdict.sentence.endswith("nothing is seen that would explain it.")


def _looping(**more: Any) -> Record:
    main = thread(*LOOP, state="R", wchan=None, waits=0.63, cpu=0.4, moved=True, lines=[10, 9, 10])
    seen = look(process(100, main, cpu=0.4, state="R"), boundary_age=99.0, load=14.0)
    return {**seen, "step_cpu": 58.0, "step_waited": 37.0, **more}


def test_one_that_computes_far_more_than_in_a_usual_step_is_not_slow_because_of_others():
    verdict = judge_strictly(live(_looping()))
    assert verdict.cause is Cause.SLOW, "the watch has not called it a hang"
    assert "; it has computed for 58 s in this step, and is now at train.py:10" in verdict.sentence
    told = "".join([verdict.sentence, *verdict.evidence])
    assert "load" not in told
    assert "other processes" not in told


def test_one_that_only_waits_for_a_processor_is_slow_because_of_others():
    verdict = judge_strictly(live(_looping(step_cpu=0.3, step_waited=98.0)))
    assert verdict.cause is Cause.SLOW
    assert "it waits for a processor 63% of the time" in verdict.sentence


def test_a_loop_over_two_lines_that_the_watch_has_found_is_a_hang():
    hang = {"began": NOW - 99, "found": NOW - 20, "ended": None, "patience": 8.0, "how": "given"}
    evidence = live(_looping(), hang={"since": NOW - 99, "cause": "hang-computing"})
    evidence.hang = {**hang, "cause": "hang-computing", "looks": [_looping()]}
    verdict = judge_strictly(evidence)
    assert verdict.cause is Cause.HANG_COMPUTING
    assert (
        "it computes at train.py:9 and 10 in project() with 0.4 cores and does not leave that "
        "function. See whether that loop can end"
    ) in verdict.sentence


def test_ranks_wait_for_one_that_loops_over_two_lines():
    waiting = {**look(process(99, thread(*collective("all_reduce", 24)))), "rank": 0}
    hang = {"began": NOW - 99, "found": NOW - 20, "ended": None}
    evidence = live(waiting, _looping(rank=1), hang={"since": NOW - 99})
    evidence.hang = {**hang, "cause": "hang-rank", "looks": [waiting, _looping(rank=1)]}
    verdict = judge_strictly(evidence)
    assert (verdict.cause, verdict.rank) == (Cause.HANG_RANK, 1)
    assert "computes at train.py:9 and 10 in project()" in verdict.sentence


@pytest.mark.parametrize(("age", "sure"), [(2.0, Sure.CERTAIN), (290.0, Sure.LIKELY)])
def test_a_long_step_without_a_measure_is_not_called_sound_for_certain(age, sure):
    pace = {"usual": None, "now": None}
    seen = {**WORKING, "boundary_age": age, "usual_step_seconds": None}
    verdict = judge_strictly(live(seen, pace=pace))
    assert (verdict.cause, verdict.sure) == (Cause.RUNNING, sure)
    assert ("this step has taken" in verdict.sentence) == (age > 60)
