"""The process of a fork server: it imports a framework once, and forks a script for each request.

    fork_server_main.py FRAMEWORK SOCKET

A request is one message: JSON, and two descriptors, the output of the script and a pipe. The child
writes its pid into the pipe, the server writes the exit status. When the socket is closed, the
server kills all its children and exits.

A child behaves as a freshly started `python SCRIPT ARGUMENTS`. There are two differences: it has
the /proc/PID/cmdline and the hash seed of the server, and it clears no modules when it exits.
Nothing here may start a thread before a fork, because a child does not have the threads of its
parent.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import io
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

#: The imports of a training, by the name of a framework.
_OF_TORCH = (
    *("multiprocessing.popen_spawn_posix", "multiprocessing.queues", "numpy.ma", "torch._dynamo"),
    *("torch.utils.data", "torch.nn.parallel.distributed", "torch.distributed.tensor"),
    *(
        "holdfast._run.data.session_feeds",
        "holdfast._tools.prove.witness.torch_watch",
        "holdfast.torch.adapter",
        "holdfast.torch.group",
    ),
    *("holdfast.torch.launch", "holdfast.torch.loader"),
)
MODULES = {
    "nothing": (),
    "numpy": ("numpy.ma", "holdfast._adapters.numpy"),
    "torch": _OF_TORCH,
    "lightning": (*_OF_TORCH, "lightning.pytorch", "holdfast.lightning.callback"),
    "transformers": (*_OF_TORCH, "transformers.trainer", "holdfast.transformers.callback"),
    "jax": ("jax.numpy", "optax", "holdfast.jax.adapter"),
    "tensorflow": (
        *(
            "tensorflow",
            "keras",
            "holdfast._run.data.tensorflow_feed",
            "holdfast.tensorflow.adapter",
        ),
        "holdfast.keras.adapter",
    ),
}
_OF_ALL = (
    *("holdfast._run.saving.rank_orders", "holdfast._run.saving.launch", "holdfast._run.run"),
    *(
        "holdfast._run.saving.snapshots",
        "holdfast._tools.prove.witness.bootstrap",
        "holdfast._run.witness.observer",
    ),
)


def import_all(framework: str) -> None:
    for name in (*MODULES[framework], *_OF_ALL):
        importlib.import_module(name)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
        # The first step imports more of torch. No backward pass: that starts threads.
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.zeros(1)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all these modules


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a child for each request. It returns only in a child, with the request."""
    children: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and the pipe for its status
    while True:
        ready, _, _ = select.select([requests, *children], [], [])
        for pidfd in set(ready) - {requests}:
            pid, pipe = children.pop(pidfd)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, b"status %d\n" % os.waitstatus_to_exitcode(status))
            os.close(pipe)
            os.close(pidfd)
        if requests not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            for pid, _ in children.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        output, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            for pidfd, (_, other) in children.items():
                os.close(pidfd)
                os.close(other)
            requests.close()
            return {**json.loads(message), "output": output, "pipe": pipe}
        os.close(output)
        children[os.pidfd_open(pid)] = pid, pipe


def become(request: dict[str, Any]) -> str:
    """Make this child what a new process would be, and return the path of its script."""
    if request["new_session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)  # a signal to its group must not reach the server
    for target in (1, 2):
        os.dup2(request["output"], target)
    os.close(request["output"])
    os.write(request["pipe"], b"pid %d\n" % os.getpid())
    os.close(request["pipe"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["unbuffered"] or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = _unbuffered(sys.stdout)
        sys.stderr = sys.__stderr__ = _unbuffered(sys.stderr)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does this at a fork
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = request["cwd"]
    script = request["argv"][0]
    sys.argv = request["argv"]
    sys.orig_argv = [sys.executable, *request["argv"]]
    sys.path[:] = [str(Path(script).resolve().parent), *_python_path(), *_PATH]
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = ModuleType("__main__")
    path = str(Path(script).absolute())
    main.__dict__.update(
        __file__=path,
        __cached__=None,
        __annotations__={},
        __builtins__=sys.modules["builtins"],
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        import sitecustomize  # noqa: F401  as the start of Python does
    return path


def _python_path() -> list[str]:
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(entry).absolute()) for entry in entries if entry]


def _unbuffered(stream: Any) -> io.TextIOWrapper:
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)


def run(path: str) -> NoReturn:
    """Run the script and exit as Python does, but without clearing the modules of a framework."""
    status, interrupted = 0, False
    try:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as leaving:
        status = _status_of(leaving)
    except BaseException as error:  # noqa: BLE001  Python shows it, whatever it is
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = error.__traceback__ and error.__traceback__.tb_next  # not our frame
        error.__traceback__ = sys.last_traceback
        try:
            sys.excepthook(sys.last_type, error, sys.last_traceback)
        except SystemExit as leaving:
            status = _status_of(leaving)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _status_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    # The folder of a script takes the place of the first entry.
    _PATH = [entry for entry in sys.path[1:] if entry not in _python_path()]
    sys.path[:] = sys.path[1:]
    import_all(sys.argv[1])
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose threads"
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(become(serve(socket.socket(fileno=int(sys.argv[2])))))
