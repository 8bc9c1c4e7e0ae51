"""What stands in a log, or in a record, and is not why it ended."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import RankEvidence, RunFacts
from holdfast._diagnose.evidence.gather import gather_led, gather_lives, gather_log, gather_run
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Restart, Sure
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._store.folder.attempts import write_json
from holdfast._store.folder.layout import RunLayout
from tests.unit.why_evidence import (
    CUDA,
    GROWN,
    NOW,
    TRACEBACK,
    counters,
    died,
    ended,
    printed,
    raised,
)

STEPS = "".join(f"step {number} loss 0.5\n" for number in range(1000))
OUT_OF_MEMORY = (
    "Traceback (most recent call last):\n"
    '  File "/home/a/train.py", line 7, in step\n'
    f"torch.OutOfMemoryError: {CUDA}\n"
)
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
)
START = "holdfast: runs/a: a new run (attempt 1).\n"
FINISHED = "holdfast: runs/a: trained to step 20; the last checkpoint is durable.\n"
STOPPED = "holdfast: step 7 is durable; leaving with status 143 (SIGTERM)\n"


def verdict_of(folder: Path, text: str) -> Any:
    (folder / "log").write_text(text)
    return judge_strictly(gather_log(folder / "log"))


@pytest.mark.parametrize(
    ("text", "cause", "sure"),
    [
        (STEPS + OUT_OF_MEMORY + "smaller batches\n" + STEPS, Cause.UNKNOWN, Sure.UNKNOWN),
        (STEPS + OUT_OF_MEMORY + "bar\r" * 500, Cause.UNKNOWN, Sure.UNKNOWN),
        (OUT_OF_MEMORY + "smaller batches\n" * 9, Cause.CUDA_OOM, Sure.LIKELY),
        (STEPS + OUT_OF_MEMORY, Cause.CUDA_OOM, Sure.CERTAIN),
        (STEPS + "Killed\n" + STEPS, Cause.UNKNOWN, Sure.UNKNOWN),
        (STEPS + TIME_LIMIT + STEPS + TRACEBACK, Cause.PYTHON_EXCEPTION, Sure.CERTAIN),
        (TIME_LIMIT + START + TRACEBACK, Cause.PYTHON_EXCEPTION, Sure.CERTAIN),
        (TIME_LIMIT + START + STEPS[:200] + FINISHED, Cause.FINISHED, Sure.LIKELY),
        (START + STOPPED + START + FINISHED, Cause.FINISHED, Sure.LIKELY),
        (START + FINISHED + TRACEBACK, Cause.PYTHON_EXCEPTION, Sure.CERTAIN),
        (f"<p>RuntimeError: {CUDA}</p>\n", Cause.CUDA_OOM, Sure.LIKELY),
        ("ERROR: [Errno 28] No space left on device\n", Cause.DISK_FULL, Sure.LIKELY),
    ],
)
def test_only_what_stands_at_the_end_of_a_log_ended_it(tmp_path, text, cause, sure):
    verdict = verdict_of(tmp_path, text)
    assert (verdict.cause, verdict.sure) == (cause, sure), verdict


def test_what_was_got_over_is_told_where_nothing_else_is_known(tmp_path):
    told = verdict_of(tmp_path, STEPS + OUT_OF_MEMORY + STEPS).evidence
    assert any("line 1003 is: torch.OutOfMemoryError" in line for line in told)
    assert any("went on for 1000 lines" in line for line in told)


def test_the_stacks_of_many_threads_do_not_put_a_crash_into_the_past():
    stacks = 'Thread 0x1:\n  File "/a.py", line 3 in wait\n' * 300
    (sign,) = read_signs(f"Fatal Python error: Segmentation fault\n\n{stacks}")
    assert "is_past" not in sign.details


def test_an_exception_that_was_caught_long_before_does_not_explain_a_status():
    assert judge_strictly(printed(TRACEBACK + STEPS, 3)).cause is Cause.UNKNOWN


def test_what_is_said_of_the_life_before_is_no_sign_of_this_one():
    for previous in ("the previous attempt", "the attempt before"):
        assert not read_signs(f"holdfast: {previous} ended at step 5. It raised {CUDA}\n")


def test_a_log_that_has_just_begun_and_is_written_to_is_running(tmp_path):
    path = tmp_path / "log"
    path.write_text(START)
    began = os.fork()
    if began == 0:
        with path.open("a"):
            time.sleep(30)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while not gather_log(path).is_live and time.monotonic() < deadline:
            time.sleep(0.05)
        assert gather_log(path).is_live
    finally:
        os.kill(began, 9)
        os.waitpid(began, 0)


def test_of_a_pipe_the_end_counts(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    text = ("x" * 99 + "\n") * 60_000 + TRACEBACK  # more than is kept of it
    writer = threading.Thread(target=lambda: path.write_text(text))
    writer.start()
    verdict = judge_strictly(gather_log(path))
    writer.join()
    assert verdict.cause is Cause.PYTHON_EXCEPTION


SUSPECTED = {
    "time": NOW - 500,
    "step": 3,
    "graphs": [{"holder": "losses", "where": "a.py:7", "count": 9}],
}


def test_what_was_suspected_is_told_of_an_oom_and_is_no_end_of_its_own():
    evidence = died(-9, counters=counters(1, hits=2), memory=GROWN)
    evidence.ranks[0].error = SUSPECTED
    verdict = judge_strictly(evidence)
    assert (verdict.cause, verdict.step, verdict.time) == (Cause.OOM_CGROUP, 41, NOW)
    assert "`losses` keeps 9 graphs alive (a.py:7)" in verdict.evidence
    assert "`losses` keeps 9 graphs" in verdict.advice[0]


def test_graphs_that_have_given_their_memory_back_are_not_told():
    evidence = died(-9, counters=counters(1, hits=2), memory=GROWN)
    freed = [{**SUSPECTED["graphs"][0], "freed": True}]
    evidence.ranks[0].error = {**SUSPECTED, "graphs": freed}
    assert "losses" not in str(judge_strictly(evidence))


@pytest.mark.parametrize("status", [-9, -11])
def test_what_it_raised_comes_before_how_it_was_then_ended(status):
    evidence = raised("ValueError", "bad batch")
    evidence.ranks[0].death = {"time": NOW + 1, "status": status, "counters": counters(0)}
    verdict = judge_strictly(evidence)
    assert verdict.cause is Cause.PYTHON_EXCEPTION
    assert "while it left because of that, it died of" in str(verdict.evidence)
    evidence.ranks[0].death["counters"] = counters(1, hits=1)
    if status == -9:
        assert judge_strictly(evidence).cause is Cause.OOM_CGROUP


def test_the_words_of_the_run_name_who_went_first():
    def of_ranks(how: str, *errors: dict[str, Any]) -> Any:
        evidence = ended(75, how, run=RunFacts(ranks_planned=2))
        evidence.ranks = [RankEvidence(rank=n, error=each) for n, each in enumerate(errors)]
        return judge_strictly(evidence)

    verdict = of_ranks("rank 1 on node3 failed: SystemExit: 0", {}, {})
    assert (verdict.cause, verdict.rank) == (Cause.PYTHON_EXCEPTION, 1)
    assert "sys.exit(0)" in verdict.sentence
    log = printed(
        "holdfast: leaving at once (rank 1 on n failed: ValueError: bad): step 3 is durable. "
        "Status 1.\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/a.py", line 3, in <module>\n'
        "[rank1]: ValueError: bad\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "Failures:\n[1]:\n  time      : x\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : 1 (pid: 12)\n  traceback : To enable\n----\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : x\n"
        "  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 11)\n  traceback : To enable\n"
        "=====\n",
        1,
    )
    verdict = judge_strictly(log)
    assert (verdict.cause, verdict.rank) == (Cause.PYTHON_EXCEPTION, 1), verdict


def a_run(folder: Path, **process: Any) -> RunLayout:
    layout = RunLayout(folder)
    layout.attempt(1).mkdir(parents=True)
    mine = of_process()
    known = {"pid": 4711, "started": "1", "host": mine.host, "boot": mine.boot, "namespace": "x"}
    write_json(layout.lease(1), {"process": {**known, **process}})
    write_json(layout.heartbeat(1), {"beat": 5, "time": time.time() - 3600, "step": 5})
    return layout


def test_a_folder_of_another_machine_of_the_same_name_is_no_restart_of_this_one(tmp_path):
    layout = a_run(tmp_path / "a", boot="another")
    # This machine has run since before that heartbeat, or the test cannot tell.
    with Path("/proc/uptime").open() as file:
        if float(file.read().split()[0]) < 600:
            pytest.skip("this machine has only just been started")
    write_json(layout.heartbeat(1), {"beat": 5, "time": time.time() - 610, "step": 5})
    verdict = judge_strictly(gather_run(layout.folder))
    assert (verdict.cause, verdict.sure) == (Cause.MACHINE_LOST, Sure.BY_EXCLUSION)
    write_json(layout.heartbeat(1), {"beat": 5, "time": 1_000_000_000.0, "step": 5})
    verdict = judge_strictly(gather_run(layout.folder))
    assert (verdict.cause, verdict.sure) == (Cause.MACHINE_LOST, Sure.CERTAIN)


def test_a_container_that_is_gone_is_no_lost_machine(tmp_path):
    layout = a_run(tmp_path / "a")  # of this boot, in another pid namespace
    verdict = judge_strictly(gather_run(layout.folder))
    assert (verdict.cause, verdict.sure) == (Cause.KILLED, Sure.BY_EXCLUSION)


def test_a_leader_whose_number_was_given_out_again_is_not_alive(tmp_path):
    led = {"leader_pid": os.getpid(), "host": host_name(), "ended": None, "command": ["true"]}
    write_json(tmp_path / "led.json", {**led, "began": time.time()})
    assert gather_led(tmp_path).is_live
    write_json(tmp_path / "led.json", {**led, "began": time.time() - 86400})
    assert not gather_led(tmp_path).is_live


def test_a_run_that_was_taken_over_is_not_to_be_started_again():
    verdict = judge_strictly(
        raised("RunIsLive", "runs/a: attempt 2 took over.\nIt writes no more.")
    )
    assert (verdict.cause, verdict.restart) == (Cause.ASKED, Restart.DONE)
    assert "attempt 2 took over" in verdict.sentence
    assert "goes on at step" not in str(verdict.advice)
    # One that was refused as it was opened is another thing.
    refused = raised("RunIsLive", "another process trains here", is_configuration=True)
    assert judge_strictly(refused).cause is Cause.CONFIGURATION


def test_of_an_older_attempt_it_is_said_that_the_run_has_gone_on(tmp_path):
    layout = a_run(tmp_path / "a")
    for attempt in (2, 3):
        layout.attempt(attempt).mkdir()
    write_json(layout.journal, {"event": "start", "attempt": 1})
    first, *_, newest = map(judge_strictly, gather_lives(layout.folder))
    assert "in attempt 2: holdfast why" in first.advice[-1]
    assert "gone on since" not in str(newest.advice)


def test_what_is_durable_counts_though_a_start_did_not_get_to_it(tmp_path):
    layout = a_run(tmp_path / "a")
    layout.attempt(2).mkdir()
    layout.checkpoints.mkdir()
    (layout.checkpoints / "step-000000000007-a0001").mkdir()
    assert [step for step, _, _ in layout.checkpoint_folders()] == [7]
    assert gather_run(layout.folder).run.durable_step == 7
    write_json(layout.origin(2), {"step": None})
    assert gather_run(layout.folder).run.durable_step is None


def test_a_run_that_could_not_be_opened_has_no_last_step():
    verdict = judge_strictly(raised("StateMismatch", "no", step=0, where="opening"))
    assert verdict.step is None
    assert "its last step" not in str(verdict.evidence)


def test_who_fails_at_once_after_a_resume_is_said_to_have_gone_on():
    verdict = judge_strictly(raised("ValueError", "bad", is_configuration=True))
    assert verdict.cause is Cause.CONFIGURATION
    assert "went on at step 41, and made no new step: ValueError" in verdict.sentence


def test_a_record_that_is_no_record_is_left_out(tmp_path):
    layout = a_run(tmp_path / "a")
    layout.error(1).write_text("[" * 200_000)
    layout.death(1).write_bytes(b"\xff\xfe{")
    assert gather_run(layout.folder).ranks[0].error == {}


def test_who_was_asked_to_stop_and_was_then_out_of_memory_needs_no_more_time():
    evidence = died(-9, asked="SIGTERM", counters=counters(1, hits=1), memory=GROWN)
    verdict = judge_strictly(evidence)
    assert (verdict.cause, verdict.restart) == (Cause.ASKED, Restart.DONE)
    assert "OOM killer" in verdict.sentence
    assert "more time" not in str(verdict.advice)
    crashed = judge_strictly(died(-11, asked="SIGTERM"))
    assert "it died of SIGSEGV" in crashed.sentence


THREAD = (
    "Exception in thread prefetch:\n"
    "Traceback (most recent call last):\n"
    '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner\n'
    "    self.run()\n"
    '  File "/home/a/train.py", line 7, in prefetch\n'
    "    q.put(10 / n)\n"
    "ZeroDivisionError: division by zero\n"
)
FEW_STEPS = "".join(STEPS.splitlines(keepends=True)[:20])
BROKEN = THREAD.replace("ZeroDivisionError", "BrokenPipeError")
PROCESS = THREAD.replace("Exception in thread prefetch", "Process Process-1")


def of_main(error: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/home/a/train.py", line 30, in <module>\n'
        f"    fetch()\n{error}\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        FEW_STEPS + THREAD + "step 500 loss 0.1\n" + of_main("_queue.Empty"),
        FEW_STEPS + PROCESS + of_main("RuntimeError: worker failed with 1"),
    ],
)
def test_the_exception_of_a_thread_that_led_to_that_of_the_main_one_is_the_cause(tmp_path, text):
    found = verdict_of(tmp_path, text)
    assert (found.cause, found.sure) == (Cause.PYTHON_EXCEPTION, Sure.LIKELY)
    assert "ZeroDivisionError: division by zero (in " in found.sentence
    assert "at /home/a/train.py:7 in prefetch" in found.evidence
    assert any("then its main thread raised" in each for each in found.evidence)


@pytest.mark.parametrize(
    "text",
    [
        THREAD + STEPS + of_main("ValueError: x"),
        FEW_STEPS + of_main("ValueError: x") + THREAD,
        FEW_STEPS + BROKEN + of_main("ValueError: x"),
    ],
)
def test_a_thread_that_ended_before_or_because_of_the_end_is_not_the_cause(tmp_path, text):
    found = verdict_of(tmp_path, text)
    assert (found.cause, found.sure) == (Cause.PYTHON_EXCEPTION, Sure.CERTAIN)
    assert "ValueError: x" in found.sentence


def test_an_error_of_an_exit_handler_does_not_end_a_training_that_has_finished(tmp_path):
    error = of_main("BrokenPipeError: [Errno 32] Broken pipe")
    text = f"{FEW_STEPS}Training complete in 41m 3s\nError in atexit._run_exitfuncs:\n{error}"
    assert verdict_of(tmp_path, text).cause is Cause.FINISHED


def test_what_raises_was_not_killed_by_a_word_above(tmp_path):
    text = f"{FEW_STEPS}a sample of the text:\nKilled\nin 1934\n{of_main('IndexError: 7')}"
    found = verdict_of(tmp_path, text)
    assert (found.cause, found.sure) == (Cause.PYTHON_EXCEPTION, Sure.CERTAIN)
    command = "train.sh: line 3:  9 Killed   python train.py\n"
    launcher = "subprocess.CalledProcessError: Command 'a' returned non-zero exit status 137."
    assert verdict_of(tmp_path, FEW_STEPS + command + of_main(launcher)).cause is Cause.KILLED


def test_a_child_of_multiprocessing_that_could_not_start_is_not_the_cause(tmp_path):
    child = (
        "Traceback (most recent call last):\n"
        '  File "<string>", line 1, in <module>\n'
        '  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 122, in spawn_main\n'
        "EOFError: Ran out of input\n"
    )
    found = verdict_of(tmp_path, of_main("AttributeError: Can't pickle a local object") + child)
    assert "AttributeError: Can't pickle a local object." in found.sentence


def test_the_exception_before_a_lost_peer_in_a_cleanup_is_the_cause(tmp_path):
    lost = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:7"
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one, zero = (f"{of_main(error)}" for error in ("KeyError: 'label'", lost))
    text = "".join(f"[rank1]: {line}\n" for line in f"{one}{link}{of_main(lost)}".split("\n"))
    text += "".join(f"[rank0]: {line}\n" for line in zero.split("\n"))
    found = verdict_of(tmp_path, text)
    assert (found.cause, found.rank) == (Cause.PYTHON_EXCEPTION, 1)
    assert found.sure is Sure.LIKELY
    assert "KeyError: 'label'" in found.sentence


def test_a_library_that_interrupts_its_process_is_told_by_its_own_words(tmp_path):
    said = "OpenBLAS blas_thread_init: pthread_create failed for thread 31 of 64: unavailable\n"
    found = verdict_of(tmp_path, said + of_main("KeyboardInterrupt"))
    assert found.cause is Cause.ENVIRONMENT
    assert "pthread_create failed" in found.sentence


@pytest.mark.parametrize("name", ["Trial {}", "Trial train_{:05}"])
def test_a_search_goes_on_after_a_trial_that_failed(tmp_path, name):
    done = [f"{name.format(number)} finished with value 0.5\n" for number in range(9)]
    error = of_main("ValueError: x").replace("<module>", "_run_trial")
    text = "".join(done[:3]) + f"{name.format(3)} failed\n{error}" + "".join(done[4:])
    assert verdict_of(tmp_path, text).cause is Cause.UNKNOWN
    assert verdict_of(tmp_path, "".join(done) + error).cause is Cause.PYTHON_EXCEPTION


def test_an_exception_that_points_above_is_not_the_cause(tmp_path):
    worker, engine = "(VllmWorker rank=3 pid=7) ERROR 07-28 ", "(APIServer pid=5) ERROR 07-28 "
    raised_first = of_main(f"torch.OutOfMemoryError: {CUDA}")
    said = "EngineDeadError: EngineCore had an issue. See stack trace (above) for the root cause."
    text = "".join(f"{worker}{line}\n" for line in raised_first.splitlines())
    text += "".join(f"{engine}{line}\n" for line in of_main(f"vllm.{said}").splitlines())
    found = verdict_of(tmp_path, text)
    assert (found.cause, found.rank) == (Cause.CUDA_OOM, 3), found


def test_an_error_that_a_script_logged_after_its_training_did_not_end_it(tmp_path):
    logged = of_main("MlflowException: no answer").replace("<module>", "log_model")
    done = "2026-04-01 11:00:00 INFO training complete, best 0.44\n"
    found = verdict_of(tmp_path, STEPS + done + logged + "INFO saved\nINFO exiting\n")
    assert (found.cause, found.sure) == (Cause.FINISHED, Sure.LIKELY), found
    assert any("MlflowException: no answer" in line for line in found.evidence)
    # The script did not go on after these.
    for error in (logged, logged.replace("log_model", "<module>") + "bye\n"):
        assert verdict_of(tmp_path, STEPS + done + error).cause is Cause.PYTHON_EXCEPTION


def test_an_error_that_a_script_logged_and_went_on_after_is_not_certain(tmp_path):
    logged = of_main("ValueError: x").replace("<module>", "evaluate")
    assert verdict_of(tmp_path, STEPS + logged).sure is Sure.CERTAIN
    assert verdict_of(tmp_path, STEPS + logged + "saved model.pt\n").sure is Sure.LIKELY


def test_a_search_whose_last_trial_failed_has_finished(tmp_path):
    error = of_main("ValueError: x").replace("<module>", "_run_trial")
    text = "Trial 3 finished with value: 0.5\n" + error + "Trial 4 failed with value None.\n"
    found = verdict_of(tmp_path, text + "Number of finished trials:  5\nBest trial: 3\n")
    assert (found.cause, found.sure) == (Cause.FINISHED, Sure.LIKELY), found


@pytest.mark.parametrize(
    "report",
    [
        "RuntimeError: initialization failed. See root cause above.",
        "RuntimeError: cancelled",
        "asyncio.exceptions.CancelledError",
    ],
)
def test_what_another_process_was_told_is_not_the_cause(tmp_path, report):
    found = verdict_of(tmp_path, of_main("KeyError: 'x'") + "shutting down\n" + of_main(report))
    assert "KeyError: 'x'" in found.sentence
    assert (
        report.partition(":")[0].rpartition(".")[2]
        in verdict_of(tmp_path, of_main(report)).sentence
    )


def test_an_internal_error_of_nccl_is_told_by_its_warning(tmp_path):
    error = "DistBackendError: NCCL error in: x.cpp:2251, internal error - please report this"
    warning = "n1:7:7 [0] NCCL WARN Bootstrap : no socket interface found\n"
    found = verdict_of(tmp_path, warning + of_main(f"torch.distributed.{error}"))
    assert found.cause is Cause.RENDEZVOUS
    assert any("no socket interface" in line for line in found.evidence)


def test_hydra_prints_an_exception_without_its_outermost_frames_and_leaves(tmp_path):
    error = of_main("ValueError: lr too high").replace("<module>", "main")
    text = f"Error executing job with overrides: ['lr=1']\n{error}\nSet the environment variable\n"
    assert verdict_of(tmp_path, STEPS + text).sure is Sure.CERTAIN
