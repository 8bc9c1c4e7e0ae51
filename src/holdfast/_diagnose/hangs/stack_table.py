"""Which frames tell what a thread waits for: tables, by file and function.

Files are those of Python's library, of torch and of other libraries of trainings; names are the
last part of a qualified name. A call into C leaves no frame of Python: then the kernel's word for
the place where the thread sleeps tells, or the text of the user's line.
"""

from __future__ import annotations

_COLLECTIVES = (
    r"all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|reduce|gather|scatter|barrier"
    r"|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv|all_gather_into_tensor"
    r"|reduce_scatter_tensor|all_to_all_single|all_reduce_coalesced|all_gather_coalesced"
    r"|all_gather_object|gather_object|broadcast_object_list|scatter_object_list|wait_tensor"
)

# (file, names or "" for all, kind, words). The frame nearest to the user's own line decides, and of
# one frame the first row that fits.
RULES = (
    (r"/(?:pdb|bdb)\.py$|/_?pydev|/debugpy/|/ipdb/|/pudb/", "", "debugger", "is in a debugger"),
    (r"/IPython/|/prompt_toolkit/|/code\.py$", "", "prompt", "waits at a prompt"),
    (r"/torch/utils/data/dataloader\.py$", "", "loader", "waits for its data loader"),
    (r"/torch/distributed/distributed_c10d\.py$", _COLLECTIVES, "collective", "waits in {name}"),
    (
        r"/torch/distributed/(?:rendezvous|elastic/.*|distributed_c10d|device_mesh)\.py$",
        r"init_process_group|_store_based_barrier|new_group|rendezvous|.*_rendezvous_handler"
        r"|_create_c10d_store|_new_process_group_helper|next_rendezvous|init_device_mesh",
        "rendezvous",
        "waits for the other ranks to come",
    ),
    (r"/torch/distributed/_functional_collectives\.py$", "", "collective", "waits in {name}"),
    (
        "/torch/distributed/(?:fsdp|_composable|tensor|pipelining|checkpoint)/",
        ".*(?:unshard|all_gather|reduce|wait|broadcast|barrier|redistribute|pre_forward).*",
        "collective",
        "waits in {name} of torch.distributed",
    ),
    (
        r"/torch/nn/parallel/distributed\.py$",
        "_sync_.*|_pre_forward|_verify.*|_ddp_init_helper|.*broadcast_coalesced|join|__init__",
        "collective",
        "waits in DistributedDataParallel",
    ),
    (r"/torch/_dynamo/convert_frame\.py$", "", "compile", "is in torch.compile"),
    (r"/torch/_inductor/compile_fx\.py$", "", "compile", "is in torch.compile"),
    (
        r"/torch/(?:_tensor|autograd/[^/]*)\.py$",
        "backward|grad|_engine_run_backward",
        "backward",
        "is in backward()",
    ),
    ("/torch/cuda/", "synchronize|wait|query", "device", "waits for the GPU"),
    (r"/torch/multiprocessing/spawn\.py$", "", "child", "waits for the processes that it started"),
    (
        r"/multiprocessing/pool\.py$",
        "get|wait|next|map|starmap|apply|join|__exit__|imap.*",
        "pool",
        "waits for the result of a pool",
    ),
    (
        r"/concurrent/futures/(?:_base|thread|process)\.py$",
        "result|exception|wait|result_iterator|_result_or_cancel|as_completed|shutdown|__exit__",
        "pool",
        "waits for the result of an executor",
    ),
    ("/joblib/", "", "pool", "waits for the result of joblib"),
    (r"/torch/serialization\.py$", "", "file", "is in torch.{name}"),
    (
        r"/filelock/|/portalocker/|/torch/utils/file_baton\.py$",
        "",
        "filelock",
        "waits for a lock on a file",
    ),
    (r"/multiprocessing/managers\.py$", "", "pipe", "waits for a manager's process"),
    (r"/multiprocessing/queues\.py$", "", "queue", "waits for a queue between processes"),
    (r"/multiprocessing/synchronize\.py$", "", "lock", "waits for a lock between processes"),
    (
        r"/multiprocessing/(?:process|popen_\w+)\.py$",
        "join|wait|poll",
        "child",
        "waits for a process to end",
    ),
    (r"/multiprocessing/connection\.py$", "", "pipe", "waits for a message of another process"),
    (r"/queue\.py$", "get", "queue", "waits for an item of a queue"),
    (r"/queue\.py$", "put", "queue", "waits for room in a queue"),
    (r"/queue\.py$", "join", "queue", "waits until a queue is done"),
    (
        r"/threading\.py$",
        "join|_wait_for_tstate_lock|_shutdown",
        "join",
        "waits for a thread to end",
    ),
    (r"/threading\.py$", "acquire|__enter__", "lock", "waits for a lock"),
    (r"/threading\.py$", "wait|wait_for|_wait|_enter", "event", "waits for another thread's sign"),
    (r"/subprocess\.py$", "", "child", "waits for a process that it started"),
    ("/asyncio/", "", "asyncio", "waits in the event loop of asyncio"),
    (
        r"/(?:socket|ssl|smtplib|ftplib)\.py$|/http/client\.py$|/urllib/|/(?:requests|urllib3"
        r"|httpx|httpcore|aiohttp|botocore|boto3|s3fs|gcsfs|fsspec|huggingface_hub|wandb|mlflow"
        r"|comet_ml|neptune)/",
        "",
        "network",
        "waits for the network",
    ),
    (
        r"/(?:pathlib|shutil|genericpath|posixpath|glob|tempfile|zipfile|tarfile|gzip|bz2|lzma"
        r"|mmap)\.py$|/(?:pathlib|zipfile|glob)/|/(?:PIL|h5py|pyarrow|netCDF4|zarr|tifffile"
        r"|imageio|safetensors)/|/numpy/lib/",
        "",
        "file",
        "is in a call for a file",
    ),
    (
        r"/os\.py$",
        "walk|scandir|makedirs|_walk|fwalk|removedirs|renames",
        "file",
        "is in a call for a file",
    ),
)

