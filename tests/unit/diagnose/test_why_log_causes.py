"""Logs whose cause stands far from their last error, or in other words than it."""

from __future__ import annotations

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Sure, Verdict


def judged(text: str) -> Verdict:
    return judge_strictly(Evidence(kind="log", signs=read_signs(text), output=text))


def raised(error: str, *frames: tuple[str, int, str], lead: str = "") -> str:
    """A traceback, as Python prints it."""
    places = frames or (("/home/ada/train.py", 7, "step"),)
    lines = ["Traceback (most recent call last):"]
    for file, line, function in places:
        lines += [f'  File "{file}", line {line}, in {function}', "    call()"]
    return "".join(f"{lead}{each}\n" for each in (*lines, *error.split("\n")))


def steps(ranks: range, first: int, last: int) -> str:
    lines = (f"[rank {r}] step {n} loss 0.5\n" for n in range(first, last) for r in ranks)
    return "".join(lines)


def timed_out(rank: int) -> str:
    return (
        f"[rank {rank}] [E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for "
        "600005 milliseconds before timing out.\n"
    )


def test_a_rank_that_fell_silent_after_its_error_did_not_get_over_it():
    error = raised("OSError: [Errno 5] Input/output error", lead="[rank 3] ")
    said = "[rank 3] rank 3 exits with status 1\n"
    end = "".join(map(timed_out, range(3))) + (
        "srun: error: n1: tasks 0-2: Aborted (core dumped)\n"
        "srun: error: n1: task 3: Exited with exit code 1\n"
    )
    text = steps(range(4), 0, 100) + error + said + steps(range(3), 100, 300) + end
    verdict = judged(text)
    assert (verdict.rank, verdict.cause) == (3, Cause.PYTHON_EXCEPTION), verdict
    assert "Input/output error" in verdict.sentence
    assert not any("told to leave" in line for line in verdict.others), verdict
    # It goes on, or it printed no progress before.
    loads = "[rank 3] reading a shard\n" * 9
    for before, after in ((range(4), range(4)), (range(1), range(1))):
        text = steps(before, 0, 100) + loads + error + steps(after, 100, 500)
        assert judged(text + timed_out(0)).cause is not Cause.PYTHON_EXCEPTION


def test_an_error_that_a_restart_of_the_workers_got_over_is_not_the_cause():
    failed = "torch.distributed.elastic: [ERROR] failed (exitcode: 1) local_rank: {} (pid: 9) of "
    again = "Worker group FAILED. {}/3 attempts left; will restart worker group\n"
    early = raised("urllib3.exceptions.ReadTimeoutError: read timed out", lead="[rank1]: ")
    late = raised("RuntimeError: shape '[3]' is invalid for input of size 4")
    fields = "  time      : 1\n  host      : n1\n  rank      : {0}\n  exitcode  : 1 (pid: 7{0})\n"
    summary = (
        f"Failures:\n[1]:\n{fields.format(1)}Root Cause (first observed failure):\n[0]:\n"
        f"{fields.format(0)}=====\n"
    )
    ends = failed.format(1) + "binary: python\n", failed.format(0) + "binary: python\n"
    text = (
        f"step 100\n{early}{ends[0]}{again.format(3)}resumed from a.pt\nstep 200\nstep 300\n"
        f"{late}{ends[1]}{again.format(2)}resumed from b.pt\n{late}{ends[1]}{summary}"
    )
    verdict = judged(text)
    assert "RuntimeError: shape '[3]' is invalid" in verdict.sentence, verdict
    assert not any("ReadTimeout" in line for line in (*verdict.evidence, *verdict.others))


