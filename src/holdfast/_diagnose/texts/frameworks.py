"""What frameworks and their libraries print: torch, gloo, NCCL, CUDA, JAX, TensorFlow."""

from __future__ import annotations

import re
from typing import Any

from holdfast._diagnose.texts.sign import Pattern, pattern

_UNITS = {
    "": 1, "b": 1, "bytes": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_SIZE = r"([\d.]+) ?([KMGT]?i?B|bytes)"
_OOM_FIELDS = {
    "tried": rf"[Tt]r(?:ied|ying) to allocate {_SIZE}",
    "total": rf"total capac(?:i)?ty of {_SIZE}|; {_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free",
    "in_use": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch|; {_SIZE} already allocated",
    "reserved_unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
}
_OOM = {name: re.compile(shape) for name, shape in _OOM_FIELDS.items()}
_DEVICE = re.compile(r"\bGPU (\d+)\b|device:GPU:(\d+)|Device (\d+)\b")
_SHAPE = re.compile(r"tensor with shape ?(\[[\d, ]*\])")
_HARDWARE = re.compile(
    r"ECC|hardware|fallen off the bus|NVLink|unspecified launch failure|misaligned|row remap"
    r"|Xid|GPU is lost|system not yet initialized"
)


def size_bytes(number: str, unit: str) -> int | None:
    """A size as libraries print it.

    >>> size_bytes("1.50", "GiB"), size_bytes("12", "bytes")
    (1610612736, 12)
    """
    try:
        return int(float(number) * _UNITS.get(unit.lower(), 1))
    except (ValueError, OverflowError):
        return None


def _memory(match: re.Match[str]) -> dict[str, Any]:
    """The sizes in an out-of-memory message, as torch, JAX and TensorFlow word it."""
    said = match.string
    found: dict[str, Any] = {}
    for name, shape in _OOM.items():
        if (size := shape.search(said)) is not None:
            number, unit = [group for group in size.groups() if group is not None][:2]
            found[name] = size_bytes(number, unit)
    if (device := _DEVICE.search(said)) is not None:
        found["device"] = next(int(group) for group in device.groups() if group)
    if (tensor := _SHAPE.search(said)) is not None:
        found["shape"] = tensor[1]
    if "tried" not in found and (plain := re.search(r"allocat\w+ (\d+)(?: bytes)?\b", said)):
        found["tried"] = int(plain[1]) if len(plain[1]) < 19 else None
    return found


def _cuda(match: re.Match[str]) -> dict[str, Any] | None:
    what = match["what"].strip().rstrip(".")
    if "out of memory" in what:
        return None  # a row of its own
    return {"what": what[:200], "is_hardware": bool(_HARDWARE.search(match.string))}


def _missing(match: re.Match[str]) -> dict[str, Any]:
    """The ranks that did not come to a monitored barrier."""
    return {"missing": [int(n) for n in re.findall(r"\d+", match["_names"])][:1024]}


def _seconds(match: re.Match[str]) -> dict[str, Any]:
    return {"timeout_ms": int(match["_ms"]) if len(match["_ms"]) < 19 else None}


_NCCL_WORK = (
    r"(?:Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w+)"
    r"(?:, NumelIn=(?P<elements>\d+))?[^)]*?Timeout\(ms\)=(?P<timeout_ms>\d+)\)"
    r" ran for (?P<ran_ms>\d+) milliseconds"
)
_NCCL_STATE = (
    r"(?:Rank (?P<rank>\d+)\][^\]]{0,120})? at (?:NCCL )?work(?: sequence id)?: (?P<at>\d+),?"
    r"(?: PG status:)? last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+),"
    r" last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_ENVIRONMENT = (
    ("driver_too_old", "CUDA driver version is insufficient for CUDA runtime version"),
    ("driver_too_old", "The NVIDIA driver on your system is too old"),
    ("no_driver", "Found no NVIDIA driver on your system"),
    ("no_gpu", "No CUDA GPUs are available"),
    ("no_gpu", "no CUDA-capable device is detected"),
    ("no_cuda_build", "Torch not compiled with CUDA enabled"),
    ("no_nccl_build", "Distributed package doesn't have NCCL"),
    ("wrong_gpu_build", "no kernel image is available for execution on the device"),
    ("wrong_gpu_build", "is not compatible with the current PyTorch installation"),
    ("no_such_gpu", "invalid device ordinal"),
    ("gpu_shared", "Duplicate GPU detected"),
    ("no_gpu", "No supported gpu backend found"),
    ("no_gpu", "ProcessGroupNCCL is only supported with GPUs, no GPUs found"),
    ("no_gpu", "Attempting to deserialize object on a CUDA device but torch.cuda.is_available()"),
    ("no_gpu", 'could not select device driver "" with capabilities: [[gpu]]'),
    ("no_driver", "CUDA driver initialization failed"),
    ("no_driver", "system has unsupported display driver / cuda driver combination"),
    ("no_driver", "Driver/library version mismatch"),
    ("no_driver", "CUDA unknown error - this may be due to an incorrectly set up environment"),
    ("no_cuda_build", "CUDA_HOME environment variable is not set"),
    ("no_cuda_build", "does not match the version torch was compiled with"),
    ("wrong_gpu_build", "FlashAttention only supports Ampere GPUs or newer"),
    ("wrong_library", "may indicate binary incompatibility. Expected "),
    ("wrong_library", "A module that was compiled using NumPy 1.x cannot be run in"),
    ("wrong_library", "numpy.core.multiarray failed to import"),
    ("wrong_library", "Could not load library libcudnn"),
)

TORCH: tuple[Pattern, ...] = (
    # Memory of the accelerator
    pattern("cuda_oom", "CUDA out of memory", more=_memory),
    pattern("cuda_oom", "HIP out of memory", more=_memory),
    pattern("cuda_oom", "XPU out of memory", more=_memory),
    pattern("cuda_oom", "MPS backend out of memory", more=_memory),
    pattern("cuda_oom", "CUDA error: out of memory", more=_memory),
    pattern("cuda_oom", "cudaMalloc failed: out of memory"),
    pattern("cuda_oom", "Out of memory error on GPU", more=_memory),
    pattern("cuda_oom", "CUBLAS_STATUS_ALLOC_FAILED", more=_memory),
    pattern("cuda_oom", "RESOURCE_EXHAUSTED: ", r"RESOURCE_EXHAUSTED: .*[Oo]ut of memory",
            more=_memory, framework="jax"),
    pattern("cuda_oom", "OOM when allocating tensor",
            r"OOM when allocating tensor(?!.*device:CPU)", more=_memory, framework="tensorflow"),
    pattern("cuda_oom", "Dst tensor is not initialized", framework="tensorflow"),
    pattern("cuda_oom", "Ran out of memory in memory space", more=_memory, framework="jax"),
    pattern("cuda_oom", "CUDA_ERROR_OUT_OF_MEMORY",
            r"(?:Error|INTERNAL|RESOURCE_EXHAUSTED|F\d{4} )\b.*CUDA_ERROR_OUT_OF_MEMORY"),
    pattern("cuda_oom", "Cuda failure", r"Cuda failure(?: \d+)? '?out of memory", what="nccl"),
    pattern("cuda_oom", "hipErrorOutOfMemory"),
    pattern("host_oom", "node running low on memory", what="ray"),
    pattern("host_oom", "low memory! at or below SIG", what="earlyoom"),
    pattern("host_oom", "systemd-oomd", r"systemd-oomd(?:\[\d+\])?:? [Kk]illed", what="oomd"),
    pattern("memory_refused", "OOM when allocating tensor",
            r"OOM when allocating tensor.*device:CPU"),
    pattern("memory_refused", "Cannot allocate memory",
            r"Errno 12\]|(?:fork|mmap|malloc)\b.*Cannot allocate memory|allocate memory \(12\)"),
    pattern("memory_refused", "failed to map segment from shared object"),
    pattern("memory_refused", "Unable to allocate ",
            r"Unable to allocate (?P<_size>[\d.]+ ?[KMGT]i?B) for an array"),
    pattern("memory_refused", "DefaultCPUAllocator: ",
            r"DefaultCPUAllocator: (?:can't|not enough)(?:.*allocate (?P<tried>\d+) bytes)?"),
    # The accelerator itself; what no restart heals is `environment`
    *(pattern("environment", needle, what=what) for what, needle in _ENVIRONMENT),
    pattern("environment", "KeyError: '",
            r"KeyError: '(?P<name>(?:LOCAL_)?RANK|WORLD_SIZE|MASTER_(?:ADDR|PORT))'", what="unset"),
    pattern("environment", "Unable to initialize backend",
            r"Error: Unable to initialize backend", what="no_backend"),
    pattern("environment", " does not exist",
            r"operator (?P<name>[\w.]+::[\w.]+) does not exist", what="wrong_library"),
    pattern("environment", "Call to ibv_", r"Call to ibv_\w+ failed with error Cannot allocate",
            what="memlock"),
    pattern("cuda_error", "CUDA error: ", r"CUDA error: (?P<what>[^\n]+)", more=_cuda),
    pattern("cuda_error", "HIP error: ", r"HIP error: (?P<what>[^\n]+)", more=_cuda),
    pattern("cuda_error", "CUDNN_STATUS_", r"(?P<what>CUDNN_STATUS_(?!SUCCESS)\w+)", more=_cuda),
    pattern("cuda_error", "CUBLAS_STATUS_",
            r"(?P<what>CUBLAS_STATUS_(?!SUCCESS|ALLOC)\w+)", more=_cuda),
    pattern("cuda_error", "device-side assert",
            r"(?P<what>device-side assert(?:ion)? (?:triggered|.{0,40}failed))", more=_cuda),
    pattern("cuda_error", "Cuda failure", r"Cuda failure(?: \d+)? '?(?P<what>[^'\n]+)", more=_cuda),
    pattern("cuda_error", "CUDA_ERROR_", r"(?:Error|INTERNAL|F\d{4} )\b.*"
            r"(?P<what>CUDA_ERROR_(?!OUT_OF_MEMORY|NO_DEVICE)\w+)", more=_cuda),
    pattern("cuda_error", "cuDNN failed to initialize", r"(?P<what>cuDNN failed to initialize)",
            more=_cuda),
    pattern("cuda_error", "Unable to determine the device handle for GPU",
            r"(?P<what>Unable to determine the device handle for GPU.*)", more=_cuda),
    pattern("cuda_error", "Memory access fault by GPU", r"(?P<what>Memory access fault by GPU.*)",
            more=_cuda),
    pattern("cuda_error", "unhandled cuda error", r"(?P<what>unhandled cuda error)", more=_cuda),
    pattern("cuda_error", "fallen off the bus", r"(?P<what>fallen off the bus.*)", more=_cuda),
    pattern("cuda_error", "NVRM: Xid",
            r"(?P<what>Xid \([^)]*\): (?P<xid>\d+)[^\n]*)", more=_cuda),
    pattern("cuda_assert", "Assertion `",
            r"(?P<file>\S+\.cuh?):(?P<at>\d+): .*Assertion `(?P<assertion>.*?)` failed"),
    # Collectives
    pattern("nccl_timeout", "Watchdog caught collective operation timeout", _NCCL_WORK),
    pattern("nccl_progress", "last enqueued ", _NCCL_STATE),
    pattern("nccl_timeout", "Heartbeat monitor timed out",
            r"(?:Rank (?P<rank>\d+)\][^\]]{0,120})?Heartbeat monitor timed out", what="heartbeat"),
    pattern("nccl_timeout", "watchdog got stuck for ",
            r"(?:Rank (?P<rank>\d+)\][^\]]{0,120})?watchdog got stuck for", what="heartbeat"),
    pattern("gloo_timeout", "Timed out waiting ",
            r"Timed out waiting (?P<_ms>\d+) ?ms for (?P<operation>\w+) operation", more=_seconds),
    pattern("gloo_timeout", "failed to pass monitoredBarrier",
            r"\[Rank (?P<rank>\d+)\]: Ranks? (?P<_names>[\d, ]+) failed to pass monitoredBarrier",
            more=_missing),
    pattern("gloo_timeout", "successfully reached monitoredBarrier",
            r"Rank (?P<rank>\d+) successfully reached monitoredBarrier", what="victim"),
    pattern("gloo_timeout", "Barrier timed out", r"Barrier timed out(?!.*(?:PjRT|Connect))"),
    pattern("gloo_timeout", "[missing ranks: ", r"\[missing ranks: (?P<_names>[\d, ]+)\]",
            more=_missing),
    pattern("peer_lost", "Horovod has been shut down"),
    pattern("peer_lost", "Collective ops is aborted by"),
    pattern("gloo_timeout", "received the Notify record from remote rank",
            r"remote rank: ?\[(?P<_names>\d+)\]", more=_missing),
    pattern("gloo_timeout", "Remote Rank did not send the data in time"),
    pattern("gloo_timeout", "Application timeout caused pair closure"),
    pattern("collective_mismatch", "Is there a distributed collective mismatch in your code"),
    pattern("collective_mismatch", "Detected mismatch between collectives on ranks"),
    pattern("collective_mismatch", "op.preamble.length <= op.nbytes"),
    pattern("collective_mismatch", "Received data size doesn't match expected size"),
    pattern("peer_lost", "Connection closed by peer",
            r"Connection closed by peer \[(?P<peer>[^\]]*)\](?::(?P<port>\d+))?"),
    pattern("peer_lost", "Connection reset by peer",
            r"(?:gloo|[Rr]ead error|socket|NCCL|Call to (?:recv|send)|TCPStore|recvValue|sendBytes"
            r"|c10d).*?(?:[\[ ](?P<peer>[\w.:-]+)(?:<\d+>|\]:\d+)[^\n]{0,20})?"
            r"Connection reset by peer"),
    pattern("peer_lost", "Broken pipe",
            r"(?:gloo|[Ww]rite error|TCPStore|sendBytes|NCCL|c10d)[^\n]*Broken pipe"),
    pattern("peer_lost", "Connection refused", r"gloo[^\n]*Connection refused"),
    pattern("peer_lost", "Connection closed by remote peer",
            r"Connection closed by remote peer (?P<peer>[^\s<]+)", what="nccl"),
    pattern("peer_lost", "ncclRemoteError", what="nccl"),
    pattern("peer_lost", "remote process exited or there was a network error", what="nccl"),
    pattern("peer_lost", "unhandled system error", r"NCCL.*unhandled system error", what="nccl"),
    pattern("peer_lost", "Got completion from peer",
            r"Got completion from peer (?P<peer>[^\s<]+)", what="infiniband"),
    pattern("peer_lost", "failed to recv, got 0 bytes", what="store"),
    pattern("peer_lost", "Connect to ",
            r"Connect to (?P<peer>[\w.:-]+)<\d+> failed : (?!Connection timed)", what="nccl"),
    pattern("peer_lost", "JAX distributed service detected fatal errors", what="jax"),
    pattern("peer_lost", "Failed to send RPC to coordination service", what="jax"),
    pattern("peer_lost", " heartbeat timeout",
            r"Task /job:\w+/replica:\d+/task:(?P<_names>\d+) heartbeat timeout", more=_missing),
    pattern("peer_lost", "Did the remote server shutdown or crash", what="store"),
    # Rendezvous
    pattern("rendezvous", " expected, but not set",
            r"environment variable (?P<variable>\w+) expected, but not set", what="unset"),
    pattern("rendezvous", "clients joined",
            r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. "
            r"(?P<joined>\d+)/(?P<wanted>\d+) clients joined", what="too_few"),
    pattern("rendezvous", "wait timeout after ",
            r"wait timeout after (?P<_ms>\d+)ms, keys: (?P<keys>[^\n]*)",
            more=_seconds, what="store_timeout"),
    pattern("rendezvous", "The client socket has ",
            r"The client socket has (?:timed out after (?P<timeout_ms>\d+)ms|failed).{0,40}?"
            r"connect to (?:any network address of )?\((?P<host>[^,)]+), (?P<port>\d+)\)",
            what="no_server"),
    pattern("rendezvous", "Barrier timed out", r"Barrier timed out.*(?:PjRT|Connect)",
            what="too_few"),
    pattern("rendezvous", "(gai error: ",
            r"network addresses of \((?P<host>[^,)]+), (?P<port>\d+)\) cannot be retrieved",
            what="no_server"),
    pattern("rendezvous", "Gloo connectFullMesh failed", what="no_server"),
    pattern("rendezvous", "Bootstrap : no socket interface found", what="no_interface"),
    pattern("rendezvous", "RendezvousTimeoutError", what="too_few"),
    pattern("rendezvous", "RendezvousConnectionError", what="no_server"),
    pattern("rendezvous", "RendezvousClosedError", what="closed"),
    pattern("rendezvous", "Default process group has not been initialized", what="not_initialized"),
    pattern("address_in_use", "EADDRINUSE", r"(?:port: (?P<port>\d+).*)?EADDRINUSE"),
    pattern("address_in_use", "ddress already in use",
            r"(?:Errno 98\]|bind|listen|socket|OSError|error while attempting|c10d)[^\n]*"
            r"[Aa]ddress already in use"),
    # Data loaders
    pattern("worker_killed", "is killed by signal: ",
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) is killed by signal: "
            r"(?P<signal_name>[A-Za-z /]+)"),
    pattern("worker_exited", "exited unexpectedly",
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) exited unexpectedly"
            r"(?: with exit code (?P<exitcode>-?\d+))?"),
    pattern("worker_exited", "terminated abruptly",
            r"(?:A process in the process pool was|A child process) terminated abruptly"),
    pattern("worker_exited", "A worker process managed by the executor was unexpectedly"),
    pattern("worker_exited", "workers are no longer alive", points_above=True),
    pattern("worker_exited", "workers died while running it"),
    pattern("worker_exited", "subprocesses has abruptly died"),
    pattern("worker_exited", "Pin memory thread exited unexpectedly"),
    pattern("worker_exited", "died unexpectedly",
            r"The (?:worker|actor) died unexpectedly (?:while|before)"),
    # Of an exception that Python could not print, since another came by a signal.
    pattern("worker_conn_reset", "object type name: ",
            r"object type name: (?:EOFError|ConnectionResetError|BrokenPipeError)"),
    pattern("worker_timeout", "DataLoader timed out after",
            r"DataLoader timed out after (?P<seconds>\d+) seconds"),
    pattern("worker_file_not_found", "unable to open shared memory object",
            r"unable to open shared memory object .*No such file or directory"),
    pattern("shm_full", "unable to allocate shared memory",
            r"unable to allocate shared memory\(shm\) for file (?P<file><[^>]*>): No space left"),
    pattern("shm_full", "rror while creating shared memory segment", what="nccl"),
    pattern("shm_full", "are out of shared memory", what="bus_error"),
    pattern("shm_full", "nsufficient shared memory", what="bus_error"),
    pattern("shm_full", "No space left on device",
            r"(?:/dev/shm|</torch_\d+).*No space left on device|No space left on device.*/dev/shm"),
    pattern("files_limit", "Too many open files",
            r"(?:Errno 24\]|RuntimeError|OSError|Error:)[^\n]*Too many open files"
            r"|Too many open files\. Communication|Too many open files \(24\)"),
    pattern("files_limit", "items of ancdata", r"received \d+ items of ancdata"),
    # Files
    pattern("torch_save_short", "unexpected pos ",
            r"unexpected pos (?P<position>\d+) vs (?P<wanted>\d+)"),
    pattern("torch_save_short", "PytorchStreamWriter failed writing file"),
    pattern("torch_save_short", "basic_ios::clear: iostream error"),
    pattern("disk_full", "errno = 28", r"[Cc]an't write data.*errno = 28"),
    # Numbers
    pattern("nan", "returned nan values in its",
            r"Function '(?P<function>\w+)' returned nan values"),
    pattern("nan", "Loss is nan, stopping training"),
    pattern("nan", "is nan or inf", r"loss returned in `training_step` is nan or inf"),
    pattern("nan", "Your loss is probably exploding"),
    pattern("nan", "Current loss scale already at minimum"),
    pattern("nan", "encountered in jit(", r"FloatingPointError: invalid value \(nan\)"),
)  # fmt: skip
