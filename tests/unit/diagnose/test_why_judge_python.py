"""From evidence to a verdict: what Python tells of its end, with or without holdfast."""

from __future__ import annotations

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Sure, Verdict
from tests.unit.why_evidence import (
    CUDA,
    DISK,
    GB,
    NOW,
    ROOMY,
    TRACEBACK,
    WORKER_KILLED,
    check,
    counters,
    ended,
    printed,
    raised,
    sample,
)

TABLE: dict[str, tuple[Evidence, Cause, Sure]] = {
    "exception": (raised("ValueError", "x"), Cause.PYTHON_EXCEPTION, Sure.CERTAIN),
    "exception before the first step": (
        raised("KeyError", "'lr'", is_configuration=True),
        Cause.CONFIGURATION,
        Sure.CERTAIN,
    ),
    "the network, before the first step": (
        raised("URLError", "no route", is_configuration=True),
        Cause.PYTHON_EXCEPTION,
        Sure.CERTAIN,
    ),
    "could not start": (
        ended(1, "could not start: StateMismatch: w has another shape"),
        Cause.CONFIGURATION,
        Sure.CERTAIN,
    ),
    "exception in the journal alone": (
        ended(1, "ValueError: planted"),
        Cause.PYTHON_EXCEPTION,
        Sure.CERTAIN,
    ),
    "exception of a script without holdfast": (
        printed(TRACEBACK, 1),
        Cause.PYTHON_EXCEPTION,
        Sure.CERTAIN,
    ),
    "a module that is not there": (
        printed(
            'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n'
            "ModuleNotFoundError: No module named 'tokenizer'\n",
            1,
        ),
        Cause.ENVIRONMENT,
        Sure.CERTAIN,
    ),
    "argparse": (
        printed(
            "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --x\n", 2
        ),
        Cause.CONFIGURATION,
        Sure.CERTAIN,
    ),
    "argparse in a run": (
        raised("SystemExit", "2", exit_code="2", is_configuration=True),
        Cause.CONFIGURATION,
        Sure.LIKELY,
    ),
    "sys.exit with a text": (
        raised("SystemExit", "no data", exit_code="'no data'"),
        Cause.PYTHON_EXCEPTION,
        Sure.CERTAIN,
    ),
    "sys.exit(256)": (
        raised("SystemExit", "256", exit_code="256"),
        Cause.LYING_STATUS,
        Sure.CERTAIN,
    ),
    "status 0 after a traceback": (printed(TRACEBACK, 0), Cause.LYING_STATUS, Sure.LIKELY),
    "status 0 after a traceback that it got over": (
        printed(TRACEBACK + "went on\n" * 3, 0),
        Cause.FINISHED,
        Sure.LIKELY,
    ),
    "a worker was killed, and nobody knows more": (
        raised("RuntimeError", WORKER_KILLED),
        Cause.WORKER_DIED,
        Sure.CERTAIN,
    ),
    "a worker was killed by the OOM killer": (
        raised("RuntimeError", WORKER_KILLED, counters=counters(1, hits=1)),
        Cause.OOM_WORKER,
        Sure.LIKELY,
    ),
    "a worker was killed with memory full": (
        raised("RuntimeError", WORKER_KILLED, memory=sample(0, 1.99 * GB)),
        Cause.OOM_WORKER,
        Sure.LIKELY,
    ),
    "a worker of a script without holdfast, by the OOM killer": (
        printed(
            f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n'
            f"RuntimeError: {WORKER_KILLED}\n",
            1,
            counters=counters(1, hits=1),
            processes=[{"pid": 99, "comm": "pt_data_worker", "status": -9, "ended": NOW - 1}],
        ),
        Cause.OOM_WORKER,
        Sure.LIKELY,
    ),
    "a worker crashed": (
        raised(
            "RuntimeError", "DataLoader worker (pid 99) is killed by signal: Segmentation fault."
        ),
        Cause.WORKER_DIED,
        Sure.CERTAIN,
    ),
    "a worker left, as a lost connection": (
        raised(
            "ConnectionResetError",
            "[Errno 104] Connection reset by peer",
            frames=[["/x/site-packages/torch/multiprocessing/reductions.py", 5, "rebuild"]],
        ),
        Cause.WORKER_DIED,
        Sure.LIKELY,
    ),
    "a worker left, as a lost file": (
        raised(
            "FileNotFoundError",
            "[Errno 2] No such file or directory",
            frames=[["/x/torch/utils/data/dataloader.py", 5, "_next_data"]],
            workers=[{"pid": 99, "alive": False, "exitcode": 3}],
        ),
        Cause.WORKER_DIED,
        Sure.CERTAIN,
    ),
    "a worker died of a full shm": (
        raised(
            "RuntimeError",
            "DataLoader worker (pid 99) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory.",
        ),
        Cause.SHM_FULL,
        Sure.LIKELY,
    ),
    "full shm": (
        raised(
            "RuntimeError",
            "unable to allocate shared memory(shm) for file </torch_1_2>: No "
            "space left on device (28)",
            shm={"free": 0, "total": 64 << 20},
        ),
        Cause.SHM_FULL,
        Sure.LIKELY,
    ),
    "full disk": (
        raised("OSError", "[Errno 28] No space left on device: '/data/x'", disks=[DISK]),
        Cause.DISK_FULL,
        Sure.CERTAIN,
    ),
    "full disk in torch.save": (
        raised(
            "RuntimeError",
            "[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598",
            disks=[ROOMY, DISK],
        ),
        Cause.DISK_FULL,
        Sure.LIKELY,
    ),
    "cuda": (raised("OutOfMemoryError", CUDA), Cause.CUDA_OOM, Sure.CERTAIN),
    "cuda error": (
        raised("AcceleratorError", "CUDA error: device-side assert triggered"),
        Cause.CUDA_ERROR,
        Sure.CERTAIN,
    ),
    "environment": (
        raised("RuntimeError", "Found no NVIDIA driver on your system."),
        Cause.ENVIRONMENT,
        Sure.CERTAIN,
    ),
    "rendezvous": (
        raised(
            "DistNetworkError",
            "The server socket has failed to listen on any local network "
            "address. port: 29500, name: EADDRINUSE, message: address already in use",
        ),
        Cause.RENDEZVOUS,
        Sure.CERTAIN,
    ),
    "nan": (raised("ValueError", "loss is nan"), Cause.BAD_TRAINING, Sure.LIKELY),
    "a breakpoint": (raised("BdbQuit", ""), Cause.DEBUGGER, Sure.CERTAIN),
}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "or there was no terminal to answer at"),
        ("Caught BdbQuit in DataLoader worker process 0.\nOriginal …", "num_workers=0"),
    ],
)
def test_a_breakpoint_that_nobody_could_answer_is_named(message, said):
    verdict = judge_strictly(raised("BdbQuit", message, frames=[["/a/data.py", 7, "__getitem__"]]))
    assert "ended at a breakpoint (breakpoint() or pdb), at /a/data.py:7" in verdict.sentence
    assert said in " ".join([verdict.sentence, *verdict.advice])


