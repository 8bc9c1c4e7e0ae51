"""What a stack means, in words."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast._diagnose.hangs import stacks
from holdfast._diagnose.hangs.stacks import merge_looks, name_ranks, read_stack, read_thread
from holdfast._environment.processes.threads import STDIN_PIPE
from tests.support import wait_until
from tests.unit.hang_looks import (
    BACKWARD,
    EVENT,
    GET,
    IDLE_LOADER_WORKER,
    LOADER,
    alone,
    collective,
    frames,
    rank,
    thread,
)

TABLE: dict[str, tuple[tuple[str, ...], dict[str, Any], str, str]] = {
    "a queue": (
        (*EVENT[:1], "py/queue.py:171 Queue.get", "train.py:3 train"),
        {},
        "queue",
        "waits for an item of a queue at train.py:3 in train()",
    ),
    "an event": (
        (*EVENT, "train.py:2"),
        {},
        "event",
        "waits for another thread's sign at train.py:2",
    ),
    "a thread's end": (
        (
            "py/threading.py:1139 Thread._wait_for_tstate_lock",
            "py/threading.py:1119 Thread.join",
            "train.py:3",
        ),
        {},
        "join",
        "waits for a thread to end at train.py:3",
    ),
    "a pool": ((*GET, "train.py:7"), {}, "pool", "waits for the result of a pool at train.py:7"),
    "a future": (
        (EVENT[0], "py/concurrent/futures/_base.py:451 Future.result", "train.py:5"),
        {},
        "pool",
        "waits for the result of an executor at train.py:5",
    ),
    "the loader": (LOADER, {}, "loader", "waits for its data loader at train.py:30 in train()"),
    "a loader in a wrapper of ours": (
        (*LOADER[:5], "/x/holdfast/_run/run.py:9 Run.batches", "train.py:30 train"),
        {},
        "loader",
        "waits for its data loader at train.py:30 in train()",
    ),
    "all_reduce": (
        collective("all_reduce", 41),
        {},
        "collective",
        "waits in all_reduce at train.py:41 in step()",
    ),
    "backward": (BACKWARD, {}, "backward", "is in backward() at train.py:41 in step()"),
    "forward of DDP": (
        (
            "torch/nn/parallel/distributed.py:2288 DistributedDataParallel._sync_module_buffers",
            "torch/nn/parallel/distributed.py:1600 DistributedDataParallel._pre_forward",
            "torch/nn/parallel/distributed.py:1660 DistributedDataParallel.forward",
            "torch/nn/modules/module.py:1776 Module._call_impl",
            "train.py:9 step",
        ),
        {},
        "collective",
        "waits in DistributedDataParallel at train.py:9 in step()",
    ),
    "the model within DDP": (
        (
            "torch/nn/modules/linear.py:125 Linear.forward",
            "torch/nn/modules/module.py:1776 Module._call_impl",
            "torch/nn/parallel/distributed.py:1666 DistributedDataParallel.forward",
            "train.py:9 step",
        ),
        {"state": "R", "wchan": None},
        "",
        "computes at train.py:9 in step()",
    ),
    "the rendezvous": (
        (
            "torch/distributed/distributed_c10d.py:1736 init_process_group",
            "torch/distributed/c10d_logger.py:98 wrapper",
            "train.py:2",
        ),
        {},
        "rendezvous",
        "waits for the other ranks to come at train.py:2",
    ),
    "an import": (
        (
            "torch/distributed/fsdp/_shard_utils.py:17 <module>",
            "<frozen importlib._bootstrap>:241 _call_with_frames_removed",
            "torch/nn/parallel/distributed.py:12 __init__",
            "train.py:2",
        ),
        {"state": "R"},
        "import",
        "is in an import at train.py:2",
    ),
    "torch.compile": (
        (
            "torch/_inductor/codecache.py:9 compile",
            "torch/_dynamo/convert_frame.py:600 _compile",
            "torch/_dynamo/eval_frame.py:736 compile_wrapper",
            "model.py:12 forward",
        ),
        {"state": "R", "wchan": None},
        "compile",
        "is in torch.compile at model.py:12 in forward()",
    ),
    "code that torch.compile has made": (
        ("torch/_dynamo/eval_frame.py:736 compile_wrapper", "model.py:12 forward"),
        {"state": "R", "wchan": None},
        "",
        "computes at model.py:12 in forward()",
    ),
    "a process that it started": (
        ("py/subprocess.py:2004 Popen._try_wait", "py/subprocess.py:550 run", "train.py:2"),
        {"wchan": "do_wait"},
        "child",
        "waits for a process that it started at train.py:2",
    ),
    "sleep": (
        ("data.py:3 load",),
        {"wchan": "hrtimer_nanosleep"},
        "sleep",
        "sleeps at data.py:3 in load()",
    ),
    "a lock, and the source is not here": (
        ("train.py:10 two",),
        {},
        "lock",
        "waits for a lock, or in a call of C for another thread at train.py:10 in two()",
    ),
    "NFS": (
        ("data.py:17 load",),
        {"wchan": "rpc_wait_bit_killable", "state": "D"},
        "nfs",
        "waits for an NFS server at data.py:17 in load()",
    ),
    "FUSE, by a library": (
        ("py/pathlib.py:1044 Path.open", "data.py:17 load"),
        {"wchan": "request_wait_answer", "call": "read", "call_path": "/mnt/x/a.bin"},
        "fuse",
        "waits for a FUSE file system (/mnt/x/a.bin) at data.py:17 in load()",
    ),
    "a file, and the kernel has no word": (
        ("data.py:17 load",),
        {"wchan": None, "call": "pread64", "call_path": "/mnt/x/a.bin", "state": "D"},
        "file",
        "is in pread64 (/mnt/x/a.bin) at data.py:17 in load()",
    ),
    "a lock on a file": (
        ("train.py:5",),
        {"wchan": "flock_lock_inode_wait", "call": "flock", "call_path": "/home/a/l"},
        "filelock",
        "waits for a lock on a file (/home/a/l) at train.py:5",
    ),
    "a terminal": (
        ("train.py:5",),
        {"wchan": "wait_woken", "call": "read", "call_path": "/dev/pts/3"},
        "input",
        "waits for keyboard input at train.py:5",
    ),
    "its standard input, which is a pipe": (
        ("train.py:5",),
        {"wchan": "anon_pipe_read", "call": "read", "call_path": STDIN_PIPE},
        "stdin",
        "waits for its standard input, a pipe at train.py:5",
    ),
    "a pipe of multiprocessing, in a process that had closed its standard input": (
        ("py/multiprocessing/connection.py:395 Connection._recv", "train.py:5"),
        {"wchan": "anon_pipe_read", "call": "read", "call_path": STDIN_PIPE},
        "pipe",
        "waits for a message of another process at train.py:5",
    ),
    "a socket, where the kernel's word is that of a terminal": (
        ("train.py:5",),
        {"wchan": "wait_woken", "call": "recvfrom", "call_path": "socket:[4711]"},
        "network",
        "waits for the network at train.py:5",
    ),
    "a socket that a library reads like a file": (
        ("train.py:5",),
        {"wchan": "wait_woken", "call": "read", "call_path": "socket:[4711]"},
        "network",
        "waits for the network at train.py:5",
    ),
    "a socket": (
        ("train.py:3",),
        {"wchan": "sk_wait_data"},
        "network",
        "waits for the network at train.py:3",
    ),
    "an idle worker, whose parent's frames are not its own": (
        IDLE_LOADER_WORKER,
        {"wchan": "poll_schedule_timeout"},
        "queue",
        "waits for a queue between processes",
    ),
    "a tracker of resources, which is nobody's code": (
        ("py/multiprocessing/resource_tracker.py:211 main", "<string>:1 <module>"),
        {"wchan": "anon_pipe_read"},
        "pipe",
        "waits for a message of another process",
    ),
    "nothing": ((), {"wchan": None}, "", "stands"),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_stack_is_read(name):
    lines, more, kind, said = TABLE[name]
    found = read_thread(thread(*lines, **more))
    assert (found.kind, found.tell()) == (kind, said)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("with self.lock:", "lock"),
        ("self.lock.acquire()", "lock"),
        ("library.pthread_mutex_lock(mutex)", "call"),
        ("batch = batches.get()", "queue"),
        ("total += loss.item()", "device"),
        ("loss.backward()", "backward"),
    ],
)
def test_the_text_of_the_line_tells_what_a_call_of_c_is_about(tmp_path, text, kind):
    script = tmp_path / "train.py"
    script.write_text(f"\n    {text}\n")
    assert read_stack(frames(f"{script}:2 step"), "futex_do_wait", "S").kind == kind


def test_a_script_on_a_file_system_that_does_not_answer_holds_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_WAIT_SECONDS", 0.05)
    answers = threading.Event()

    def wait_for_server(path, *, most_bytes):
        answers.wait()
        raise OSError

    monkeypatch.setattr(stacks, "open_file", wait_for_server)
    before = threading.active_count()
    assert [stacks.source_line(str(tmp_path / "train.py"), 2) for _ in range(5)] == [""] * 5
    assert threading.active_count() == before + 1  # it was asked once
    answers.set()
    wait_until(lambda: threading.active_count() == before)


def test_a_device_that_a_record_names_is_not_read_as_a_script():
    assert stacks.source_line("/dev/zero", 2) == ""


def test_ranks_that_stand_alike_share_a_line():
    looks = [rank(n, *collective("all_reduce", 41)) for n in (0, 1, 3)]
    looks.insert(2, rank(2, "dataset.py:17 load", wchan="hrtimer_nanosleep"))
    assert merge_looks(looks, [4]) == [
        "3 ranks (0, 1 and 3) in all_reduce at train.py:41",
        "rank 2 in dataset.py:17 (sleeps)",
        "rank 4: no answer",
    ]
    assert merge_looks([alone("a.py:1")])[0].startswith("it is in a.py:1")
    assert merge_looks([alone(*LOADER)]) == ["it is in train.py:30 (waits for its data loader)"]


def test_many_ranks_are_counted():
    assert name_ranks(range(64)) == "64 ranks (0, 1, … 63)"
    assert name_ranks([3, 1, None]) == "ranks 1 and 3"
