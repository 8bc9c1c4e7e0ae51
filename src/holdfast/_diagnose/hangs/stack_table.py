"""Which frames tell what a thread waits for: a table, by where a function stands.

Files are those of Python's library, of torch and of others that trainings use; names are the
last part of a qualified one. What the kernel says of a sleeper tells the rest: a call into C
leaves no frame of Python.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class StackRule(NamedTuple):
    """A stack with such a frame is of this kind."""

    file: re.Pattern[str]
    names: re.Pattern[str]
    kind: str
    words: str  # "waits for …", "is in …"


def _rule(file: str, names: str, kind: str, words: str) -> StackRule:
    return StackRule(re.compile(file), re.compile(names), kind, words)


COLLECTIVES = (
    r"(?:all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|reduce|gather|scatter|barrier"
    r"|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv|all_gather_into_tensor"
    r"|reduce_scatter_tensor|all_to_all_single|all_reduce_coalesced|all_gather_coalesced"
    r"|all_gather_object|gather_object|broadcast_object_list|scatter_object_list|wait_tensor)"
)
_ANY = r".*"

# The frame nearest to the user's own line decides, and of one frame the first rule that fits.
RULES = (
    _rule(
        r"/(?:pdb|bdb)\.py$|/_?pydev|/debugpy/|/ipdb/|/pudb/", _ANY, "debugger", "is in a debugger"
    ),
    _rule(r"/IPython/|/prompt_toolkit/|/code\.py$", _ANY, "prompt", "waits at a prompt"),
    _rule(r"/torch/utils/data/dataloader\.py$", _ANY, "loader", "waits for its data loader"),
    _rule(
        r"/torch/distributed/distributed_c10d\.py$",
        rf"{COLLECTIVES}",
        "collective",
        "waits in {name}",
    ),
    _rule(
        r"/torch/distributed/(?:rendezvous|elastic/.*|distributed_c10d|device_mesh)\.py$",
        r"init_process_group|_store_based_barrier|new_group|rendezvous|.*_rendezvous_handler"
        r"|_create_c10d_store|_new_process_group_helper|next_rendezvous|init_device_mesh",
        "rendezvous",
        "waits for the other ranks to come",
    ),
    _rule(
        r"/torch/distributed/_functional_collectives\.py$",
        _ANY,
        "collective",
        "waits in {name}",
    ),
    _rule(
        r"/torch/distributed/(?:fsdp|_composable|tensor|pipelining|checkpoint)/",
        r".*(?:unshard|all_gather|reduce|wait|broadcast|barrier|redistribute|pre_forward).*",
        "collective",
        "waits in {name} of torch.distributed",
    ),
    _rule(
        r"/torch/nn/parallel/distributed\.py$",
        r"_sync_.*|_pre_forward|_verify.*|_ddp_init_helper|.*broadcast_coalesced|join|__init__",
        "collective",
        "waits in DistributedDataParallel",
    ),
    _rule(r"/torch/_dynamo/convert_frame\.py$", _ANY, "compile", "is in torch.compile"),
    _rule(r"/torch/_inductor/compile_fx\.py$", _ANY, "compile", "is in torch.compile"),
    _rule(
        r"/torch/(?:_tensor|autograd/[^/]*)\.py$",
        r"backward|grad|_engine_run_backward",
        "backward",
        "is in backward()",
    ),
    _rule(r"/torch/cuda/", r"synchronize|wait|query", "device", "waits for the GPU"),
    _rule(
        r"/torch/multiprocessing/spawn\.py$",
        _ANY,
        "child",
        "waits for the processes that it started",
    ),
    _rule(
        r"/multiprocessing/pool\.py$",
        r"get|wait|next|map|starmap|apply|join|__exit__|imap.*",
        "pool",
        "waits for the result of a pool",
    ),
    _rule(
        r"/concurrent/futures/(?:_base|thread|process)\.py$",
        r"result|exception|wait|result_iterator|_result_or_cancel|as_completed|shutdown|__exit__",
        "pool",
        "waits for the result of an executor",
    ),
    _rule(r"/joblib/", _ANY, "pool", "waits for the result of joblib"),
    _rule(r"/torch/serialization\.py$", _ANY, "file", "is in torch.{name}"),
    _rule(r"/filelock/|/portalocker/", _ANY, "filelock", "waits for a lock on a file"),
    _rule(r"/multiprocessing/managers\.py$", _ANY, "pipe", "waits for a manager's process"),
    _rule(r"/multiprocessing/queues\.py$", _ANY, "queue", "waits for a queue between processes"),
    _rule(r"/multiprocessing/synchronize\.py$", _ANY, "lock", "waits for a lock between processes"),
    _rule(
        r"/multiprocessing/(?:process|popen_\w+)\.py$",
        r"join|wait|poll",
        "child",
        "waits for a process to end",
    ),
    _rule(
        r"/multiprocessing/connection\.py$", _ANY, "pipe", "waits for a message of another process"
    ),
    _rule(r"/queue\.py$", r"get", "queue", "waits for an item of a queue"),
    _rule(r"/queue\.py$", r"put", "queue", "waits for room in a queue"),
    _rule(r"/queue\.py$", r"join", "queue", "waits until a queue is done"),
    _rule(r"/threading\.py$", r"join|_wait_for_tstate_lock", "join", "waits for a thread to end"),
    _rule(r"/threading\.py$", r"acquire|__enter__", "lock", "waits for a lock"),
    _rule(
        r"/threading\.py$",
        r"wait|wait_for|_wait|_enter",
        "event",
        "waits for another thread's sign",
    ),
    _rule(r"/subprocess\.py$", _ANY, "child", "waits for a process that it started"),
    _rule(r"/asyncio/", _ANY, "asyncio", "waits in the event loop of asyncio"),
    _rule(
        r"/(?:socket|ssl|smtplib|ftplib)\.py$|/http/client\.py$|/urllib/|/(?:requests|urllib3|httpx|httpcore|aiohttp"
        r"|botocore|boto3|s3fs|gcsfs|fsspec|huggingface_hub|wandb|mlflow|comet_ml|neptune)/",
        _ANY,
        "network",
        "waits for the network",
    ),
    _rule(
        r"/(?:pathlib|shutil|genericpath|posixpath|glob|tempfile|zipfile|tarfile|gzip|bz2|lzma|mmap)\.py$"
        r"|/(?:pathlib|zipfile|glob)/|/(?:PIL|h5py|pyarrow|netCDF4|zarr|tifffile|imageio|safetensors)/"
        r"|/numpy/lib/",
        _ANY,
        "file",
        "is in a call for a file",
    ),
    _rule(
        r"/os\.py$",
        r"walk|scandir|makedirs|_walk|fwalk|removedirs|renames",
        "file",
        "is in a call for a file",
    ),
)

# What the kernel calls the place where a thread sleeps.
WCHANS = (
    (re.compile(r"fuse|request_wait_answer"), "fuse", "waits for a FUSE file system"),
    (re.compile(r"nfs|rpc_wait|rpc_run|rpc_exec"), "nfs", "waits for an NFS server"),
    (
        re.compile(
            r"ceph|lustre|^ll_|^cl_|ldlm|ptlrpc|gpfs|cxiWait|cifs|smb|beegfs|orangefs|9p|v9fs"
        ),
        "netfs",
        "waits for a network file system",
    ),
    (
        re.compile(r"flock|posix_lock|fcntl_setlk|locks_lock"),
        "filelock",
        "waits for a lock on a file",
    ),
    (re.compile(r"wait_for_partner|fifo_open"), "fifo", "opens a FIFO that nobody else has open"),
    (
        re.compile(
            r"io_schedule|folio_wait|wait_on_page|jbd2|ext4|xfs|btrfs|blk_|bit_wait|submit_bio|filemap|rwsem_down"
        ),
        "disk",
        "waits for a disk",
    ),
    (re.compile(r"nanosleep|hrtimer_sleep|schedule_hrtimeout"), "sleep", "sleeps"),
    (
        re.compile(r"^do_wait|wait4|wait_consider|^kernel_wait"),
        "child",
        "waits for a process to end",
    ),
    (re.compile(r"n_tty|tty_read"), "input", "waits for keyboard input"),
    (
        re.compile(r"pipe_read|pipe_wait|unix_stream"),
        "pipe",
        "waits for a message of another process",
    ),
    (re.compile(r"pipe_write"), "pipe", "waits until its pipe is read"),
    (re.compile(r"skb_|inet_|tcp_|sk_wait|sock_|udp_"), "network", "waits for the network"),
    (
        re.compile(r"epoll|poll_schedule|do_sys_poll|do_poll|do_select|^poll|core_sys_select"),
        "poll",
        "waits for a descriptor",
    ),
    (re.compile(r"nvidia|nv_|os_acquire|uvm_"), "device", "waits for the GPU"),
    (re.compile(r"refrigerator|freezer"), "frozen", "is frozen"),
    (re.compile(r"ptrace_stop"), "traced", "is held by a tracer"),
    (re.compile(r"futex"), "futex", "waits for a lock, or in a call of C for another thread"),
)

# What the user's own line says, where it is what calls into C.
TEXTS = (
    (re.compile(r"\binput\("), "input", "waits for keyboard input"),
    (re.compile(r"\bsleep\("), "sleep", "sleeps"),
    (re.compile(r"^\s*(?:async )?with\b|\.acquire\("), "lock", "waits for a lock"),
    (re.compile(r"\.backward\("), "backward", "is in backward()"),
    (
        re.compile(r"\.(?:item|tolist|cpu|numpy|cuda)\(|synchronize\(|\.to\("),
        "device",
        "waits for the GPU",
    ),
    (re.compile(r"\bflock\(|\blockf\("), "filelock", "waits for a lock on a file"),
    (re.compile(r"\.get\("), "queue", "waits for an item of a queue"),
    (re.compile(r"\.wait\("), "event", "waits for another thread's sign"),
    (re.compile(r"\.(?:recv|recvfrom|accept|connect)\("), "network", "waits for the network"),
    (
        re.compile(
            r"\bopen\(|\.(?:read|write|readline|readlines|flush|stat|exists|is_file|iterdir)\(|\bos\.(?:stat|listdir|open|read|write|fsync)\(|\bload\("
        ),
        "file",
        "is in a call for a file",
    ),
)

# System calls that are about a file, whether by its name or by its descriptor.
FILE_CALLS = frozenset(
    (
        *("open", "openat", "stat", "lstat", "newfstatat", "statx", "access", "readlink", "rename"),
        *("renameat", "renameat2", "mkdir", "rmdir", "unlink", "unlinkat", "truncate", "statfs"),
        *("read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev", "close"),
        *(
            "fstat",
            "lseek",
            "fsync",
            "fdatasync",
            "ftruncate",
            "getdents",
            "getdents64",
            "sendfile",
        ),
        *("sync", "syncfs", "copy_file_range"),
    )
)