@pytest.mark.parametrize("name", TABLE)
def test_each_death_has_its_verdict(name):
    check(TABLE[name])


def test_cuda_tells_sizes_fragments_and_kept_graphs():
    evidence = raised(
        "OutOfMemoryError",
        CUDA,
        gpu={
            "device": 0,
            "largest": [
                {
                    "bytes": GB,
                    "shape": [9, 9],
                    "dtype": "torch.float32",
                    "name": "encoder.weight",
                    "count": 2,
                }
            ],
        },
        graphs=[{"holder": "losses", "where": "train.py:12 in train", "count": 412}],
    )
    verdict = judge_strictly(evidence)
    told = "\n".join(verdict.evidence)
    assert "2.1 GB more did not fit into its 11 GB" in verdict.sentence
    assert "encoder.weight 9×9 float32: 1.0 GB" in told
    assert "`losses` keeps 412 graphs alive (train.py:12 in train)" in told
    assert "fragmentation" in told
    assert any("expandable_segments:True" in line for line in verdict.advice)
    assert any("loss.item()" in line for line in verdict.advice)


def of_log(text: str) -> Verdict:
    return judge_strictly(Evidence(kind="log", output=text, signs=read_signs(text)))


def test_the_drivers_line_of_a_broken_gpu_is_told_beside_the_exception() -> None:
    error = "RuntimeError: CUDA error: unspecified launch failure\n"
    xid = "[12.3] NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.\n"
    found = of_log(xid + TRACEBACK.replace("ValueError: bad news\n", error))
    assert found.cause is Cause.CUDA_ERROR
    assert any("Xid" in each for each in found.evidence)
    assert any("The GPU itself failed" in each for each in found.advice)


