"""Lines that tell on their own: of shells, SLURM, the kernel, CUDA and what a machine lacks."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._diagnose.texts.signs import read_signs

LINES: list[tuple[str, str, int | None, dict[str, Any]]] = [
    # Shells
    ("Killed", "killed_line", None, {"signal": 9}),
    (
        "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed      python3 main.py",
        "killed_line",
        None,
        {"pid": 8156, "command": "python3 main.py"},
    ),
    ("[1]+  Killed                  python train.py", "killed_line", None, {}),
    ("zsh: killed     python train.py", "killed_line", None, {"command": "python train.py"}),
    ("Segmentation fault (core dumped)", "segfault_line", None, {"signal": 11}),
    (
        "run.sh: line 1:  77 Segmentation fault      (core dumped) python a.py",
        "segfault_line",
        None,
        {"pid": 77, "command": "python a.py"},
    ),
    ("Aborted (core dumped)", "abort_line", None, {"signal": 6}),
    ("bash: line 1:  3938 Bus error               python a.py", "bus_error", None, {"pid": 3938}),
    ("bash: line 1:  3 Floating point exceptionpython a", "floating_point_line", None, {}),
    ("Terminated", "terminated_line", None, {"signal": 15}),
    # SLURM
    (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have "
        "been OOM Killed.",
        "slurm_oom",
        None,
        {"count": 1, "step": "7.0."},
    ),
    (
        "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.",
        "slurm_oom",
        None,
        {"count": 2},
    ),
    ("srun: error: n1: task 1: Out Of Memory", "slurm_oom", 1, {"node": "n1"}),
    ("srun: error: nid1277: tasks 1-3: Out Of Memory", "slurm_oom", 1, {"node": "nid1277"}),
    ("srun: error: n1: task 1: Killed", "killed_line", 1, {"signal": 9}),
    ("srun: error: n1: task 4: Segmentation fault (core dumped)", "segfault_line", 4, {}),
    ("srun: error: n1: task 0: Exited with exit code 3", "srun_exit", 0, {"exitcode": 3}),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-16T02:44:23 DUE TO TIME LIMIT ***",
        "slurm_time_limit",
        None,
        {"node": "n1"},
    ),
    (
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-16T02:44:23 DUE TO PREEMPTION "
        "***",
        "slurm_preempted",
        None,
        {"node": "n1"},
    ),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-16T02:44:23 DUE TO NODE FAILURE, "
        "SEE SLURMCTLD LOG FOR DETAILS ***",
        "slurm_node_fail",
        None,
        {},
    ),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-16T02:44:23 DUE TO JOB REQUEUE "
        "***",
        "slurm_requeued",
        None,
        {},
    ),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-16T02:44:23 ***",
        "slurm_cancelled",
        None,
        {"node": "n1"},
    ),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-16T02:44:23 DUE to SIGNAL "
        "Terminated ***",
        "slurm_cancelled",
        None,
        {"node": "n1"},
    ),
    # What follows when one task of a step has failed.
    (
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-16T02:44:23 ***",
        "slurm_step_cancelled",
        None,
        {},
    ),
    ("srun: error: Node failure on n3", "slurm_node_fail", None, {"node": "n3"}),
    # The kernel
    (
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9000kB, "
        "anon-rss:2048kB, file-rss:1kB, shmem-rss:4kB, UID:0",
        "kernel_oom",
        None,
        {"pid": 4711, "comm": "python", "of_cgroup": True},
    ),
    (
        "Out of memory: Killed process 4711 (python3.11) total-vm:9000kB, anon-rss:2048kB",
        "kernel_oom",
        None,
        {"of_cgroup": False, "comm": "python3.11"},
    ),
    (
        "python[4059]: segfault at 0 ip 00007f37 sp 00007ffd error 4 in libc.so.6[7f37+1000]",
        "kernel_segfault",
        None,
        {"pid": 4059, "library": "libc.so.6"},
    ),
    (
        "python[5856]: unhandled exception: DABT (lower EL), ESR 0x0000000092000004, level 0 "
        "translation fault in libc.so.6[9e6d0,ffffb5990000+18c000]",
        "kernel_segfault",
        None,
        {"pid": 5856, "library": "libc.so.6"},
    ),
    (
        "traps: python[4062] trap invalid opcode ip:7f378f387000 sp:7fffd89dedb8 error:0",
        "kernel_trap",
        None,
        {"pid": 4062, "what": "invalid opcode"},
    ),
    (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
        "cuda_error",
        None,
        {"xid": 79},
    ),
    # C and C++
    ("double free or corruption (!prev)", "heap_damage", None, {}),
    ("free(): double free detected in tcache 2", "heap_damage", None, {}),
    ("malloc(): unaligned tcache chunk detected", "heap_damage", None, {}),
    ("malloc_consolidate(): invalid chunk size", "heap_damage", None, {}),
    ("realloc(): invalid next size", "heap_damage", None, {}),
    (
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: no shape",
        "cxx_exception",
        None,
        {"type": "std::runtime_error", "what": "no shape"},
    ),
    # The accelerator
    (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "cuda_error",
        None,
        {"what": "uncorrectable ECC error encountered"},
    ),
    (
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "cuda_error",
        None,
        {},
    ),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm()`",
        "cuda_error",
        None,
        {},
    ),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "cuda_error", None, {}),
    (
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; "
        "781.59 MiB already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)",
        "cuda_oom",
        None,
        {
            "tried": int(2.26 * 2**30),
            "total": 6 * 2**30,
            "free": int(3.03 * 2**30),
            "allocated": int(781.59 * 2**20),
        },
    ),
    (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a "
        "total capacty of 4.00 GiB of which 0 bytes is free. Of the allocated memory 2.58 GiB is "
        "allocated by PyTorch, and 1.90 MiB is reserved by PyTorch but unallocated.",
        "cuda_oom",
        None,
        {
            "total": 4 * 2**30,
            "free": 0,
            "reserved_unallocated": int(1.9 * 2**20),
            "allocated": int(2.58 * 2**30),
        },
    ),
    ("RuntimeError: CUDA error: out of memory", "cuda_oom", None, {}),
    ("RuntimeError: No CUDA GPUs are available", "environment", None, {}),
    (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "environment",
        None,
        {},
    ),
    (
        "RuntimeError: CUDA error: invalid device ordinal",
        "environment",
        None,
        {},
    ),
    (
        "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
        "environment",
        None,
        {},
    ),
    # NCCL, gloo, stores
    (
        "[E ProcessGroupNCCL.cpp:737] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802211 "
        "milliseconds before timing out.",
        "nccl_timeout",
        3,
        {"sequence": 469508, "timeout_ms": 1800000},
    ),
    (
        "RuntimeError: NCCL error in: /opt/pytorch/torch/ProcessGroupNCCL.cpp:1229, unhandled "
        "system error, NCCL version 2.12.10",
        "peer_lost",
        None,
        {},
    ),
    (
        "n22:183006:183181 [1] misc/socket.cc:538 NCCL WARN Net : Connection closed by remote peer "
        "n23.cluster<47861>",
        "peer_lost",
        None,
        {"peer": "n23.cluster"},
    ),
    ("OSError: [Errno 98] Address already in use", "address_in_use", None, {}),
    # Files and programs
    ("OSError: [Errno 122] Disk quota exceeded: 'a.pt'", "quota", None, {}),
    ("OSError: [Errno 28] No space left on device: '/scratch/a.pt'", "disk_full", None, {}),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "shm_full", None, {}),
    (
        "RuntimeError: unable to open shared memory object </torch_1_2_3> in read-write mode: Too "
        "many open files (24)",
        "files_limit",
        None,
        {},
    ),
    ("ModuleNotFoundError: No module named 'apex'", "environment", None, {"name": "apex"}),
    (
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "environment",
        None,
        {"name": "libcudart.so.12"},
    ),
    (
        "python: can't open file '/home/u/trian.py': [Errno 2] No such file or directory",
        "environment",
        None,
        {"name": "/home/u/trian.py"},
    ),
    ("job.sh: line 3: torchrun: command not found", "environment", None, {"name": "torchrun"}),
    # holdfast itself
    (
        "holdfast: step 12 is durable; leaving with status 143 (SIGTERM). Start the same command "
        "again to go on.",
        "holdfast_stop",
        None,
        {"status": 143, "reason": "SIGTERM"},
    ),
    (
        "holdfast: leaving at once (a second Ctrl-C): step 3 is durable. Status 130.",
        "holdfast_stop",
        None,
        {"status": 130, "reason": "a second Ctrl-C"},
    ),
    (
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "nan",
        None,
        {"function": "MulBackward0"},
    ),
]


@pytest.mark.parametrize(("line", "kind", "rank", "details"), LINES)
def test_a_line_tells(line: str, kind: str, rank: int | None, details: dict[str, Any]) -> None:
    signs = read_signs(f"step 1\n{line}\n")
    found = [sign for sign in signs if sign.kind == kind]
    assert found, signs
    assert (found[0].line, found[0].rank) == (2, rank)
    assert {key: found[0].details.get(key) for key in details} == details


def test_shm_that_is_full_is_no_full_disk() -> None:
    line = "OSError: [Errno 28] No space left on device: '/dev/shm/x'"
    assert [sign.kind for sign in read_signs(line)] == ["shm_full"]


def test_memory_of_the_gpu_is_no_other_error_of_cuda() -> None:
    kinds = [sign.kind for sign in read_signs("RuntimeError: CUDA error: out of memory")]
    assert kinds == ["cuda_oom"]
