"""A process that has imported torch already, and forks a training whenever it is asked to.

Each training is a process of its own, with its own session, signals and output; only the
seconds that an import takes are saved. Requests come as lines of JSON, and so do the
answers: the pid at once, the exit status as subprocess would give it when it has ended.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


def serve() -> dict[str, Any]:
    """Fork a child for each request; returns, in a child, with what it is to do."""
    ends: dict[int, tuple[int, int]] = {}  # pidfd: number of the request, pid
    unread = b""
    while True:
        ready, _, _ = select.select([0, *ends], [], [])
        for descriptor in ready:
            if descriptor in ends:
                number, pid = ends.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                _answer({"number": number, "status": os.waitstatus_to_exitcode(status)})
                continue
            received = os.read(0, 65536)
            if not received:
                for _, pid in ends.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    for inherited in ends:
                        os.close(inherited)
                    _become(request["output"])
                    return dict(request)
                ends[os.pidfd_open(pid)] = request["number"], pid
                _answer({"number": request["number"], "pid": pid})


def _answer(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _become(output: str) -> None:
    """Leave everything of the zygote's behind: session, input, output."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, nothing), (1, written), (2, written)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(written)


def warm_up() -> None:
    """Import whatever a training imports, once and before any life begins."""
    import multiprocessing.popen_spawn_posix
    import multiprocessing.queues  # noqa: F401

    import numpy.ma  # noqa: F401
    import torch

    import holdfast._custody.launch
    import holdfast._run
    import holdfast._save.snapshots
    import holdfast.torch.loader  # noqa: F401

    torch.set_num_threads(1)
    # A first step imports half of torch. No backward pass: a fork would lose its threads.
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    optimizer.zero_grad()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any script


def run_and_leave(train: Callable[[], Any]) -> NoReturn:
    """As the interpreter does, but for clearing half a gigabyte of modules, object by object."""
    status, interrupted = 0, False
    try:
        train()
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        sys.excepthook(*sys.exc_info())
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


if __name__ == "__main__":
    from tests.data import train

    warm_up()
    sys.argv[1:] = serve()["argv"]
    run_and_leave(lambda: train.main(sys.argv[1:]))