def test_a_message_that_refers_to_its_cause_is_told_with_it() -> None:
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    first = TRACEBACK.replace("ValueError: bad news", "DistNetworkError: no answer from node0")
    last = TRACEBACK.replace(
        "ValueError: bad news", "RendezvousConnectionError: No store. See inner exception."
    )
    found = of_log(first + link + last)
    assert found.cause is Cause.RENDEZVOUS
    assert "no answer from node0" in found.sentence


def test_a_pools_dead_worker_gets_no_advice_for_a_data_loader() -> None:
    said = "concurrent.futures.process.BrokenProcessPool: A process in the process pool was "
    said += "terminated abruptly while the future was running or pending."
    found = judge_strictly(printed(TRACEBACK.replace("ValueError: bad news", said), 1))
    assert found.cause is Cause.WORKER_DIED
    assert "num_workers" not in "\n".join(found.advice)


def test_a_crash_below_a_process_that_lived_on_is_not_its_own() -> None:
    dump = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/home/a/decode.py", line 9 in decode\n\n'
    )
    error = "subprocess.CalledProcessError: Command 'a' died with <Signals.SIGSEGV: 11>."
    found = judge_strictly(printed(dump + TRACEBACK.replace("ValueError: bad news", error), 1))
    assert found.cause is Cause.SEGFAULT
    assert found.sentence.startswith("A process that the training process (pid 4711 on node3) had")


KILLED = {"pid": 12, "ppid": 4711, "comm": "python", "status": -9, "ended": NOW}


@pytest.mark.parametrize(
    "error",
    [
        "_queue.Empty",
        "subprocess.CalledProcessError: Command 'a' died with <Signals.SIGKILL: 9>.",
    ],
)
def test_a_child_that_was_killed_is_told_where_its_parent_only_lost_it(error: str) -> None:
    text = TRACEBACK.replace("ValueError: bad news", error)
    found = judge_strictly(printed(text, 1, processes=[KILLED], counters=counters(0)))
    assert (found.cause, found.sure) == (Cause.KILLED, Sure.BY_EXCLUSION)
    assert "the child process (pid 12 on node3)" in found.sentence


def test_an_exception_is_not_certain_where_the_script_chose_another_status() -> None:
    found = judge_strictly(printed(TRACEBACK, 4))
    assert (found.cause, found.sure) == (Cause.PYTHON_EXCEPTION, Sure.LIKELY)


def test_a_message_that_ends_with_a_colon_is_told_with_what_it_announces() -> None:
    error = (
        "InvalidArgumentError: Graph execution error:\n\n"
        "Detected at node model/reshape defined at (most recent call last):\n"
        '  File "train.py", line 8, in <module>\n\n'
        "Input to reshape has 21504 values, but the requested shape has 24576\n"
    )
    found = of_log(TRACEBACK.replace("ValueError: bad news\n", error))
    assert "Input to reshape has 21504 values" in found.sentence


def test_a_failed_assertion_on_the_gpu_is_told():
    asserted = "Loss.cu:250: nll_loss: block: [0,0,0] Assertion `t < n_classes` failed.\n"
    error = "RuntimeError: CUDA error: device-side assert triggered"
    text = asserted * 30 + TRACEBACK.replace("ValueError: bad news", error)
    verdict = judge_strictly(printed(text, 1))
    assert verdict.cause is Cause.CUDA_ERROR
    assert any("`t < n_classes`" in line for line in verdict.evidence), verdict


