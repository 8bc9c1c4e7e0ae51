"""What a stack means: what a thread waits for, and on which line of the user's.

A call into C leaves no frame, so the text of that line is read from its file, too.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast import _text as words
from holdfast._environment.processes.activity import is_users
from holdfast._environment.processes.threads import STDIN_PIPE, is_terminal
from holdfast._store.folder.plain_file import MOST_RECORD_BYTES, open_file

# -- One line of a user's source -------------------------------------------------------------------
# A script may lie on the very file system that does not answer. So a thread reads it, and is left
# behind after a moment.

_WAIT_SECONDS = 0.5
_OLD_SECONDS = 60.0  # after which a line is read again: the script may have been edited
_MOST_CHARACTERS = 400
_known: dict[tuple[str, int], tuple[float, str]] = {}
_stuck: set[str] = set()  # files that did not answer: they are not read a second time


def source_line(file: str, line: int) -> str:
    """The text of a line without its indentation; empty if it cannot be read."""
    if not file.startswith("/") or line < 1 or file in _stuck:
        return ""
    known = _known.get((file, line))
    if known is not None and time.monotonic() - known[0] < _OLD_SECONDS:
        return known[1]
    found: list[str] = []
    reader = threading.Thread(target=_read, args=(file, line, found), daemon=True)
    try:
        reader.start()
    except RuntimeError:  # no thread can be started: do without the line
        return ""
    reader.join(_WAIT_SECONDS)
    if reader.is_alive():
        _stuck.add(file)
        return ""
    text = found[0] if found else ""
    _known[(file, line)] = (time.monotonic(), text)
    return text


def _read(file: str, line: int, found: list[str]) -> None:
    try:
        # A record names it, and a record may name anything. A link is common among sources.
        with open_file(Path(file).resolve(), most_bytes=MOST_RECORD_BYTES) as source:
            for text in islice(source, line - 1, line):
                found.append(text.decode("utf-8", "replace").strip()[:_MOST_CHARACTERS])
    except (OSError, ValueError):
        return


Record = dict[str, Any]

_FORKED = re.compile(r"/multiprocessing/process\.py$")  # outside of it are its parent's frames
_HELPERS = re.compile(r"/multiprocessing/(?:resource_tracker|forkserver)\.py$")
_NAMELESS = ("loader", "pool")  # no function says more than the words do
_IMPORT = "<frozen importlib"
_WRAPPERS = re.compile(
    r"wrapper|wrapped|inner|_fn|_?_?call_?_?|_(?:wrapped_)?call_impl|decorate_context"
)
_SPECIFIC = ("fuse", "nfs", "netfs", "filelock", "fifo", "disk", "frozen", "traced")
_MOST_RANKS = 8  # that are named one by one
WAITS_FOR_RANKS = ("collective", "rendezvous", "agree")

# -- Which frames tell what a thread waits for -----------------------------------------------------
# Files are those of Python's library, of torch and of other libraries of trainings; names are the
# last part of a qualified name. A call into C leaves no frame of Python: then the kernel's word for
# the place where the thread sleeps tells, or the text of the user's line.

# What each kind of wait is called, where a row has no words of its own.
WORDS = {
    "asyncio": "waits in the event loop of asyncio",
    "backward": "is in backward()",
    "child": "waits for a process to end",
    "collective": "waits in {name}",
    "compile": "is in torch.compile",
    "debugger": "is in a debugger",
    "device": "waits for the GPU",
    "disk": "waits for a disk",
    "event": "waits for another thread's sign",
    "fifo": "opens a FIFO that no other process has open",
    "file": "is in a call for a file",
    "filelock": "waits for a lock on a file",
    "frozen": "is frozen",
    "fuse": "waits for a FUSE file system",
    "futex": "waits for a lock, or in a call of C for another thread",
    "input": "waits for keyboard input",
    "join": "waits for a thread to end",
    "loader": "waits for its data loader",
    "lock": "waits for a lock",
    "netfs": "waits for a network file system",
    "network": "waits for the network",
    "nfs": "waits for an NFS server",
    "pipe": "waits for a message of another process",
    "poll": "waits for a descriptor",
    "prompt": "waits at a prompt",
    "queue": "waits for an item of a queue",
    "rendezvous": "waits for the other ranks to come",
    "sleep": "sleeps",
    "traced": "is held by a tracer",
}
_COLLECTIVES = (
    r"all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|reduce|gather|scatter|barrier"
    r"|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv|all_gather_into_tensor"
    r"|reduce_scatter_tensor|all_to_all_single|all_reduce_coalesced|all_gather_coalesced"
    r"|all_gather_object|gather_object|broadcast_object_list|scatter_object_list|wait_tensor"
)
# (file, names or "" for all, kind, words). The frame nearest to the user's own line decides, and of
# one frame the first row that fits.
_RULES = (
    (r"/(?:pdb|bdb)\.py$|/_?pydev|/debugpy/|/ipdb/|/pudb/", "", "debugger"),
    (r"/IPython/|/prompt_toolkit/|/code\.py$", "", "prompt"),
    (r"/torch/utils/data/dataloader\.py$", "", "loader"),
    (r"/torch/distributed/distributed_c10d\.py$", _COLLECTIVES, "collective"),
    (
        r"/torch/distributed/(?:rendezvous|elastic/.*|distributed_c10d|device_mesh)\.py$",
        r"init_process_group|_store_based_barrier|new_group|rendezvous|.*_rendezvous_handler"
        r"|_create_c10d_store|_new_process_group_helper|next_rendezvous|init_device_mesh",
        "rendezvous",
    ),
    (r"/torch/distributed/_functional_collectives\.py$", "", "collective"),
    (
        "/torch/distributed/(?:fsdp|_composable|tensor|pipelining|checkpoint)/",
        ".*(?:unshard|all_gather|reduce|wait|broadcast|barrier|redistribute|pre_forward).*",
        *("collective", "waits in {name} of torch.distributed"),
    ),
    (
        r"/torch/nn/parallel/distributed\.py$",
        "_sync_.*|_pre_forward|_verify.*|_ddp_init_helper|.*broadcast_coalesced|join|__init__",
        *("collective", "waits in DistributedDataParallel"),
    ),
    (r"/torch/(?:_dynamo/convert_frame|_inductor/compile_fx)\.py$", "", "compile"),
    (
        r"/torch/(?:_tensor|autograd/[^/]*)\.py$",
        *("backward|grad|_engine_run_backward", "backward"),
    ),
    ("/torch/cuda/", "synchronize|wait|query", "device"),
    (r"/torch/multiprocessing/spawn\.py$", "", "child", "waits for the processes that it started"),
    (
        r"/multiprocessing/pool\.py$",
        "get|wait|next|map|starmap|apply|join|__exit__|imap.*",
        *("pool", "waits for the result of a pool"),
    ),
    (
        r"/concurrent/futures/(?:_base|thread|process)\.py$",
        "result|exception|wait|result_iterator|_result_or_cancel|as_completed|shutdown|__exit__",
        *("pool", "waits for the result of an executor"),
    ),
    ("/joblib/", "", "pool", "waits for the result of joblib"),
    (r"/torch/serialization\.py$", "", "file", "is in torch.{name}"),
    (r"/filelock/|/portalocker/|/torch/utils/file_baton\.py$", "", "filelock"),
    (r"/multiprocessing/managers\.py$", "", "pipe", "waits for a manager's process"),
    (r"/multiprocessing/queues\.py$", "", "queue", "waits for a queue between processes"),
    (r"/multiprocessing/synchronize\.py$", "", "lock", "waits for a lock between processes"),
    (r"/multiprocessing/(?:process|popen_\w+)\.py$", "join|wait|poll", "child"),
    (r"/multiprocessing/connection\.py$", "", "pipe"),
    (r"/queue\.py$", "get", "queue"),
    (r"/queue\.py$", "put", "queue", "waits for room in a queue"),
    (r"/queue\.py$", "join", "queue", "waits until a queue is done"),
    (r"/threading\.py$", "join|_wait_for_tstate_lock|_shutdown", "join"),
    (r"/threading\.py$", "acquire|__enter__", "lock"),
    (r"/threading\.py$", "wait|wait_for|_wait|_enter", "event"),
    (r"/subprocess\.py$", "", "child", "waits for a process that it started"),
    ("/asyncio/", "", "asyncio"),
    (
        r"/(?:socket|ssl|smtplib|ftplib)\.py$|/http/client\.py$|/urllib/|/(?:requests|urllib3"
        r"|httpx|httpcore|aiohttp|botocore|boto3|s3fs|gcsfs|fsspec|huggingface_hub|wandb|mlflow"
        r"|comet_ml|neptune)/",
        *("", "network"),
    ),
    (
        r"/(?:pathlib|shutil|genericpath|posixpath|glob|tempfile|zipfile|tarfile|gzip|bz2|lzma"
        r"|mmap)\.py$|/(?:pathlib|zipfile|glob)/|/(?:PIL|h5py|pyarrow|netCDF4|zarr|tifffile"
        r"|imageio|safetensors)/|/numpy/lib/",
        *("", "file"),
    ),
    (r"/os\.py$", "walk|scandir|makedirs|_walk|fwalk|removedirs|renames", "file"),
)
# What the kernel calls the place where a thread sleeps.
_WCHANS: tuple[tuple[str, ...], ...] = (
    ("fuse|request_wait_answer", "fuse"),
    ("nfs|rpc_wait|rpc_run|rpc_exec", "nfs"),
    ("ceph|lustre|^ll_|^cl_|ldlm|ptlrpc|gpfs|cxiWait|cifs|smb|beegfs|orangefs|9p|v9fs", "netfs"),
    ("flock|posix_lock|fcntl_setlk|locks_lock", "filelock"),
    ("wait_for_partner|fifo_open", "fifo"),
    (
        r"io_schedule|folio_wait|wait_on_page|jbd2|ext4|xfs|btrfs|blk_|bit_wait|submit_bio"
        r"|filemap|rwsem_down",
        "disk",
    ),
    ("nanosleep|hrtimer_sleep|schedule_hrtimeout", "sleep"),
    ("^do_wait|wait4|wait_consider|^kernel_wait", "child"),
    ("n_tty|tty_read", "input"),
    ("pipe_read|pipe_wait|unix_stream", "pipe"),
    ("pipe_write", "pipe", "waits until its pipe is read"),
    ("skb_|inet_|tcp_|sk_wait|sock_|udp_", "network"),
    ("epoll|poll_schedule|do_sys_poll|do_poll|do_select|^poll|core_sys_select", "poll"),
    ("nvidia|nv_|os_acquire|uvm_", "device"),
    ("refrigerator|freezer", "frozen"),
    ("ptrace_stop", "traced"),
    ("futex", "futex"),
)
# The user's own line, where it calls into C.
_DEVICE_TEXT = r"\.(?:item|tolist|cpu|numpy|cuda)\(|synchronize\(|\.to\("
_TEXTS = (
    (r"\binput\(", "input"),
    (r"\bsleep\(", "sleep"),
    (r"^\s*(?:async )?with\b|\.acquire\(", "lock"),
    (r"\.backward\(", "backward"),
    (_DEVICE_TEXT, "device"),
    (r"\bflock\(|\blockf\(", "filelock"),
    (r"\.get\(", "queue"),
    (r"\.wait\(", "event"),
    (r"\.(?:recv|recvfrom|accept|connect)\(", "network"),
    (
        r"\bopen\(|\.(?:read|write|readline|readlines|flush|stat|exists|is_file|iterdir)\("
        r"|\bos\.(?:stat|listdir|open|read|write|fsync)\(|\bload\(",
        "file",
    ),
)
# System calls about a file, by its name or by its descriptor.
_FILE_CALLS = re.compile(
    "open|openat|f?stat|lstat|newfstatat|statx|access|readlink|rename|renameat2?|mkdir|rmdir"
    "|unlink|unlinkat|f?truncate|statfs|read|write|pread64|pwrite64|readv|writev|preadv|pwritev"
    "|close|lseek|fsync|fdatasync|getdents|getdents64|sendfile|sync|syncfs|copy_file_range"
)
# Where the kernel has no word for the place.
_CALLS: tuple[tuple[str, ...], ...] = (
    ("(?:clock_)?nanosleep", "sleep"),
    ("pause", "sleep", "waits for a signal"),
    ("wait4|waitid", "child"),
    ("flock", "filelock"),
    ("recvfrom|recvmsg", "network"),
    ("accept4?|connect", "network", "waits for a connection"),
)
_IN_C = "waits in a call of C"


def _meaning_of(
    rows: Iterable[tuple[str, ...]], text: str, *, whole: bool
) -> tuple[str, str] | None:
    """The kind and the words of the first row that fits."""
    fits = re.fullmatch if whole else re.search
    row = next((row for row in rows if text and fits(row[0], text)), None)
    return None if row is None else (row[1], row[2] if len(row) > 2 else WORDS[row[1]])


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.short} in {self.function}" if self.function else self.short

    @property
    def short(self) -> str:
        """As `train.py:41`."""
        parts = self.file.rsplit("/", 2)
        shown = parts[-1]
        if shown in ("__init__.py", "__main__.py") and len(parts) > 1:
            shown = f"{parts[-2]}/{shown}"
        return f"{shown}:{self.line}"

    @property
    def function(self) -> str:
        """As `load()`; empty at the top of a module."""
        last = self.name.rsplit(".", 1)[-1]
        return "" if last in ("", "<module>") else f"{last}()" if last[0] != "<" else last

    @property
    def text(self) -> str:
        return source_line(self.file, self.line)


@dataclass(frozen=True)
class ThreadStanding:
    """What one thread does: `waits for a lock` at `train.py:41 in step()`."""

    kind: str  # "lock", "queue", "event", "loader", "pool", "collective", "file", …; "" if unknown
    words: str
    call: str  # the function of the library that it is in, as `all_reduce`; empty if none
    place: Place | None  # the innermost line that is the user's own
    path: tuple[tuple[str, int], ...] = ()  # all lines that are the user's own, innermost first

    @property
    def at(self) -> str:
        return f" at {self.place}" if self.place else ""

    def tell(self) -> str:
        return f"{self.words}{self.at}"

    def where(self) -> str:
        """As `in all_reduce at train.py:41`."""
        at = self.place.short if self.place else ""
        where = " at ".join(filter(None, (self.call, at)))
        return f"in {where}" if where else "at an unknown place"


def places(frames: object) -> list[Place]:
    """The frames of a record, innermost first; of a forked worker only its own."""
    found: list[Place] = []
    for frame in words.records(frames):
        file, name = words.text(frame.get("file")), words.text(frame.get("name"))
        if _FORKED.search(file) and name.endswith("_bootstrap"):
            break
        found.append(Place(file, words.whole(frame.get("line")) or 0, name))
        if _HELPERS.search(file) and name == "main":
            break
    return found


def read_thread(thread: Record) -> ThreadStanding:
    return read_stack(
        thread.get("frames"),
        words.text(thread.get("wchan")),
        words.text(thread.get("state")),
        words.text(thread.get("call")),
        words.text(thread.get("call_path")),
    )


def read_stack(
    frames: object, wchan: str = "", state: str = "", call: str = "", path: str = ""
) -> ThreadStanding:
    """What a stack means.

    `wchan` is the kernel's word for where it sleeps, `call` the system call that it is in, and
    `path` the file behind that.
    """
    found = places(frames)
    first = next((i for i, each in enumerate(found) if is_users(each.file)), None)
    place = found[first] if first is not None else None
    way = tuple((each.file, each.line) for each in found if is_users(each.file))
    inside = found[:first]
    kind, said, name = _meaning(inside, place, wchan, state, call, path)
    function = "" if kind in _NAMELESS else name or _call_of(inside)
    return ThreadStanding(kind, said, function, place, way)


def _meaning(
    inside: Sequence[Place], place: Place | None, wchan: str, state: str, call: str, path: str
) -> tuple[str, str, str]:
    """Kind, words, and the function of the library where a rule names one."""
    kernel = _meaning_of(_WCHANS, wchan, whole=False)
    if kernel is not None and kernel[0] in _SPECIFIC:
        return kernel[0], f"{kernel[1]}{_of_file(path)}", ""
    if any(each.file.startswith(_IMPORT) for each in inside):
        return "import", "is in an import", "import"
    if is_terminal(path) and call in ("read", "select", "pselect6"):
        return "input", WORDS["input"], ""
    named_file = path.startswith("/") and not path.startswith(("/dev/", "/memfd:"))
    is_file_call = _FILE_CALLS.fullmatch(call) is not None
    if kernel is None and is_file_call and (named_file or not path) and state != "R":
        return "file", f"is in {call}{_of_file(path)}", ""
    for each in reversed(inside):
        last = each.name.rsplit(".", 1)[-1]
        for file, names, kind, *own in _RULES:
            if re.search(file, each.file) and (not names or re.fullmatch(names, last)):
                return kind, (own[0] if own else WORDS[kind]).format(name=last), last
    if path == STDIN_PIPE:
        return "stdin", "waits for its standard input, a pipe", ""
    if kernel is not None and kernel[0] != "futex":
        named = _of_file(path) if kernel[0] == "pipe" else ""  # a FIFO has a name
        return kernel[0], f"{kernel[1]}{named}", ""
    if (found := _meaning_of(_CALLS, call, whole=True)) is not None:
        return *found, ""
    if path.startswith("socket:") and is_file_call:
        return "network", WORDS["network"], ""
    is_users_own = place is not None and not inside and state != "R"
    text = place.text if place is not None and is_users_own else ""
    if (found := _meaning_of(_TEXTS, text, whole=False)) is not None:
        return *found, ""
    if kernel is not None or call == "futex":
        # A line that could be read and that takes no lock is a call into C.
        is_call = bool(inside) or place is None or bool(place.text)
        return ("call", _IN_C, "") if is_call else ("lock", WORDS["futex"], "")
    said = "computes" if state == "R" else "is in a call of C" if inside or place else "stands"
    return "", said, ""


def _of_file(path: str) -> str:
    return f" ({path})" if path.startswith("/") else ""


def _call_of(inside: Sequence[Place]) -> str:
    names = (each.name.rsplit(".", 1)[-1] for each in reversed(inside))
    return next((name for name in names if not _WRAPPERS.fullmatch(name)), "")


def trainer_of(look: Record) -> Record:
    """The training process of an inspection, which comes first."""
    found = words.records(look.get("processes"))
    return found[0] if found else {}


def main_thread(process: Record) -> Record:
    threads = words.records(process.get("threads"))
    return next((t for t in threads if t.get("is_main") is True), threads[0] if threads else {})


def standing_of(look: Record) -> ThreadStanding:
    process = trainer_of(look)
    thread = main_thread(process)
    for name in ("wchan", "state"):
        if not thread.get(name):
            thread = {**thread, name: process.get(name)}
    found = read_thread(thread)
    text = found.place.text if found.place is not None and not found.kind else ""
    threads = words.records(process.get("threads"))
    # The driver has started threads in it.
    uses_gpu = any(words.text(each.get("name")).startswith("cuda") for each in threads)
    if uses_gpu and re.search(_DEVICE_TEXT, text):
        # A thread that waits for a GPU spins, and looks as if it computed.
        return replace(found, kind="device", words=WORDS["device"])
    return found


def rank_of(look: Record) -> int | None:
    return words.whole(look.get("rank"))


def name_ranks(ranks: Iterable[int | None]) -> str:
    """As `rank 2`, `ranks 0, 1 and 3`, `3 ranks`.

    >>> name_ranks([2]), name_ranks([0, 1, 3]), name_ranks([])
    ('rank 2', 'ranks 0, 1 and 3', 'no rank')
    """
    known = sorted({rank for rank in ranks if rank is not None})
    if not known:
        return "no rank"
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > _MOST_RANKS:
        return f"{len(known)} ranks ({known[0]}, {known[1]}, … {known[-1]})"
    return f"ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


def merge_looks(looks: Sequence[Record], missing: Sequence[int] = ()) -> list[str]:
    """Where each rank stands: one line for all on the same line, the largest group first.

    As `3 ranks in all_reduce at train.py:41 (0, 1 and 3)` and `rank 2 in dataset.py:17 (load)`.
    """
    if len(looks) == 1 and not missing and not rank_of(looks[0]):
        return [f"it is {_line_of(looks[0])}"]
    groups: dict[str, list[int | None]] = {}
    for look in looks:
        groups.setdefault(_line_of(look), []).append(rank_of(look))
    lines = []
    for line, ranks in sorted(groups.items(), key=lambda each: (-len(each[1]), str(each[1]))):
        known = [rank for rank in ranks if rank is not None]
        who = name_ranks(known) if known else "it is"
        if len(known) > 1:
            who = f"{len(known)} ranks ({who.removeprefix('ranks ')})"
        lines.append(f"{who} {line}")
    return [*lines, f"{name_ranks(missing)}: no answer"] if missing else lines


def _line_of(look: Record) -> str:
    found = standing_of(look)
    trainer, paused = trainer_of(look), words.text(look.get("paused"))
    said = f" ({found.words})" if not found.call and found.words else ""
    said = ", stopped" if trainer.get("state") == "T" else said
    said = ", frozen" if trainer.get("frozen") is True else said
    return f"{found.where()}{f', held by {paused}' if paused else said}"