REFUSED = (
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='{}', port=8123): Max retries "
    "exceeded with url: /health (Caused by NewConnectionError('[Errno 111] Connection refused'))"
)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "10.2.3.4"])
def test_a_server_beside_the_training_that_is_not_up_is_no_missing_internet(host):
    verdict = judged("starting\n" + raised(REFUSED.format(host)))
    assert (verdict.cause, verdict.sure) == (Cause.PYTHON_EXCEPTION, Sure.LIKELY), verdict
    assert f"could not reach the server at {host}:8123" in verdict.sentence
    assert not any("internet" in line for line in verdict.advice), verdict
    died = raised("RuntimeError: no room for the index", ("/home/ada/serve.py", 4, "main"))
    verdict = judged(f"Process Server-1:\n{died}" + "waiting\n" * 4 + raised(REFUSED.format(host)))
    assert "raised RuntimeError: no room for the index" in verdict.sentence, verdict
    assert "then the training process could not reach" in verdict.sentence


def test_a_server_elsewhere_is_still_one_of_the_internet():
    verdict = judged("starting\n" + raised(REFUSED.format("models.example.org")))
    assert verdict.cause is Cause.ENVIRONMENT, verdict
    assert any("internet" in line for line in verdict.advice)


MANY_PARAGRAPHS = (
    "builder.errors.BuildError: The shards could not be joined\n\n"
    "Every shard needs the same fields, but one has 2 more ({'tags'})\n\n"
    "That was found while the builder read\n\n/srv/shards/part-0031.jsonl\n\n"
    "Please make the fields of all shards equal"
)


@pytest.mark.parametrize("end", ["", "srun: error: n1: task 0: Exited with exit code 1\n"])
def test_the_paragraphs_of_a_message_belong_to_it(end):
    verdict = judged("step 1\n" + raised(MANY_PARAGRAPHS) + end)
    assert verdict.sure is Sure.CERTAIN, verdict
    assert "{'tags'}" in verdict.sentence
    assert "/srv/shards/part-0031.jsonl" in verdict.sentence
    assert not any("recovered" in line for line in verdict.evidence)


def test_what_a_script_prints_after_an_error_is_no_part_of_its_message():
    after = "\nThe last shard is left out and the others are read\nSaving the index to /srv/index\n"
    verdict = judged(raised("ValueError: bad shard") + after * 3)
    assert verdict.sure is Sure.LIKELY, verdict
    assert "/srv/index" not in verdict.sentence


def test_a_log_that_ends_inside_a_traceback_has_a_place_and_no_exception():
    text = raised("x", ("/home/ada/train.py", 9, "main"), ("/home/ada/eval.py", 57, "compute"))
    verdict = judged("step 1\n" + text.partition("    call()\nx")[0])
    assert "ends inside a traceback" in verdict.sentence, verdict
    assert "/home/ada/eval.py:57" in verdict.sentence
    assert "raised Exception" not in str(verdict)


def test_a_path_that_rich_wraps_is_one_path():
    inner = [
        "/home/ada/train.py:12 in <module>",
        "",
        "   12 \u2502   main()",
        "",
        "/home/ada/very/long/folder/of/opt",
        "imizers/own.py:145 in load",
        "",
        "   145 \u2502   raise ValueError(said)",
    ]
    box = "".join(f"\u2502 {line:<36} \u2502\n" for line in inner)
    text = f"\u256d\u2500 Traceback (most recent call last) \u2500\u256e\n{box}\u2570\u2500\u256f\n"
    verdict = judged(f"{text}ValueError: no such group\n")
    assert "at /home/ada/very/long/folder/of/optimizers/own.py:145 in load" in verdict.evidence


def test_the_place_is_the_scripts_own_where_a_worker_has_only_frames_of_libraries():
    library = "/opt/lib/python3.11/site-packages/torch/utils/data/_utils/{}.py"
    outer = raised(
        "RuntimeError: Caught RuntimeError in DataLoader worker process 2.",
        ("/home/ada/train.py", 98, "epoch"),
        (library.format("../dataloader"), 630, "__next__"),
    )
    error = "RuntimeError: stack expects each tensor to be equal size, but got [3, 8] at entry 0"
    inner = raised(error, (library.format("collate"), 162, "collate_tensor_fn"))
    verdict = judged(f"{outer}Original {inner}")
    assert "at /home/ada/train.py:98 in epoch" in verdict.evidence, verdict
    assert any("resize" in line for line in verdict.advice)