@pytest.mark.parametrize(
    "said",
    [
        "Message: Pod ephemeral local storage usage exceeds the total limit of 20Gi.",
        'Usage of EmptyDir volume "cache" exceeds the limit "20Gi".',
    ],
)
def test_a_pod_that_used_too_much_disk_was_not_cut_short(said):
    verdict = judge_strictly(printed(f"{said}\n", None))
    assert verdict.cause is Cause.DISK_FULL
    assert "20Gi" in verdict.sentence
    assert not any("torch.save" in line for line in verdict.evidence)


def test_what_ray_says_of_the_memory_of_a_machine_is_told():
    said = "OutOfMemoryError: Task was killed due to the node running low on memory."
    more = "Memory on the node (IP: 10.0.2.247) was 60.91GB / 62.00GB\n"
    text = TRACEBACK.replace("ValueError: bad news", f"ray.exceptions.{said}") + more
    verdict = judge_strictly(printed(text, 1))
    assert verdict.cause is Cause.OOM_MACHINE
    assert any("10.0.2.247" in line for line in verdict.evidence), verdict


def test_mpirun_names_the_node_of_a_rank_that_died():
    said = "mpirun noticed that process rank 7 with PID 28 on node gpu03 exited on signal 9."
    evidence = Evidence(kind="log", signs=read_signs(f"{said}\n"), output=said)
    verdict = judge_strictly(evidence)
    assert (verdict.cause, verdict.rank, verdict.host) == (Cause.KILLED, 7, "gpu03")
    assert "gpu03" in verdict.sentence


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        (" DUE TO TIME LIMIT", Cause.TIME_LIMIT),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", Cause.MACHINE_LOST),
        (" DUE TO PREEMPTION", Cause.PREEMPTED),
        ("", Cause.ASKED),
    ],
)
def test_a_job_that_slurm_ended_blames_none_of_its_ranks(why, cause):
    text = f"slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00{why} ***\n"
    text += "srun: error: n2: tasks 16-23: Terminated\nsrun: error: n1: tasks 0-7: Terminated\n"
    verdict = judge_strictly(Evidence(kind="log", signs=read_signs(text), output=text))
    assert (verdict.cause, verdict.rank) == (cause, None)
    assert not any(line.startswith("rank 0 ") for line in verdict.evidence), verdict


def test_stacks_without_a_pid_tell_of_none():
    text = (
        "Timeout (0:00:01)!\nThread 0x00007f1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait\n'
        '  File "/usr/lib/python3.11/queue.py", line 171 in get\n'
        '  File "/home/a/train.py", line 7 in next_batch\n'
    )
    verdict = judge_strictly(Evidence(kind="log", signs=read_signs(text), output=text))
    assert verdict.cause is Cause.HANG_LOCK
    assert not any("None" in line for line in verdict.evidence), verdict


@pytest.mark.parametrize(("path", "is_told"), [("configs/base.json", True), ("/d/a.json", False)])
def test_a_relative_path_is_told_with_the_folder_of_the_start(path, is_told):
    said = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'\n"
    text = TRACEBACK.replace("ValueError: bad news\n", said)
    verdict = judge_strictly(printed(text, 1, cwd="/home/a/jobs"))
    assert any("was started in /home/a/jobs." in each for each in verdict.advice) == is_told


def test_a_run_that_left_without_python_knowing_is_said_to():
    verdict = judge_strictly(
        Evidence(
            kind="run",
            ranks=[RankEvidence(death={"status": 7, "step": 41})],
            exit={"status": None, "how": "ended with status 7"},
            output="step 41\nholdfast: runs/a: resumed at step 40\n",
        )
    )
    assert (verdict.cause, verdict.sure) == (Cause.UNKNOWN, Sure.UNKNOWN)
    assert "status 7, without an exception or sys.exit: by os._exit()" in verdict.sentence
    assert "the last line that it printed: step 41" in verdict.evidence


def test_a_last_line_that_is_an_error_is_told_in_the_sentence():
    said = "error: dataset /d is missing: run prepare.py first"
    verdict = judge_strictly(printed(f"loading\n{said}\n", 1))
    assert verdict.cause is Cause.UNKNOWN  # sys.exit(message), or any other way to leave with 1
    assert verdict.sentence.endswith(f"left with status 1. Its last line is: {said}.")
    assert "nothing says why" in judge_strictly(printed("step 1\n", 1)).sentence