# What the kernel calls the place where a thread sleeps: its kind, and words for it.
WCHANS = {
    "fuse|request_wait_answer": ("fuse", "waits for a FUSE file system"),
    "nfs|rpc_wait|rpc_run|rpc_exec": ("nfs", "waits for an NFS server"),
    "ceph|lustre|^ll_|^cl_|ldlm|ptlrpc|gpfs|cxiWait|cifs|smb|beegfs|orangefs|9p|v9fs": (
        "netfs",
        "waits for a network file system",
    ),
    "flock|posix_lock|fcntl_setlk|locks_lock": ("filelock", "waits for a lock on a file"),
    "wait_for_partner|fifo_open": ("fifo", "opens a FIFO that no other process has open"),
    (
        r"io_schedule|folio_wait|wait_on_page|jbd2|ext4|xfs|btrfs|blk_|bit_wait|submit_bio"
        r"|filemap|rwsem_down"
    ): ("disk", "waits for a disk"),
    "nanosleep|hrtimer_sleep|schedule_hrtimeout": ("sleep", "sleeps"),
    "^do_wait|wait4|wait_consider|^kernel_wait": ("child", "waits for a process to end"),
    "n_tty|tty_read": ("input", "waits for keyboard input"),
    "pipe_read|pipe_wait|unix_stream": ("pipe", "waits for a message of another process"),
    "pipe_write": ("pipe", "waits until its pipe is read"),
    "skb_|inet_|tcp_|sk_wait|sock_|udp_": ("network", "waits for the network"),
    "epoll|poll_schedule|do_sys_poll|do_poll|do_select|^poll|core_sys_select": (
        "poll",
        "waits for a descriptor",
    ),
    "nvidia|nv_|os_acquire|uvm_": ("device", "waits for the GPU"),
    "refrigerator|freezer": ("frozen", "is frozen"),
    "ptrace_stop": ("traced", "is held by a tracer"),
    "futex": ("futex", "waits for a lock, or in a call of C for another thread"),
}

# The user's own line, where it calls into C.
TEXTS = {
    r"\binput\(": ("input", "waits for keyboard input"),
    r"\bsleep\(": ("sleep", "sleeps"),
    r"^\s*(?:async )?with\b|\.acquire\(": ("lock", "waits for a lock"),
    r"\.backward\(": ("backward", "is in backward()"),
    r"\.(?:item|tolist|cpu|numpy|cuda)\(|synchronize\(|\.to\(": ("device", "waits for the GPU"),
    r"\bflock\(|\blockf\(": ("filelock", "waits for a lock on a file"),
    r"\.get\(": ("queue", "waits for an item of a queue"),
    r"\.wait\(": ("event", "waits for another thread's sign"),
    r"\.(?:recv|recvfrom|accept|connect)\(": ("network", "waits for the network"),
    (
        r"\bopen\(|\.(?:read|write|readline|readlines|flush|stat|exists|is_file|iterdir)\("
        r"|\bos\.(?:stat|listdir|open|read|write|fsync)\(|\bload\("
    ): ("file", "is in a call for a file"),
}

# System calls about a file, by its name or by its descriptor.
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