ASSERTED = (
    "/w/Loss.cu:94: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
)


def test_after_an_assertion_of_a_kernel_no_other_cause_is_advised():
    error = raised("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
    advised = " ".join(judged(ASSERTED + error).advice)
    assert "out of range" in advised, advised
    assert "memory" not in advised
    assert "broken GPU" not in advised
    assert "memory" in " ".join(judged(error).advice)


UNPICKLED = ("/opt/lib/python3.9/site-packages/torch/serialization.py", 1165, "find_class")


@pytest.mark.parametrize(
    ("frames", "advised"),
    [
        ([("/home/ada/tune.py", 5, "load"), UNPICKLED], "the code that saved it"),
        ([("/home/ada/tune.py", 5, "load")], "found first"),
    ],
)
def test_a_module_that_a_file_or_another_file_hides_is_not_to_be_installed(frames, advised):
    error = "ModuleNotFoundError: No module named 'nets.unet'; 'nets' is not a package"
    verdict = judged(raised(error, *frames))
    assert any(advised in line for line in verdict.advice), verdict
    assert not any("nstall" in line for line in verdict.advice)


def test_memory_that_nccl_does_not_get_is_that_of_the_gpu():
    error = raised(
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:3, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Failed to CUDA calloc async 9 bytes"
    )
    warned = "n1:7:8 [0] include/alloc.h:1 NCCL WARN Cuda failure 'out of memory'\n"
    verdict = judged(error + warned)
    assert (verdict.cause, verdict.sure) == (Cause.CUDA_OOM, Sure.CERTAIN), verdict
    assert any("out of memory" in line for line in verdict.evidence)
    assert judged(error).sure is Sure.LIKELY


def test_of_a_lost_peer_its_address_and_the_rank_in_all_are_told():
    said = "NET/IB : Got completion from peer 10.0.7.9<4711> with status=12 opcode=1 len=2"
    text = (
        f"n1:7:8 [2] ib.c:1 NCCL WARN {said}\n"
        "[rank10]:[E819 03:20:11.4 ProcessGroupNCCL.cpp:1] [Rank 10] watchdog thread terminated: "
        "NCCL error: remote process exited or there was a network error\n"
        "E0819 03:20:13.7 9 elastic/api.py:8] failed (exitcode: -6) local_rank: 2 (pid: 7) of "
        "binary: python\n"
    )
    verdict = judged(text)
    assert (verdict.rank, verdict.cause) == (10, Cause.PEER_LOST), verdict
    assert "10.0.7.9" in verdict.sentence
    assert "retries" in verdict.sentence


def test_a_thread_that_failed_did_not_end_its_rank():
    thread = raised(
        "IndexError: index 9 is out of bounds",
        ("/usr/lib/python3.11/threading.py", 1045, "_bootstrap_inner"),
        ("/home/ada/feed.py", 8, "run"),
        lead="[rank 3] ",
    )
    said = "[rank 3] 10:00:03 ERROR feed: Exception in thread Feeder:\n"
    verdict = judged(said + thread + "".join(map(timed_out, range(3))))
    assert (verdict.rank, verdict.sure) == (3, Sure.LIKELY), verdict
    assert "in thread Feeder" in verdict.sentence
    assert not any("ended by itself" in line for line in verdict.evidence)


def test_figures_that_were_no_numbers_come_before_the_error_that_they_cause():
    bad = "{'loss': 0.0, 'margin': nan, 'score': nan, 'epoch': 0.%d}\n"
    error = raised("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0")
    good = "{'loss': 0.7, 'margin': 0.1, 'score': 0.2, 'epoch': 0.0}\n"
    verdict = judged(good + bad % 1 + bad % 2 + error)
    assert verdict.cause is Cause.BAD_TRAINING, verdict
    assert "from line 2 on" in verdict.sentence
    assert judged(good + error).cause is Cause.PYTHON_EXCEPTION


@pytest.mark.parametrize(
    ("percent", "cause"), [("93.1", Cause.OOM_MACHINE), ("41.0", Cause.KILLED)]
)
def test_memory_that_was_nearly_full_is_told_of_a_sigkill(percent, cause):
    text = f"CPU Virtual Memory:  used = 58.4 GB, percent = {percent}%\nexits with return code = -9"
    verdict = judged(text + "\n")
    assert verdict.cause is cause, verdict
    assert "certain" not in verdict.sure.value


def test_the_memory_monitor_of_ray_names_the_actor_the_machine_and_the_largest_process():
    error = raised(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.1.1.5, ID: ab) where the task (actor ID: cd, name=Arm.reset, "
        "pid=411, memory used=2GB) was running was 61GB / 64GB (0.953), which exceeds the memory "
        "usage threshold of 0.95. Top 10 memory users:\n"
        "PID\tMEM(GB)\tCOMMAND\n4007\t31.87\tpython roll.py\n4322\t2.24\tray::Arm.step\n"
        "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io"
    )
    verdict = judged("step 3100 loss 0.1\nstep 3200 loss 0.1\n" + error)
    assert verdict.cause is Cause.OOM_MACHINE, verdict
    for part in ("10.1.1.5", "61GB of 64GB", "Arm.reset (pid 411)"):
        assert part in verdict.sentence
    assert any("pid 4007 with 31.87 GB" in line for line in verdict.evidence)


def test_a_lost_actor_of_ray_is_named():
    text = raised(
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: Roller\n\tpid: 4711\n\tip: 10.1.1.5\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: End of file.",
        ("/home/ada/train.py", 7, "fit"),
    )
    assert "Roller (pid 4711 on 10.1.1.5)" in judged(text).sentence


def test_a_cache_that_found_no_room_is_named():
    cache = ("/opt/lib/python3.12/site-packages/triton/runtime/cache.py", 116, "put")
    command = ("/opt/env/bin/fit", 3, "main")
    verdict = judged(raised("OSError: [Errno 122] Disk quota exceeded", command, cache))
    assert "TRITON_CACHE_DIR" in verdict.sentence, verdict
    assert not any("bin/fit" in line for line in verdict.evidence)


ADVICE = {
    "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: "
    "https://huggingface.co/api": ("HF_TOKEN", "did not answer"),
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility "
    "was attempted on non supported HW": ("newer than the driver", "compute_cap"),
    "tarfile.ReadError: unexpected end of data": ("tar -tf", "checkpoint"),
    "ValueError: loaded state dict contains a parameter group that doesn't match the size of "
    "optimizer's group": ("new optimizer", "strict=False"),
}


@pytest.mark.parametrize("error", ADVICE)
def test_the_advice_is_of_this_error(error):
    wanted, other = ADVICE[error]
    advised = " ".join(judged(raised(error)).advice)
    assert wanted in advised, advised
    assert other not in advised


def test_a_fault_of_an_amd_gpu_gets_the_tools_of_amd():
    said = "Memory access fault by GPU node-2 (Agent handle: 0x5) on address 0x7.\n"
    advised = " ".join(judged(f"step 3 loss 0.2\n{said}Aborted (core dumped)\n").advice)
    assert "AMD_SERIALIZE_KERNEL=3" in advised, advised
    assert "traceback" not in advised
    assert "nvidia" not in advised


def test_hydra_says_which_key_is_unknown():
    said = "Could not override 'optim.lrr'.\nTo append to your config use +optim.lrr=1\n"
    verdict = judged(f"{said}Key 'lrr' is not in struct\n    full_key: optim.lrr\n")
    assert "Key 'lrr' is not in struct" in verdict.sentence, verdict
    assert any("+" in line for line in verdict.advice)


def test_a_task_of_jax_that_fell_silent_after_it_began_is_not_told_to_initialize():
    text = "".join(f"step {n} loss 0.5\n" for n in range(9)) + (
        "E coordination_service.cc:954] UNAVAILABLE: Task /job:w/replica:0/task:7 heartbeat "
        "timeout.\nAborted (core dumped)\n"
    )
    advised = " ".join(judged(text).advice)
    assert "log of rank 7" in advised, advised
    assert "initialize" not in advised
